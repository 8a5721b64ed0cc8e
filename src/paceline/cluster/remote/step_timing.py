"""Times training steps of a job on the machine it runs on. Requires Paceline there."""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline().decode())
    try:
        timing = importlib.import_module("paceline.worker.step_timing")
    except ImportError as error:
        answer = {"missing": str(error)}
    else:
        try:
            answer = timing.time_job(request["job"], request["share"])
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Measurements of earlier runs of the same job, from the run folders next to a new one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.telemetry.run_folder import RunFolder

SAME_JOB = ("model", "data", "batch", "dtype", "device", "script")
SAME_SETTINGS = ("slow", "delay")
SAME_RUN = ("workers", "engine", "threads", "machine")
MAX_RUNS = 50
"""Number of run folders that are examined, the newest first."""


def recall_corrections(out: Path, config: Mapping[str, Any]) -> dict[str, float]:
    """Returns measured by predicted throughput of strategies, from the newest run like this one.

    Empty if no completed run next to `out` had the same job, workers and machine.
    """
    found = [f for f in out.parent.glob("*/result.json") if f.parent.resolve() != out.resolve()]
    for path in sorted(found, key=_modified, reverse=True)[:MAX_RUNS]:
        try:
            before = json.loads(RunFolder(path.parent).config.read_text(encoding="utf-8"))
            result = json.loads(path.read_text(encoding="utf-8"))
            same = [before["job"].get(n) == config["job"].get(n) for n in SAME_JOB]
            same += [before["settings"].get(n) == config["settings"].get(n) for n in SAME_SETTINGS]
            same += [before[n] == config[n] for n in SAME_RUN]
            if all(same) and result["status"] == "done":
                known = [d["figures"].get("corrections") for d in result.get("decisions", ())]
                if any(known):
                    last: Mapping[str, float] = next(filter(None, reversed(known)))
                    return {str(name): float(factor) for name, factor in last.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # A run does not depend on folders of others.
    return {}


def _modified(path: Path) -> float:
    """Returns the time of the last change; 0 if the file was removed in the meantime."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

"""Checks verdicts in real runs with and without a cause.

python bench/verdicts.py --causes calm --repeats 20 [--save]

With --save, results are added to today's file; a cause that is measured again is replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from causes import CAUSES, Cause, run_with, why_not

from paceline.telemetry.reader import read_run
from paceline.telemetry.verdicts import verdicts
from results_store import dated

OUTSIDE = {"neighbours"}
"""Correct verdicts about other programs, not about the created cause."""
CALM_S = 10.0
CAUSE_S = 30.0


def measure(cause: Cause) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        train_s = CALM_S if cause.rule is None else CAUSE_S
        folder = run_with(cause, Path(name), train_s=train_s, until=cause.rule)
        run = read_run(folder)
        return {
            "live": sorted({e.rule for e in run.verdict_events}),
            "lines": [e.text for e in run.verdict_events if not e.is_over],
            "whole": sorted({v.rule for v in verdicts(run)}),
            "outside_cores": outside(run),
        }


def outside(run: Any) -> float | None:
    """Returns the load of other programs, for interpreting the results."""
    from paceline.telemetry.verdicts import summarize_window

    window = summarize_window(run, None)
    return round(window.hosts[0].cores_others, 2) if window is not None and window.hosts else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--causes", default="all", help="names, separated by commas")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--add", action="store_true", help="add to earlier repeats of a cause")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    names = list(CAUSES) if options.causes == "all" else options.causes.split(",")
    path = dated("verdicts")
    body: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        cause = CAUSES[name]
        missing = why_not(cause)
        if missing is not None:
            print(f"{name}: skipped, {missing}")
            continue
        runs = list(body.get(name, {}).get("runs", ())) if options.add else []
        for _ in range(options.repeats):
            runs.append(measure(cause))
            print(f"{name}: {runs[-1]}", flush=True)
            expected = [cause.rule] if cause.rule else []
            body[name] = {
                "expected": expected,
                "runs_total": len(runs),
                "runs_as_expected": sum(set(r["live"]) - OUTSIDE == set(expected) for r in runs),
                "runs_with_neighbours": sum(bool(OUTSIDE & set(r["live"])) for r in runs),
                "runs": runs,
            }
            if options.save:
                path.write_text(json.dumps(body, indent=2) + "\n")
    for name in names:
        if name in body:
            row = body[name]
            print(f"{name}: {row['runs_as_expected']} of {row['runs_total']} as expected")


if __name__ == "__main__":
    main()

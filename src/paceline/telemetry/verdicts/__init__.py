"""Verdicts: what limits a run, found by small rules over its resource metrics.

`verdicts(run)` is a pure function of the recorded metrics. Each rule matches one cause. If a cause
explains the symptoms of another, the explained one is not reported.
"""

from __future__ import annotations

from paceline.telemetry.reader import RunRecord
from paceline.telemetry.verdicts import rules as _rules
from paceline.telemetry.verdicts.verdict import RULES, Rule, Verdict, verdict_rule
from paceline.telemetry.verdicts.window import RunWindow, summarize_window

__all__ = [
    "LIVE_S",
    "RULES",
    "Rule",
    "RunWindow",
    "Verdict",
    "summarize_window",
    "verdict_rule",
    "verdicts",
]

LIVE_S = 6.0
"""A run in progress is judged by its last seconds; a straggler is reported well within 10 s."""

assert _rules  # Importing the module registers its rules.


def verdicts(run: RunRecord, last_s: float | None = None) -> list[Verdict]:
    """Returns the verdicts, the costliest first, over the whole run or its last `last_s` seconds.

    Returns none for a run with less than a few seconds of training.
    """
    window = summarize_window(run, last_s)
    if window is None:
        return []
    found: list[Verdict] = []
    for rule in RULES:
        found.extend(rule(window, found))
    return sorted(found, key=lambda verdict: -verdict.share)

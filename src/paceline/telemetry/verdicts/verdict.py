"""The `Verdict` type and the registry of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.telemetry.events import VerdictChanged
from paceline.telemetry.verdicts.window import RunWindow


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bottleneck: one line of text, a suggestion, and the measurements behind them."""

    rule: str
    who: str
    """`worker-3`, `server-0`, the name of a host, or `run` for the whole run."""
    text: str
    suggestion: str
    share: float
    """Approximate fraction of the step time that it costs, 0 to 1."""
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.who

    @property
    def line(self) -> str:
        return f"{self.text}: {self.suggestion}"

    def to_event(self, t: float, state: str) -> VerdictChanged:
        return VerdictChanged(
            t=round(t, 6),
            state=state,
            rule=self.rule,
            who=self.who,
            text=self.text,
            suggestion=self.suggestion,
            figures=self.figures,
        )


Rule = Callable[[RunWindow, list[Verdict]], list[Verdict]]
"""Receives the window and the verdicts of earlier rules; returns its own verdicts."""

RULES: list[Rule] = []
"""All rules, in the order in which they run."""


def verdict_rule(rule: Rule) -> Rule:
    """Registers a rule; used as a decorator."""
    RULES.append(rule)
    return rule

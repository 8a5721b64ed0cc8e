"""Policies that switch by measurements of the run; pure functions of its history."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.history import History
from paceline.protocol.switch_policy import RunHorizon, SwitchDecision
from paceline.protocol.throughput import ThroughputWindow, find_straggler
from paceline.strategies.switch.auto_policy import FIRST, SECOND


@dataclass(frozen=True, kw_only=True)
class PlateauPolicy:
    """Compares the mean validation loss of two adjacent windows of epochs."""

    window: int
    tolerance: float
    patience: int

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        if history.phase != FIRST:
            return None
        losses = [row.val_loss for row in history.rows if row.val_loss is not None]
        if len(losses) < 2 * self.window + self.patience - 1:
            return None
        gains = []
        for back in range(self.patience):
            end = len(losses) - back
            now = sum(losses[end - self.window : end]) / self.window
            before = sum(losses[end - 2 * self.window : end - self.window]) / self.window
            gains.append((before - now) / max(abs(before), 1e-12))
        if max(gains) >= self.tolerance:
            return None
        return SwitchDecision(
            SECOND,
            f"plateau: val_loss improved by {100 * max(gains):.2f}% at most in {self.patience} "
            f"epochs, below {100 * self.tolerance:g}%",
            "plateau",
            measurements={"improvements": gains},
        )


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy:
    """greedy: second strategy while there is a straggler. elastic: excludes the straggler."""

    horizon: RunHorizon
    policy: str
    quota: float
    windows: int

    def next_stop(self, history: History) -> int | None:
        """The sample count at which the quota is reached if nothing happens before."""
        left = self._quota_samples() - history.samples_under(FIRST)
        return history.samples + left if history.phase == FIRST and left > 0 else None

    def _quota_samples(self) -> int:
        return round(self.quota * self.horizon.total)

    def decide(self, history: History) -> SwitchDecision | None:
        if history.samples_under(FIRST) >= self._quota_samples():
            if history.phase == SECOND:
                return None
            return SwitchDecision(
                SECOND,
                f"the first strategy has completed its quota of {100 * self.quota:g}%",
                "quota",
            )
        windows = history.throughput.latest(history.phase, self.windows)
        if len(windows) < self.windows:
            return None
        slow = find_straggler(windows, self.windows)
        if slow is not None and slow not in history.excluded_workers and history.phase == FIRST:
            reason = f"worker {slow} computes {_times_slower(windows[-1], slow):.1f}x slower"
            figures = {"speeds": windows[-1].speeds}
            if self.policy == "elastic":
                return SwitchDecision(
                    FIRST, f"{reason}; it is excluded", "straggler", slow, measurements=figures
                )
            return SwitchDecision(
                SECOND, f"{reason} than the median", "straggler", measurements=figures
            )
        if slow is None and history.phase == SECOND and self.policy == "greedy":
            return SwitchDecision(FIRST, f"no straggler in {self.windows} windows", "calm")
        return None


def _times_slower(window: ThroughputWindow, worker: int) -> float:
    median = sorted(window.speeds)[len(window.speeds) // 2]
    return median / window.speeds[worker]

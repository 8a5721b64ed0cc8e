"""Rules that switch by what the run shows; pure functions of its history."""

from __future__ import annotations

from paceline.errors import SpecError
from paceline.protocol.auto import FIRST, SECOND, AutoPolicy, RunHorizon
from paceline.protocol.history import History
from paceline.protocol.switch_policy import (
    NeverSwitch,
    SwitchDecision,
    SwitchPolicy,
    resolve_switch_points,
)
from paceline.protocol.throughput import ThroughputWindow, find_straggler
from paceline.specs.expression import format_expression
from paceline.specs.schedule import Schedule
from paceline.specs.strategy import Strategy, Switch
from paceline.specs.when import OnGain, OnPlateau, OnStraggler


class PlateauPolicy:
    """Compares the mean validation loss of two neighbouring windows of epochs."""

    def __init__(self, rule: OnPlateau) -> None:
        self._rule = rule

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        rule = self._rule
        if history.phase != FIRST:
            return None
        losses = [row.val_loss for row in history.rows if row.val_loss is not None]
        if len(losses) < 2 * rule.window + rule.patience - 1:
            return None
        gains = []
        for back in range(rule.patience):
            end = len(losses) - back
            now = sum(losses[end - rule.window : end]) / rule.window
            before = sum(losses[end - 2 * rule.window : end - rule.window]) / rule.window
            gains.append((before - now) / max(abs(before), 1e-12))
        if max(gains) >= rule.tolerance:
            return None
        return SwitchDecision(
            SECOND,
            f"plateau: val_loss improved by {100 * max(gains):.2f} % at most in {rule.patience} "
            f"epochs, below {100 * rule.tolerance:g} %",
            "plateau",
            measurements={"improvements": gains},
        )


class StragglerPolicy:
    """greedy: the second strategy while a straggler lasts. elastic: the straggler sits out."""

    def __init__(self, rule: OnStraggler, horizon: RunHorizon) -> None:
        self._rule = rule
        self._horizon = horizon

    def next_stop(self, history: History) -> int | None:
        """Where the quota is met if nothing happens until then."""
        left = self._quota_samples() - history.samples_under(FIRST)
        return history.samples + left if history.phase == FIRST and left > 0 else None

    def _quota_samples(self) -> int:
        return round(self._rule.quota * self._horizon.total)

    def decide(self, history: History) -> SwitchDecision | None:
        rule = self._rule
        if history.samples_under(FIRST) >= self._quota_samples():
            if history.phase == SECOND:
                return None
            return SwitchDecision(
                SECOND, f"the first strategy has had its {100 * rule.quota:g} %", "quota"
            )
        windows = history.throughput.latest(history.phase, rule.windows)
        if len(windows) < rule.windows:
            return None
        slow = find_straggler(windows, rule.windows)
        if slow is not None and slow not in history.excluded_workers and history.phase == FIRST:
            reason = f"worker {slow} computes {_times_slower(windows[-1], slow):.1f}x slower"
            figures = {"speeds": windows[-1].speeds}
            if rule.policy == "elastic":
                return SwitchDecision(
                    FIRST, f"{reason}: it sits out", "straggler", slow, measurements=figures
                )
            return SwitchDecision(
                SECOND, f"{reason} than the median", "straggler", measurements=figures
            )
        if slow is None and history.phase == SECOND and rule.policy == "greedy":
            return SwitchDecision(FIRST, f"no straggler in {rule.windows} windows", "calm")
        return None


def _times_slower(window: ThroughputWindow, worker: int) -> float:
    median = sorted(window.speeds)[len(window.speeds) // 2]
    return median / window.speeds[worker]


def make_switch_policy(
    strategy: Strategy,
    *,
    workers: int,
    samples_per_epoch: int,
    epochs: int | None,
    batch: int,
    schedule: Schedule,
) -> SwitchPolicy:
    """The policy of a strategy; raises SpecError for one that cannot be followed in this run."""
    if not isinstance(strategy, Switch):
        return NeverSwitch()
    names = [f"at={format_expression(p.to_value())}" for p in strategy.at]
    points = [p.resolve(samples_per_epoch, epochs) for p in strategy.at]
    rule = strategy.when
    if isinstance(rule, OnPlateau):
        return PlateauPolicy(rule)
    if rule is not None:
        if epochs is None:
            raise SpecError(f"when={rule} needs the length of the run: pass epochs= to prepare()")
        total = samples_per_epoch * epochs
        staleness = strategy.phases[SECOND].expected_staleness(workers)
        horizon = RunHorizon(samples_per_epoch, total, batch, schedule, staleness)
        if isinstance(rule, OnStraggler):
            return StragglerPolicy(rule, horizon)
        if isinstance(rule, OnGain):
            return AutoPolicy(horizon)
        drops = schedule.drops(per_epoch=samples_per_epoch, total=total)
        if len(drops) < len(strategy.phases) - 1:
            raise SpecError(
                f"when=lr_drop needs {len(strategy.phases) - 1} drop(s) of the learning rate, "
                f"schedule {schedule} has {len(drops)}: use milestones(...)"
            )
        points = [round(d) for d in drops[: len(strategy.phases) - 1]]
        names = ["lr_drop"] * len(points)
    return resolve_switch_points(
        names, points, samples_per_epoch=samples_per_epoch, epochs=epochs, batch=batch
    )

"""Rules that switch by what the run shows; pure functions of its history."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.protocol.history import History
from paceline.protocol.pulse import Window, find_straggler
from paceline.protocol.switch import Decision, Policy, Stay, place_points
from paceline.specs.schedule import Schedule
from paceline.specs.strategy import Strategy, Switch
from paceline.specs.text import write
from paceline.specs.when import Auto, Plateau, Straggler

FIRST, SECOND = 0, 1


@dataclass(frozen=True)
class Horizon:
    """How long the run is, and which learning rate is in force where."""

    samples_per_epoch: int
    total: int
    batch: int
    schedule: Schedule

    def progress(self, samples: int) -> float:
        return samples / self.total

    def lr_factor(self, samples: int) -> float:
        return self.schedule.factor(samples, per_epoch=self.samples_per_epoch, total=self.total)


class PlateauPolicy:
    """Compares the mean validation loss of two neighbouring windows of epochs."""

    def __init__(self, rule: Plateau) -> None:
        self._rule = rule

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> Decision | None:
        rule = self._rule
        if history.phase != FIRST:
            return None
        losses = [row["val_loss"] for row in history.rows if row.get("val_loss") is not None]
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
        return Decision(
            SECOND,
            f"plateau: val_loss improved by {100 * max(gains):.2f} % at most in {rule.patience} "
            f"epochs, below {100 * rule.tolerance:g} %",
        )


class StragglerPolicy:
    """greedy: the second strategy while a straggler lasts. elastic: the straggler sits out."""

    def __init__(self, rule: Straggler, horizon: Horizon) -> None:
        self._rule = rule
        self._horizon = horizon

    def next_stop(self, history: History) -> int | None:
        """Where the quota is met if nothing happens until then."""
        left = self._quota_samples() - history.samples_under(FIRST)
        return history.samples + left if history.phase == FIRST and left > 0 else None

    def _quota_samples(self) -> int:
        return round(self._rule.quota * self._horizon.total)

    def decide(self, history: History) -> Decision | None:
        rule = self._rule
        if history.samples_under(FIRST) >= self._quota_samples():
            if history.phase == SECOND:
                return None
            return Decision(SECOND, f"the first strategy has had its {100 * rule.quota:g} %")
        windows = history.pulse.latest(history.phase, rule.windows)
        if len(windows) < rule.windows:
            return None
        slow = find_straggler(windows, rule.windows)
        if slow is not None and slow not in history.left_out and history.phase == FIRST:
            reason = f"worker {slow} computes {_times_slower(windows[-1], slow):.1f}x slower"
            if rule.policy == "elastic":
                return Decision(FIRST, f"{reason}: it sits out", leave_out=slow)
            return Decision(SECOND, f"{reason} than the median")
        if slow is None and history.phase == SECOND and rule.policy == "greedy":
            return Decision(FIRST, f"no straggler in {rule.windows} windows")
        return None


def _times_slower(window: Window, worker: int) -> float:
    median = sorted(window.speeds)[len(window.speeds) // 2]
    return median / window.speeds[worker]


class AutoPolicy:
    """Weighs what the second strategy would save against what staleness would spoil.

    gain: the share of the remaining time that would be saved, from each worker's measured speed
    and the measured cost of an exchange; once the second strategy has run, from its real rate.
    risk: how far into the run a switch is safe. Published runs kept their accuracy when half of
    the run was synchronous; a lower learning rate, noisier gradients (a noise scale above the
    batch) and a larger gain allow an earlier switch.
    """

    WINDOWS = 3
    LEAST_GAIN = 0.05
    SAFE_AT = 0.5
    REGRESSION = 1.15
    HOLD = 0.15
    """After going back, the share of the run before another attempt."""

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> Decision | None:
        if history.phase == FIRST:
            return self._consider_leaving(history)
        return self._consider_going_back(history)

    def _consider_leaving(self, history: History) -> Decision | None:
        windows = history.pulse.latest(FIRST, self.WINDOWS)
        if len(windows) < self.WINDOWS or self._on_hold(history):
            return None
        gain = self.gain(history, windows)
        progress, needed = self._horizon.progress(history.samples), self.safe_from(history, gain)
        if gain < self.LEAST_GAIN or progress < needed:
            return None
        return Decision(
            SECOND,
            f"auto: would save {100 * gain:.0f} % of the remaining time; at {100 * progress:.0f} % "
            f"of the run, safe from {100 * needed:.0f} % (learning rate x"
            f"{self._horizon.lr_factor(history.samples):.3g}, {self._describe_noise(history)})",
        )

    def gain(self, history: History, windows: list[Window]) -> float:
        """One minus the first strategy's rate over the second's, real or predicted."""
        now = sum(w.rate for w in windows) / len(windows)
        real = history.pulse.of_phase(SECOND)
        if real:
            other = sum(w.rate for w in real[-self.WINDOWS :]) / len(real[-self.WINDOWS :])
        else:
            newest = windows[-1]
            # Nobody waits for anybody there; an exchange costs what it costs here at the least.
            other = sum(newest.speeds) / (1 + newest.comm_share)
        return 1 - now / other if other > 0 else 0.0

    def safe_from(self, history: History, gain: float) -> float:
        """The share of the run after which the switch is taken to be safe."""
        factor = min(1.0, self._horizon.lr_factor(history.samples))
        noise = history.pulse.noise.scale
        ratio = 0.0 if noise is None else min(2.0, noise / self._horizon.batch)
        eased = (1 - 0.4 * max(0.0, gain)) / (1 + 0.25 * ratio)
        return float(self.SAFE_AT * factor**0.5 * eased)

    def _describe_noise(self, history: History) -> str:
        noise = history.pulse.noise.scale
        if noise is None:
            return "noise scale unknown"
        return f"noise scale {noise:.0f} beside a batch of {self._horizon.batch}"

    def _on_hold(self, history: History) -> bool:
        if not history.switches:
            return False
        since = history.samples - history.switches[-1]["samples"]
        return self._horizon.progress(since) < self.HOLD

    def _consider_going_back(self, history: History) -> Decision | None:
        windows = history.pulse.latest(SECOND, self.WINDOWS)
        before = history.pulse.of_phase(FIRST)[-self.WINDOWS :]
        if len(windows) < self.WINDOWS or not before:
            return None
        now, was = _mean_loss(windows), _mean_loss(before)
        if now is not None and was is not None and now > self.REGRESSION * was + 0.01:
            return Decision(FIRST, f"auto: the loss rose from {was:.4g} to {now:.4g}")
        fast = sum(w.rate for w in windows) / len(windows)
        slow = sum(w.rate for w in before) / len(before)
        if fast < slow * (1 - self.LEAST_GAIN):
            return Decision(FIRST, f"auto: {fast:.0f} samples/s, slower than {slow:.0f} before")
        return None


def _mean_loss(windows: list[Window]) -> float | None:
    """None where a loop does not tell its loss."""
    known = [w.loss for w in windows if w.loss is not None]
    return sum(known) / len(known) if len(known) == len(windows) else None


def make_policy(
    strategy: Strategy,
    *,
    samples_per_epoch: int,
    epochs: int | None,
    batch: int,
    schedule: Schedule,
) -> Policy:
    """The policy of a strategy; raises SpecError for one that cannot be followed in this run."""
    if not isinstance(strategy, Switch):
        return Stay()
    names = [f"at={write(p.to_value())}" for p in strategy.at]
    points = [p.resolve(samples_per_epoch, epochs) for p in strategy.at]
    rule = strategy.when
    if isinstance(rule, Plateau):
        return PlateauPolicy(rule)
    if rule is not None:
        if epochs is None:
            raise SpecError(f"when={rule} needs the length of the run: pass epochs= to prepare()")
        total = samples_per_epoch * epochs
        if isinstance(rule, Straggler):
            return StragglerPolicy(rule, Horizon(samples_per_epoch, total, batch, schedule))
        if isinstance(rule, Auto):
            return AutoPolicy(Horizon(samples_per_epoch, total, batch, schedule))
        drops = schedule.drops(per_epoch=samples_per_epoch, total=total)
        if len(drops) < len(strategy.phases) - 1:
            raise SpecError(
                f"when=lr_drop needs {len(strategy.phases) - 1} drop(s) of the learning rate, "
                f"schedule {schedule} has {len(drops)}: use milestones(...)"
            )
        points = [round(d) for d in drops[: len(strategy.phases) - 1]]
        names = ["lr_drop"] * len(points)
    return place_points(
        names, points, samples_per_epoch=samples_per_epoch, epochs=epochs, batch=batch
    )

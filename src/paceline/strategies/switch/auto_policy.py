"""The rule when=auto: weighs the time that the second strategy saves against its staleness."""

from __future__ import annotations

from typing import Any

from paceline.protocol.history import History
from paceline.protocol.switch_policy import RunHorizon, SwitchDecision
from paceline.protocol.throughput import ThroughputWindow

FIRST, SECOND = 0, 1
PUBLISHED_STALENESS = 4.0
"""Staleness of the runs behind SAFE_AT: five asynchronous workers."""


class AutoPolicy:
    """A pure function of the run's history, evaluated at every window and every stop.

    gain: the fraction of the remaining time that would be saved. At first it is predicted from the
    measured speed of each worker and the measured cost of an exchange; once the second strategy has
    run, at least in a short probe, its measured rate is used.
    risk: the point of the run from which a switch is safe. Published runs kept their accuracy when
    half of the run was synchronous; a lower learning rate, noisier gradients (a noise scale above
    the batch), less staleness and a larger gain allow an earlier switch.

    Every switch keeps a copy of the weights. If the loss then rises, the run continues from the
    copy and tries again later; after the second time only at half the learning rate.
    """

    WINDOWS = 3
    PROBE_WINDOWS = 2
    PROBE_FROM = 0.1
    """Fraction of the run before the first probe."""
    PROBE_PAYS = 3.0
    """Minimum ratio of the predicted saving to the duration of a probe."""
    MIN_GAIN = 0.05
    SAFE_AT = 0.5
    REGRESSION = 1.5
    """Increase of the loss beyond what asynchrony costs and a lower learning rate recovers."""
    HOLD = 0.15
    """Fraction of the run to wait after a rollback before switching again."""
    MARGIN = 0.05
    """A switch is undone only if it came too early by more than this fraction of the run."""

    def __init__(self, horizon: RunHorizon, staleness: float = PUBLISHED_STALENESS) -> None:
        """Creates the policy; `staleness` is that expected with the second strategy, in updates."""
        self._horizon = horizon
        self._expected_staleness = staleness

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        if history.phase == FIRST:
            return self._decide_in_first(history)
        return self._decide_in_second(history)

    # ---- with the first strategy --------------------------------------------------------------

    def _decide_in_first(self, history: History) -> SwitchDecision | None:
        windows = history.throughput.latest(FIRST, self.WINDOWS)
        if len(windows) < self.WINDOWS:
            return None
        figures = self.evaluate(history, windows)
        gain, progress, needed = figures["gain"], figures["progress"], figures["safe_from"]
        saved = f"auto: would save {100 * gain:.0f}% of the remaining time"
        if gain < self.MIN_GAIN:
            why = f"{saved}, less than {100 * self.MIN_GAIN:g}%: stays"
            return SwitchDecision(FIRST, why, "no gain", measurements=figures)
        lesson = self._failed_before(history, gain)
        if lesson is not None:
            why = f"{saved}, but {lesson}: stays until then"
            return SwitchDecision(FIRST, why, "failed before", measurements=figures)
        if self._on_hold(history):
            why = f"{saved}, but the last switch was too recent: stays"
            return SwitchDecision(FIRST, why, "on hold")
        where = (
            f"{saved}; at {100 * progress:.0f}% of the run, safe from {100 * needed:.0f}% "
            f"(learning rate x{figures['lr_factor']:.3g}, staleness {figures['staleness']:.3g}, "
            f"{self._describe_noise(history)})"
        )
        if progress >= needed:
            return SwitchDecision(SECOND, where, "gain", measurements=figures, snapshot=True)
        if self._probe_pays(history, windows, figures):
            why = f"{saved}, by prediction: starts a short probe"
            return SwitchDecision(SECOND, why, "probe", measurements=figures, snapshot=True)
        return SwitchDecision(FIRST, f"{where}: stays", "too early", measurements=figures)

    def evaluate(self, history: History, windows: list[ThroughputWindow]) -> dict[str, Any]:
        """Returns the measurements for a decision."""
        now, other = self.rates(history, windows)
        gain = 1 - now / other if other > 0 else 0.0
        return {
            "rate": round(now, 3),
            "other_rate": round(other, 3),
            "other_measured": bool(history.throughput.windows_of_phase(SECOND)),
            "gain": round(gain, 6),
            "progress": round(self._horizon.progress(history.samples), 6),
            "safe_from": round(self.safe_from(history, gain), 6),
            "lr_factor": round(self._horizon.lr_factor(history.samples), 6),
            "staleness": round(self._staleness(history), 3),
            "noise_scale": history.throughput.noise.scale,
        }

    def rates(self, history: History, windows: list[ThroughputWindow]) -> tuple[float, float]:
        """Returns samples per second with both strategies, measured or predicted."""
        now = _mean_rate(windows)
        real = history.throughput.windows_of_phase(SECOND)
        if real:
            return now, _mean_rate(real[-self.WINDOWS :])
        newest = windows[-1]
        # Workers do not wait there; an exchange costs at least as much as here.
        return now, sum(newest.speeds) / (1 + newest.comm_share)

    def safe_from(self, history: History, gain: float) -> float:
        """Returns the fraction of the run after which a switch is considered safe."""
        factor = min(1.0, self._horizon.lr_factor(history.samples))
        noise = history.throughput.noise.scale
        ratio = 0.0 if noise is None else min(2.0, noise / self._horizon.batch)
        eased = (1 - 0.4 * max(0.0, gain)) / (1 + 0.25 * ratio)
        return float(self.SAFE_AT * factor**0.5 * eased * self._stale(history))

    def _stale(self, history: History) -> float:
        return float(min(1.5, (self._staleness(history) / PUBLISHED_STALENESS) ** 0.25))

    def _staleness(self, history: History) -> float:
        """Returns the measured staleness, or the expected one before any measurement."""
        count = sum(history.staleness.values())
        if not count or not history.throughput.windows_of_phase(SECOND):
            return self._expected_staleness
        return sum(s * n for s, n in history.staleness.items()) / count

    def _probe_pays(
        self, history: History, windows: list[ThroughputWindow], figures: dict[str, Any]
    ) -> bool:
        """Returns whether a probe is worthwhile; at most one is made."""
        progress, needed = figures["progress"], figures["safe_from"]
        if figures["other_measured"] or progress < self.PROBE_FROM:
            return False
        left = self._horizon.total * (1 - max(progress, needed))
        window_s = sum(w.ended - w.began for w in windows) / len(windows)
        saved_s = left / figures["rate"] * figures["gain"]
        return bool(saved_s >= self.PROBE_PAYS * self.PROBE_WINDOWS * window_s)

    def _describe_noise(self, history: History) -> str:
        noise = history.throughput.noise.scale
        if noise is None:
            return "noise scale unknown"
        return f"noise scale {noise:.0f} with a batch of {self._horizon.batch}"

    def _on_hold(self, history: History) -> bool:
        """Returns the last switch, ignoring returns from probes."""
        if not history.switches or history.switches[-1].cause == "probed":
            return False
        since = history.samples - history.switches[-1].samples
        return self._horizon.progress(since) < self.HOLD

    def _failed_before(self, history: History, gain: float) -> str | None:
        """Returns the reason against another attempt, if the loss rose in earlier ones.

        After one failure, noise and learning rate no longer allow an earlier switch; after two,
        only half the learning rate does.
        """
        failed = [r for r in history.switches if r.cause in ("regressed", "diverged")]
        if not failed:
            return None
        then = self._horizon.lr_factor(failed[-1].samples)
        if self._horizon.lr_factor(history.samples) <= 0.5 * then:
            return None
        plain = self.SAFE_AT * (1 - 0.4 * max(0.0, gain)) * self._stale(history)
        if len(failed) > 1:
            return f"the loss rose twice, at learning rate x{then:.3g} last; half of that is safe"
        if self._horizon.progress(history.samples) >= plain:
            return None
        return (
            f"the loss rose when it was tried; a switch is safe from {100 * plain:.0f}% of the run"
        )

    # ---- with the second strategy -------------------------------------------------------------

    def _decide_in_second(self, history: History) -> SwitchDecision | None:
        windows = history.throughput.latest(SECOND, self.WINDOWS)
        before = history.throughput.windows_of_phase(FIRST)[-self.WINDOWS :]
        if len(windows) < self.PROBE_WINDOWS or not before:
            return None
        now, was = _mean_loss(windows), _mean_loss(before)
        figures: dict[str, Any] = {"loss": now, "loss_before": was}
        if now is not None and was is not None and not now <= self.REGRESSION * was + 0.01:
            why = (
                f"auto: the loss rose from {was:.4g} to {now:.4g}: "
                "restores the weights before the switch"
            )
            return SwitchDecision(FIRST, why, "regressed", measurements=figures, restore=True)
        fast, slow = _mean_rate(windows), _mean_rate(before)
        gain = 1 - slow / fast if fast > 0 else 0.0
        progress, needed = self._horizon.progress(history.samples), self.safe_from(history, gain)
        figures |= {
            "rate": round(fast, 3),
            "other_rate": round(slow, 3),
            "gain": round(gain, 6),
            "progress": round(progress, 6),
            "safe_from": round(needed, 6),
        }
        speeds = f"{fast:.0f} samples/s, {slow:.0f} before"
        if progress < needed - self.MARGIN:
            why = f"auto: {speeds}; at {100 * progress:.0f}% of the run it is too early to stay"
            return SwitchDecision(FIRST, why, "probed", measurements=figures)
        if len(windows) < self.WINDOWS:
            return None
        if gain < -self.MIN_GAIN:
            return SwitchDecision(FIRST, f"auto: slower, {speeds}", "slower", measurements=figures)
        return SwitchDecision(SECOND, f"auto: {speeds}: stays", "holds", measurements=figures)


def _mean_rate(windows: list[ThroughputWindow]) -> float:
    return sum(w.rate for w in windows) / len(windows)


def _mean_loss(windows: list[ThroughputWindow]) -> float | None:
    """Returns the mean loss of windows; None if the training loop does not log it."""
    known = [w.loss for w in windows if w.loss is not None]
    return sum(known) / len(known) if len(known) == len(windows) else None

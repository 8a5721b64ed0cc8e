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
    """A pure function of the run's history, asked at every window and every stop.

    gain: the share of the remaining time that would be saved. At first from each worker's measured
    speed and the measured cost of an exchange; once the second strategy has run, be it for a short
    probe, from its real rate.
    risk: how far into the run a switch is safe. Published runs kept their accuracy when half of
    the run was synchronous; a lower learning rate, noisier gradients (a noise scale above the
    batch), less staleness and a larger gain allow an earlier switch.

    Every switch away keeps the weights of that moment. Where the loss then rises, the run goes on
    from them, and tries again later; after a second time only at half the learning rate.
    """

    WINDOWS = 3
    PROBE_WINDOWS = 2
    PROBE_FROM = 0.1
    """A probe may come once this share of the run is done."""
    PROBE_PAYS = 3.0
    """A probe must promise to save this many times its own duration."""
    LEAST_GAIN = 0.05
    SAFE_AT = 0.5
    REGRESSION = 1.5
    """Asynchrony costs some loss that a lower learning rate gives back later: this is more."""
    HOLD = 0.15
    """After going back, the share of the run before another attempt."""
    MARGIN = 0.05
    """So much the switch must have come too early, by what is known since, to be taken back."""

    def __init__(self, horizon: RunHorizon, staleness: float = PUBLISHED_STALENESS) -> None:
        """`staleness`: expected updates between a pull and its push under the second strategy."""
        self._horizon = horizon
        self._expected_staleness = staleness

    def next_stop(self, history: History) -> int | None:
        return None

    def decide(self, history: History) -> SwitchDecision | None:
        if history.phase == FIRST:
            return self._decide_in_first(history)
        return self._decide_in_second(history)

    # ---- under the first strategy -------------------------------------------------------------

    def _decide_in_first(self, history: History) -> SwitchDecision | None:
        windows = history.throughput.latest(FIRST, self.WINDOWS)
        if len(windows) < self.WINDOWS:
            return None
        figures = self.evaluate(history, windows)
        gain, progress, needed = figures["gain"], figures["progress"], figures["safe_from"]
        saved = f"auto: would save {100 * gain:.0f} % of the remaining time"
        if gain < self.LEAST_GAIN:
            why = f"{saved}, less than {100 * self.LEAST_GAIN:g} %: stays"
            return SwitchDecision(FIRST, why, "no gain", measurements=figures)
        lesson = self._failed_before(history, gain)
        if lesson is not None:
            why = f"{saved}, but {lesson}: stays until then"
            return SwitchDecision(FIRST, why, "failed before", measurements=figures)
        if self._on_hold(history):
            return SwitchDecision(FIRST, f"{saved}, but switched only lately: stays", "on hold")
        where = (
            f"{saved}; at {100 * progress:.0f} % of the run, safe from {100 * needed:.0f} % "
            f"(learning rate x{figures['lr_factor']:.3g}, staleness {figures['staleness']:.3g}, "
            f"{self._describe_noise(history)})"
        )
        if progress >= needed:
            return SwitchDecision(SECOND, where, "gain", measurements=figures, snapshot=True)
        if self._probe_pays(history, windows, figures):
            why = f"{saved} by what is measured here: a short probe"
            return SwitchDecision(SECOND, why, "probe", measurements=figures, snapshot=True)
        return SwitchDecision(FIRST, f"{where}: stays", "too early", measurements=figures)

    def evaluate(self, history: History, windows: list[ThroughputWindow]) -> dict[str, Any]:
        """The figures that a decision rests on."""
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
        """Samples a second under the first strategy, and under the second, real or predicted."""
        now = _mean_rate(windows)
        real = history.throughput.windows_of_phase(SECOND)
        if real:
            return now, _mean_rate(real[-self.WINDOWS :])
        newest = windows[-1]
        # Nobody waits for anybody there; an exchange costs what it costs here at the least.
        return now, sum(newest.speeds) / (1 + newest.comm_share)

    def safe_from(self, history: History, gain: float) -> float:
        """The share of the run after which the switch is taken to be safe."""
        factor = min(1.0, self._horizon.lr_factor(history.samples))
        noise = history.throughput.noise.scale
        ratio = 0.0 if noise is None else min(2.0, noise / self._horizon.batch)
        eased = (1 - 0.4 * max(0.0, gain)) / (1 + 0.25 * ratio)
        return float(self.SAFE_AT * factor**0.5 * eased * self._stale(history))

    def _stale(self, history: History) -> float:
        return float(min(1.5, (self._staleness(history) / PUBLISHED_STALENESS) ** 0.25))

    def _staleness(self, history: History) -> float:
        """Measured once there is something to measure, expected until then."""
        count = sum(history.staleness.values())
        if not count or not history.throughput.windows_of_phase(SECOND):
            return self._expected_staleness
        return sum(s * n for s, n in history.staleness.items()) / count

    def _probe_pays(
        self, history: History, windows: list[ThroughputWindow], figures: dict[str, Any]
    ) -> bool:
        """Only once, and where what it may save is worth the seconds it takes."""
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
        return f"noise scale {noise:.0f} beside a batch of {self._horizon.batch}"

    def _on_hold(self, history: History) -> bool:
        """The return from a probe does not count: it was meant to be short."""
        if not history.switches or history.switches[-1].cause == "probed":
            return False
        since = history.samples - history.switches[-1].samples
        return self._horizon.progress(since) < self.HOLD

    def _failed_before(self, history: History, gain: float) -> str | None:
        """What earlier attempts after which the loss rose say against another one now.

        After one, no easing by noise or learning rate counts any more; after two, only half the
        learning rate will do.
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
        return f"the loss rose when it was tried; {100 * plain:.0f} % of the run is safe"

    # ---- under the second strategy ------------------------------------------------------------

    def _decide_in_second(self, history: History) -> SwitchDecision | None:
        windows = history.throughput.latest(SECOND, self.WINDOWS)
        before = history.throughput.windows_of_phase(FIRST)[-self.WINDOWS :]
        if len(windows) < self.PROBE_WINDOWS or not before:
            return None
        now, was = _mean_loss(windows), _mean_loss(before)
        figures: dict[str, Any] = {"loss": now, "loss_before": was}
        if now is not None and was is not None and not now <= self.REGRESSION * was + 0.01:
            why = (
                f"auto: the loss rose from {was:.4g} to {now:.4g}: goes on from the weights before"
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
            why = f"auto: {speeds}; at {100 * progress:.0f} % of the run too early to stay"
            return SwitchDecision(FIRST, why, "probed", measurements=figures)
        if len(windows) < self.WINDOWS:
            return None
        if gain < -self.LEAST_GAIN:
            return SwitchDecision(FIRST, f"auto: slower, {speeds}", "slower", measurements=figures)
        return SwitchDecision(SECOND, f"auto: {speeds}: stays", "holds", measurements=figures)


def _mean_rate(windows: list[ThroughputWindow]) -> float:
    return sum(w.rate for w in windows) / len(windows)


def _mean_loss(windows: list[ThroughputWindow]) -> float | None:
    """None where a loop does not tell its loss."""
    known = [w.loss for w in windows if w.loss is not None]
    return sum(known) / len(known) if len(known) == len(windows) else None

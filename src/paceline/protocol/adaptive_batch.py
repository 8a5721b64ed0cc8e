"""Global batch that follows the gradient noise scale, and the learning rate that belongs to it.

With noise scale n, a sample in a batch of B makes (n + B0) / (n + B) of the progress that it makes
in the initial batch B0 (Pollux: Qiao et al., OSDI 2021). If a step takes a + c * B seconds, the
progress per second, B / ((a + c * B) * (n + B)), is largest for B = sqrt(a * n / c).

The learning rate of SGD is multiplied by the gain (n / B0 + 1) / (n / B + 1) (AdaScale: Johnson et
al., ICML 2020), which is also the number of initial steps that one step is worth; that of adaptive
optimizers by sqrt(B / B0).
"""

import math
from dataclasses import dataclass

from paceline.protocol.history import History
from paceline.telemetry.events import DecisionRow

MAX_GROWTH = 2
"""A batch grows at most by this factor per epoch, because larger ones were not measured."""
EXPLORE_LOSS = 0.1
"""A larger batch is tried for an epoch, to measure its steps, if it loses at most this fraction."""
MIN_CHANGE = 0.05
"""A change must promise this much more progress; the gain changes if it differs by this much."""


@dataclass(frozen=True)
class BatchRule:
    """Settings of an adaptive batch."""

    first: int
    limit: int
    is_adaptive: bool = False
    """True for optimizers that normalize gradients, such as Adam."""

    def efficiency(self, batch: float, noise: float) -> float:
        """Progress per sample, relative to the initial batch."""
        return (noise + self.first) / (noise + batch)

    def lr_gain(self, batch: float, noise: float) -> float:
        if self.is_adaptive:
            return math.sqrt(batch / self.first)
        return batch / self.first * self.efficiency(batch, noise)


class BatchAdapter:
    """Chooses the global batch of the next epoch from the measurements of the run."""

    def __init__(self, rule: BatchRule, history: History) -> None:
        self.rule = rule
        self._step_s: dict[int, float] = {}
        """Latest duration of a step, by global batch."""
        self._mark = (history.train_seconds, history.updates)

    def adapt(self, history: History, now: float, strategy: str) -> DecisionRow | None:
        """Updates batch and gain at the end of an epoch; returns a row if one has changed."""
        rule, before, gain = self.rule, history.batch, history.lr_gain
        seconds, updates = self._mark
        self._mark = (history.train_seconds, history.updates)
        if history.updates > updates:
            steps = history.updates - updates
            self._step_s[before] = (history.train_seconds - seconds) / steps
        noise = history.throughput.noise.scale
        if noise is None or before not in self._step_s:
            return None
        windows = history.throughput.windows
        fixed_s, per_sample_s = self._fit(before, windows[-1].comm_share if windows else 0.0)
        batch = self._choose(before, noise, fixed_s, per_sample_s)
        fresh = rule.lr_gain(batch, noise)
        if batch == before and abs(fresh / gain - 1) <= MIN_CHANGE:
            return None
        history.batch, history.lr_gain = batch, fresh
        best = math.sqrt(fixed_s * noise / per_sample_s)
        change = f"{before} -> {batch}" if batch != before else f"{batch}"
        return DecisionRow(
            samples=history.samples,
            seconds=now,
            strategy=strategy,
            chosen=strategy,
            cause="batch",
            reason=f"global batch {change}, learning rate x{fresh:.3g} (noise scale {noise:.0f}, "
            f"{rule.efficiency(batch, noise):.0%} of the progress per sample)",
            figures={
                "batch": batch,
                "lr_gain": fresh,
                "noise_scale": noise,
                "best_batch": best,
                "fixed_s": fixed_s,
                "per_sample_s": per_sample_s,
            },
        )

    def _fit(self, batch: int, comm_share: float) -> tuple[float, float]:
        """Returns the seconds of a step per batch and per sample: a line through all sizes."""
        points = list(self._step_s.items())
        mean_b = sum(b for b, _ in points) / len(points)
        mean_s = sum(s for _, s in points) / len(points)
        spread = sum((b - mean_b) ** 2 for b, _ in points)
        step_s = self._step_s[batch]
        if spread:
            slope = sum((b - mean_b) * (s - mean_s) for b, s in points) / spread
        else:  # Only the exchange is known not to depend on the batch.
            slope = step_s / (1 + comm_share) / batch
        slope = min(max(slope, 1e-3 * step_s / batch), mean_s / mean_b)
        return mean_s - slope * mean_b, slope

    def _choose(self, before: int, noise: float, fixed_s: float, per_sample_s: float) -> int:
        rule = self.rule

        def goodput(batch: float) -> float:
            return batch * rule.efficiency(batch, noise) / (fixed_s + per_sample_s * batch)

        largest = min(rule.limit, MAX_GROWTH * before)
        best = round(math.sqrt(fixed_s * noise / per_sample_s))
        batch = min(max(best, rule.first), largest)
        if goodput(batch) >= (1 + MIN_CHANGE) * goodput(before):
            return batch
        explored = rule.efficiency(largest, noise) >= 1 - EXPLORE_LOSS
        return largest if explored and len(self._step_s) == 1 else before

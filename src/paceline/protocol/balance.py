"""Shares of a global batch for workers of unequal speed, from what they measure.

The expected duration of a step is that of the slowest worker. With speeds v and step times that
vary by a factor with coefficient of variation cv, shares in proportion to v let all workers finish
at the same time on average, but the maximum is smaller if slow workers finish a little earlier:
time that a slow worker has left costs less than time that a fast one has left.

If the variation follows a Frechet distribution (a Gumbel distribution of the logarithm, standard
deviation cv), worker i with a mean time of t_i is the slowest with a probability in proportion to
t_i ** (1 / c), where c = sqrt(6) / pi * cv. The expected maximum for a given sum of v_i * t_i is
smallest where these probabilities are in proportion to the shares v_i * t_i, that is, for shares
in proportion to v ** (1 / (1 - c)). The duration is then 1 + c * H times the one without variation,
to first order, with the entropy H of the fractions v_i / sum(v).
"""

import math
from collections import deque
from itertools import accumulate
from statistics import NormalDist, median

from paceline.protocol.messages import StepStats

GUMBEL_SCALE = math.sqrt(6) / math.pi
"""Scale of a Gumbel distribution with standard deviation 1."""
MAX_EXPONENT = 2.0
"""Shares never depend on speeds by more than this power, reached at a variation of 0.64."""
MEMORY_STEPS = 16
"""Steps in the average of a speed. Its error adds 1 / (2 * steps) to the cost of the variation."""
CHANGE_SIGMA = 3.0
"""A speed that differs by this many standard deviations has changed and replaces the average."""
DEVIATIONS = 64
"""Reports in the estimate of the variation, which is then certain to about a fifth."""
NORMAL_MEDIAN = NormalDist().inv_cdf(0.75)
"""Median distance of a standard normal variable from 0."""
RETRY_FACTOR = 0.95
"""Assumed change of the time per sample of a worker without samples, per report."""
WEIGHT_UNIT = 1_000_000
"""Weight of the fastest worker; weights are integers so that all processes round alike."""
MIN_WEIGHT = WEIGHT_UNIT // 1000


class SpeedBalancer:
    """Computes shares that minimize the expected duration of a step, updated continuously."""

    def __init__(self, workers: int, speeds: tuple[float, ...] = ()) -> None:
        """Creates a balancer; `speeds` from before this phase count until the first report."""
        known = speeds if len(speeds) == workers else (0.0,) * workers
        self._seconds = [1 / speed if speed else None for speed in known]
        """Compute time per sample."""
        self._steps = [0.0] * workers
        """Steps in the average; 0 for a speed from before this phase."""
        self._deviations: deque[float] = deque(maxlen=DEVIATIONS)
        """Latest differences between a report and the average, scaled to one step."""

    def update(self, worker: int, measured: StepStats) -> None:
        if not measured.samples:
            self._retry_idle(worker)
        if not measured.samples or measured.busy_s <= 0:
            return
        steps = max(1, measured.steps)
        fresh = measured.busy_s / measured.samples
        old, kept = self._seconds[worker], self._steps[worker]
        if old is not None and kept:
            difference = abs(math.log(fresh / old)) / math.sqrt(1 / kept + 1 / steps)
            has_changed = difference > CHANGE_SIGMA * self._cv
            self._deviations.append(difference)
            if not has_changed:
                kept = min(kept, max(0.0, MEMORY_STEPS - steps))
                self._seconds[worker] = (kept * old + steps * fresh) / (kept + steps)
                self._steps[worker] = kept + steps
                return
        self._seconds[worker], self._steps[worker] = fresh, steps

    def _retry_idle(self, worker: int) -> None:
        """Assumes that a worker whose share is empty becomes faster, until it is measured again."""
        known = [s for s in self._seconds if s is not None]
        old = self._seconds[worker]
        if old is not None:
            self._seconds[worker] = max(min(known), RETRY_FACTOR * old)

    @property
    def _cv(self) -> float:
        """Coefficient of variation of step times, by the median: rare stalls do not count."""
        return median(self._deviations) / NORMAL_MEDIAN if self._deviations else 0.0

    def weights(self) -> tuple[int, ...] | None:
        """Returns the weights; None, for equal shares, until all speeds are known."""
        known = [s for s in self._seconds if s is not None]
        if len(known) < len(self._seconds):
            return None
        power = balance_exponent(self._cv)
        # Not below a minimum: the speed of an empty share could not be measured.
        return tuple(max(MIN_WEIGHT, round(WEIGHT_UNIT * (min(known) / s) ** power)) for s in known)


def balance_exponent(cv: float) -> float:
    """Returns the power of the speeds to which shares are proportional; 1 without variation."""
    c = GUMBEL_SCALE * cv
    return min(MAX_EXPONENT, 1 / (1 - c)) if c < 1 else MAX_EXPONENT


def split_batch(count: int, workers: int, weights: tuple[int, ...] | None = None) -> list[int]:
    """Returns offsets 0 = o[0] <= ... <= o[workers] = count that split a batch into shares.

    Equal shares differ by at most one, the larger ones first. Weighted shares are rounded down, and
    each remaining sample goes to the worker that finishes it first, if weights are speeds. Shares
    may be empty.
    """
    if weights is None:
        small, extra = divmod(count, workers)
        sizes = [small + (i < extra) for i in range(workers)]
    else:
        total = sum(weights)
        sizes = [count * w // total for w in weights]
        for _ in range(count - sum(sizes)):
            finish = [((sizes[i] + 1) / w, i) for i, w in enumerate(weights) if w]
            sizes[min(finish)[1]] += 1
    return list(accumulate(sizes, initial=0))

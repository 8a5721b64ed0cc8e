"""Throughput of a run: speed, waiting and loss per worker, in short windows."""

from collections import deque
from dataclasses import dataclass
from itertools import islice, takewhile

from paceline.protocol.messages import StepStats
from paceline.specs.measurement_window import WINDOW_S

KEEP_WINDOWS = 256
KEEP_OF_PHASE = 8


@dataclass
class TrainTotals:
    """Sums over the training steps of an epoch or of a window."""

    samples: int = 0
    predictions: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    told: bool = True
    classes: bool = True

    def add(self, measured: StepStats) -> None:
        self.samples += measured.samples
        self.predictions += measured.predictions
        self.correct += measured.correct or 0
        self.classes = self.classes and (measured.correct is not None or not measured.samples)
        if measured.loss_sum is None:
            self.told = False
        else:
            self.loss_sum += measured.loss_sum

    @property
    def loss(self) -> float | None:
        return self.loss_sum / self.samples if self.samples and self.told else None

    @property
    def accuracy(self) -> float | None:
        known = self.predictions and self.told and self.classes
        return self.correct / self.predictions if known else None


@dataclass(frozen=True)
class ThroughputWindow:
    """Statistics of about one second of training with one strategy."""

    phase: int
    began: float
    ended: float
    samples: int
    loss: float | None
    speeds: tuple[float, ...]
    """Samples per second of compute time, per worker."""
    comm_share: float
    """Ratio of exchange to compute time on the worker that waits least."""
    mean_comm_share: float = 0.0
    """The same as a mean over the workers: without waits if they do not wait for each other."""
    cv: float = 0.0
    """Standard deviation of a worker's step times relative to their mean, over all workers."""
    worker_rates: tuple[float, ...] = ()
    """Samples per second of wall time, per worker; empty if they are not known."""

    @property
    def rate(self) -> float:
        """Samples per second of wall time, over all workers."""
        return sum(self.worker_rates) or self.samples / (self.ended - self.began)


class GradientNoiseScale:
    """Smoothed gradient noise scale, from squared norms of local gradients and their mean."""

    MEMORY = 0.9

    def __init__(self) -> None:
        self._signal: float | None = None
        self._noise = 0.0

    def add(self, small: float, small_sq: float, big: float, big_sq: float) -> None:
        """Adds squared gradient norms of two batch sizes, `small` and `big`."""
        if big <= small:
            return
        signal = (big * big_sq - small * small_sq) / (big - small)
        noise = (small_sq - big_sq) / (1 / small - 1 / big)
        keep = 0.0 if self._signal is None else self.MEMORY
        self._signal = keep * (self._signal or 0.0) + (1 - keep) * signal
        self._noise = keep * self._noise + (1 - keep) * noise

    @property
    def scale(self) -> float | None:
        """Noise scale in samples: much smaller batches are mostly noise. None until known."""
        if self._signal is None or self._signal <= 0 or self._noise < 0:
            return None
        return self._noise / self._signal


class ThroughputMonitor:
    """Accumulates reports in windows.

    A window that is long enough closes when every worker with work has reported once more, so that
    it holds the samples of all of them up to about the same time.
    """

    def __init__(self) -> None:
        self.windows: deque[ThroughputWindow] = deque(maxlen=KEEP_WINDOWS)
        self._by_phase: dict[int, deque[ThroughputWindow]] = {}
        self.noise = GradientNoiseScale()
        self._began: float | None = None
        self._since: list[float] = []
        self._workers, self._phase = 0, -1

    def begin(
        self, workers: int, phase: int, now: float, idle: frozenset[int], least: int = 0
    ) -> None:
        """Starts a training interval; an open window continues, excluding the interruption.

        `idle` workers receive no work and are not waited for. A window covers at least `least`
        samples, because a second is too short for long steps.
        """
        self._least, self._idle = least, idle
        if self._began is None or phase != self._phase or workers != self._workers:
            self._workers, self._phase = workers, phase
            self._reported_at = [now] * workers
            self._open(now)
        else:
            pause_s = now - self._spent_s - self._began
            self._began += pause_s
            self._since = [at + pause_s for at in self._since]
            self._reported_at = [at + pause_s for at in self._reported_at]

    def reset(self) -> None:
        """Drops all windows, because the workers have changed."""
        self.windows.clear()
        self._by_phase.clear()
        self._began = None

    def exclude(self, worker: int) -> None:
        self._idle |= {worker}

    def end(self, now: float) -> None:
        """Ends a training interval; windows exclude evaluation and saving."""
        if self._began is not None:
            self._spent_s = now - self._began

    def _open(self, now: float) -> None:
        self._began = now
        self._spent_s = 0.0
        # Between its own reports, a worker's samples and time belong together exactly.
        self._since = list(self._reported_at)
        self._samples = [0] * self._workers
        self._busy = [0.0] * self._workers
        self._comm = [0.0] * self._workers
        self._steps = [0] * self._workers
        self._busy_square = [0.0] * self._workers
        self._totals = TrainTotals()
        self._complete: set[int] = set()
        """Workers that have reported since the window is long enough."""

    def add(self, worker: int, measured: StepStats, now: float) -> bool:
        """Adds a report; returns True if it closed a window."""
        if self._began is None:
            return False
        self._samples[worker] += measured.samples
        self._totals.add(measured)
        self._busy[worker] += measured.busy_s
        self._comm[worker] += measured.comm_s
        self._steps[worker] += measured.steps
        self._busy_square[worker] += measured.busy_square_s2
        self._reported_at[worker] = now
        if now - self._began < WINDOW_S or self._totals.samples < self._least:
            return False
        if measured.busy_s > 0 and worker not in self._idle:
            self._complete.add(worker)
        if len(self._complete) < self._workers - len(self._idle):
            return False
        shares = [c / b for c, b in zip(self._comm, self._busy, strict=True) if b]
        self.append(
            ThroughputWindow(
                phase=self._phase,
                began=self._began,
                ended=now,
                samples=self._totals.samples,
                loss=self._totals.loss,
                speeds=tuple(
                    s / b if b else 0.0 for s, b in zip(self._samples, self._busy, strict=True)
                ),
                comm_share=min(shares, default=0.0),
                mean_comm_share=sum(shares) / len(shares) if shares else 0.0,
                cv=self._variation(),
                worker_rates=tuple(
                    s / (at - since) if at > since else 0.0
                    for s, at, since in zip(
                        self._samples, self._reported_at, self._since, strict=True
                    )
                ),
            )
        )
        self._open(now)
        return True

    def _variation(self) -> float:
        """Returns the root mean square of the workers' coefficients of variation."""
        squares = [
            max(0.0, steps * square / busy**2 - 1)
            for steps, square, busy in zip(self._steps, self._busy_square, self._busy, strict=True)
            if steps > 1 and busy
        ]
        return float((sum(squares) / len(squares)) ** 0.5) if squares else 0.0

    def append(self, window: ThroughputWindow) -> None:
        self.windows.append(window)
        self._by_phase.setdefault(window.phase, deque(maxlen=KEEP_OF_PHASE)).append(window)

    def windows_of_phase(self, phase: int) -> list[ThroughputWindow]:
        """Returns the latest windows of a phase, active or not."""
        return list(self._by_phase.get(phase, ()))

    def latest(self, phase: int, count: int) -> list[ThroughputWindow]:
        """Returns the latest `count` windows of the active phase; fewer if it is new."""
        active = takewhile(lambda window: window.phase == phase, reversed(self.windows))
        return list(islice(active, count))[::-1]


def find_straggler(windows: list[ThroughputWindow], consecutive: int) -> int | None:
    """Returns the worker that is slower than mean minus one deviation in each of the last windows.

    Some worker is always slightly slower, even on equal machines, so a straggler must also be at
    least a fifth below the mean.
    """
    if len(windows) < consecutive:
        return None
    suspects = set(range(len(windows[-1].speeds)))
    for window in windows[-consecutive:]:
        # A speed of 0 was not measured, because the worker has no work.
        known = [s for s in window.speeds if s > 0]
        mean = sum(known) / len(known)
        deviation = (sum((s - mean) ** 2 for s in known) / len(known)) ** 0.5
        # With two workers, the slower is exactly at mean minus deviation; rounding must not decide.
        limit = min((mean - deviation) * (1 + 1e-9), 0.8 * mean)
        suspects &= {w for w, s in enumerate(window.speeds) if 0 < s <= limit}
    return min(suspects, key=lambda w: windows[-1].speeds[w], default=None)

"""The run's pulse: speed, waiting and loss in short windows, worker by worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.protocol.messages import StepStats

WINDOW_S = 1.0
KEEP_WINDOWS = 256
KEEP_OF_PHASE = 8


@dataclass(frozen=True)
class ThroughputWindow:
    """What happened in about a second of training under one strategy."""

    phase: int
    began: float
    ended: float
    samples: int
    loss: float | None
    speeds: tuple[float, ...]
    """Samples a second of computing, a worker."""
    comm_share: float
    """Exchange beside computing on the worker that waits least: what an exchange itself costs."""

    @property
    def rate(self) -> float:
        """Samples a second of wall time, all workers together."""
        return self.samples / (self.ended - self.began)


class GradientNoiseScale:
    """Gradient noise scale from squared norms of workers' gradients and of their mean, smoothed."""

    MEMORY = 0.9

    def __init__(self) -> None:
        self._signal: float | None = None
        self._noise = 0.0

    def add(self, small: float, small_sq: float, big: float, big_sq: float) -> None:
        """`small` and `big` are batch sizes, the others squared norms of gradients over them."""
        if big <= small:
            return
        signal = (big * big_sq - small * small_sq) / (big - small)
        noise = (small_sq - big_sq) / (1 / small - 1 / big)
        if self._signal is None:
            self._signal, self._noise = signal, noise
        else:
            self._signal = self.MEMORY * self._signal + (1 - self.MEMORY) * signal
            self._noise = self.MEMORY * self._noise + (1 - self.MEMORY) * noise

    @property
    def scale(self) -> float | None:
        """In samples: batches far below it are mostly noise. None until it can be told."""
        if self._signal is None or self._signal <= 0 or self._noise < 0:
            return None
        return self._noise / self._signal


class ThroughputMonitor:
    """Adds up reports and closes a window when it is old enough and everybody has been heard."""

    def __init__(self) -> None:
        self.windows: deque[ThroughputWindow] = deque(maxlen=KEEP_WINDOWS)
        self._by_phase: dict[int, deque[ThroughputWindow]] = {}
        self.noise = GradientNoiseScale()
        self._began: float | None = None
        self._spent_s = 0.0
        self._workers, self._phase = 0, -1
        self._idle: frozenset[int] = frozenset()
        self._silent = self._least = self._total = 0

    def begin(
        self, workers: int, phase: int, now: float, idle: frozenset[int], least: int = 0
    ) -> None:
        """A stretch of training begins; a window goes on over a stop, the stop's time left out.

        `idle` workers are given no work: nobody waits to hear from them. A window holds `least`
        samples or more: where steps are long, a second says little.
        """
        self._least = least
        if self._began is None or phase != self._phase or workers != self._workers:
            self._workers, self._phase = workers, phase
            self._open(now)
        else:
            self._began = now - self._spent_s
        self._idle = idle
        self._count_silent()

    def leave_out(self, worker: int) -> None:
        self._idle |= {worker}
        self._count_silent()

    def _count_silent(self) -> None:
        """How many workers with work have not been heard in this window."""
        self._silent = sum(not b and w not in self._idle for w, b in enumerate(self._busy))

    def end(self, now: float) -> None:
        """The stretch is over: evaluation and saving are no part of a window."""
        if self._began is not None:
            self._spent_s = now - self._began

    def _open(self, now: float) -> None:
        self._began = now
        self._spent_s = 0.0
        self._samples = [0] * self._workers
        self._busy = [0.0] * self._workers
        self._comm = [0.0] * self._workers
        self._loss, self._told = 0.0, True
        self._total = 0
        self._count_silent()

    def add(self, worker: int, measured: StepStats, now: float) -> bool:
        """Take a report; True when it closed a window."""
        if self._began is None:
            return False
        self._samples[worker] += measured.samples
        self._total += measured.samples
        if measured.busy_s > 0:
            if not self._busy[worker] and worker not in self._idle:
                self._silent -= 1
            self._busy[worker] += measured.busy_s
        self._comm[worker] += measured.comm_s
        if measured.loss_sum is None:
            self._told = False
        else:
            self._loss += measured.loss_sum
        if now - self._began < WINDOW_S or self._silent or self._total < self._least:
            return False
        total = self._total
        self.append(
            ThroughputWindow(
                phase=self._phase,
                began=self._began,
                ended=now,
                samples=total,
                loss=self._loss / total if total and self._told else None,
                speeds=tuple(
                    s / b if b else 0.0 for s, b in zip(self._samples, self._busy, strict=True)
                ),
                comm_share=min(c / b for c, b in zip(self._comm, self._busy, strict=True) if b),
            )
        )
        self._open(now)
        return True

    def append(self, window: ThroughputWindow) -> None:
        self.windows.append(window)
        self._by_phase.setdefault(window.phase, deque(maxlen=KEEP_OF_PHASE)).append(window)

    def windows_of_phase(self, phase: int) -> list[ThroughputWindow]:
        """The newest few windows of a phase, in force or not, however long ago."""
        return list(self._by_phase.get(phase, ()))

    def latest(self, phase: int, count: int) -> list[ThroughputWindow]:
        """The newest `count` windows of a phase that is in force now; fewer if it is young."""
        found: list[ThroughputWindow] = []
        for window in reversed(self.windows):
            if window.phase != phase or len(found) == count:
                break
            found.append(window)
        return found[::-1]


def find_straggler(windows: list[ThroughputWindow], consecutive: int) -> int | None:
    """The worker slower than mean minus one deviation in each of the last windows, if one is.

    Among equal machines somebody is always the slowest by a little: a straggler is also at least
    a fifth below the mean.
    """
    if len(windows) < consecutive:
        return None
    suspects: set[int] | None = None
    for window in windows[-consecutive:]:
        # A speed of 0 was not measured: that worker has no work.
        known = [s for s in window.speeds if s > 0]
        mean = sum(known) / len(known)
        deviation = (sum((s - mean) ** 2 for s in known) / len(known)) ** 0.5
        # Of two, the slower lies exactly at mean minus deviation: rounding must not decide.
        limit = min((mean - deviation) * (1 + 1e-9), 0.8 * mean)
        slow = {w for w, s in enumerate(window.speeds) if 0 < s <= limit}
        suspects = slow if suspects is None else suspects & slow
    if not suspects:
        return None
    return min(suspects, key=lambda w: windows[-1].speeds[w])

"""A thread that samples its process every second, and on one process per host the host.

It also probes the interpreter's lock twenty times a second: a thread that wakes up and does not get
to run, although a core is free for it, waits for Python code that holds the lock.
"""

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics
from paceline.telemetry.phase_clock import INPUT, PhaseClock, ServerClock
from paceline.telemetry.proc_stats import (
    ProcessReading,
    TcpStats,
    host_metrics_between,
    process_age_s,
    read_machine,
    read_process,
    thread_run_wait_s,
    thread_state,
)
from paceline.telemetry.steps import merge_metrics

SECOND_S = 1.0
PROBE_S = 0.05
HELD_S = 0.00015
"""A probe that is later than the fastest tenth by more than this has waited for the GIL. Run-queue
wait is subtracted first."""
PROMPTEST_OF = 100
PROMPT_S = 0.0002
"""Upper limit, even if the GIL is held all the time."""
LINES_A_STAGE = 3600
"""Number of metrics events after which the interval doubles."""


@dataclass
class StepCounters:
    """Totals counted by the training thread and read by the sampler."""

    epoch: int = -1
    steps: int = 0
    samples: int = 0
    comm_hidden_us: int = 0


@dataclass
class ServerCounters:
    """Totals counted by a server; `waiting` is the maximum since the last sample."""

    pushes: int = 0
    pulls: int = 0
    queued_us: int = 0
    apply_us: int = 0
    waiting: int = 0

    def snapshot_and_reset(self) -> dict[str, int]:
        found = dict(vars(self))
        self.waiting = 0
        return found


class Sampler(threading.Thread):
    """Passes an event to `tell` every second, from its own thread; `stop` takes a last sample."""

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        tell: Callable[[Event], None],
        run_key: str,
        clock: PhaseClock | None = None,
        counters: StepCounters | None = None,
        serving: ServerCounters | None = None,
    ) -> None:
        """`run_key` identifies the run: one of its processes per host samples the host."""
        super().__init__(daemon=True, name="vitals")
        self._now_s = now_s
        self._tell = tell
        self._clock = clock
        self._counters = counters or StepCounters()
        self._serving = serving
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._post = HostSamplerLock(run_key)
        self._gil = [0, 0, 0, 0, 0]
        self._late_s: deque[float] = deque(maxlen=PROMPTEST_OF)
        self._prompt_s = PROMPT_S
        # The id of the main thread on Linux; after a fork, `native_id` is still the parent's.
        self._main = os.getpid()
        self._process = read_process()
        self._machine: HostMetrics | None = None
        self._t = now_s()
        self._ns = clock.read_ns() if clock is not None else []
        if clock is not None:
            # The first window includes the time before this thread started, but not the time of
            # a resumed run before this process started.
            self._t = max(0.0, now_s() - process_age_s())
            self._ns = [int(self._t * 1e9), *([0] * (len(self._ns) - 1))]
            self._process = ProcessReading()
        self._counted: Counter[str] = Counter()
        self._served: dict[str, int] = serving.snapshot_and_reset() if serving is not None else {}

    def run(self) -> None:
        due = time.monotonic() + SECOND_S
        while not self._probe():
            if time.monotonic() >= due:
                due = max(due + SECOND_S, time.monotonic() + SECOND_S / 2)
                self.sample()

    def stop(self) -> None:
        """Takes a last sample and ends the thread."""
        self._stopping.set()
        if self.is_alive():
            self.join(2 * SECOND_S)
        self.sample()
        self._post.release()

    def _probe(self) -> bool:
        """Sleeps briefly; returns True when the sampler should stop."""
        began = time.perf_counter()
        queued = thread_run_wait_s()
        stopping = self._stopping.wait(PROBE_S)
        queued_s = thread_run_wait_s() - queued
        late_s = time.perf_counter() - began - PROBE_S - queued_s
        if stopping:
            return True
        if self._gil[0] % 20 == 0 and self._late_s:
            self._prompt_s = min(PROMPT_S, sorted(self._late_s)[len(self._late_s) // 10])
        self._late_s.append(late_s)
        held = late_s > self._prompt_s + HELD_S
        self._gil[0] += 1
        self._gil[1] += held
        if self._serving is None and self._clock is not None and self._clock.current == INPUT:
            # A thread that waits for the GIL sleeps too; one that waits for a disk is in state D.
            state = thread_state(self._main)
            blocked = state == "D" or (state == "S" and not held)
            self._gil[2] += 1
            self._gil[3] += held and not blocked
            self._gil[4] += blocked
        return False

    def sample(self) -> None:
        """Takes a sample of the time since the last one; may be called from any thread."""
        with self._lock:
            t = self._now_s()
            dt = t - self._t
            if dt < 1e-3:
                return
            process, counters = read_process(), self._counters
            phases: list[int] = []
            counted = Counter(
                steps=counters.steps, samples=counters.samples, comm_hidden=counters.comm_hidden_us
            )
            if self._clock is not None:
                ns = self._clock.read_ns()
                # `reassign` can make a difference negative.
                phases = [max(0, (b - a) // 1000) for a, b in zip(self._ns, ns, strict=True)]
                self._ns = ns
                if not isinstance(self._clock, ServerClock):
                    counted["input_cpu"] = self._clock.input_cpu_ns // 1000
            gil, self._gil = self._gil, [0, 0, 0, 0, 0]
            self._tell(
                ProcessMetrics(
                    t=round(t, 6),
                    dt=round(dt, 6),
                    phases=phases,
                    epoch=counters.epoch,
                    gil=gil,
                    serving=self._take_serving(),
                    **difference(self._process, process),
                    **(counted - self._counted),
                )
            )
            self._process, self._counted, self._t = process, counted, t
            if self._post.is_held():
                before, self._machine = self._machine, read_machine(t)
                if before is not None:
                    self._tell(host_metrics_between(before, self._machine))

    def _take_serving(self) -> dict[str, int] | None:
        if self._serving is None:
            return None
        now, before = self._serving.snapshot_and_reset(), self._served
        self._served = now
        return {k: v if k == "waiting" else v - before[k] for k, v in now.items()}


def difference(before: ProcessReading, now: ProcessReading) -> dict[str, Any]:
    """Returns the amounts between two readings, and the levels of the second."""
    amounts: dict[str, Any] = {
        name: round(getattr(now, name) - getattr(before, name), 6)
        for name in ("cpu_user", "cpu_system", "main_wait", "disk_read", "disk_write")
    }
    if now.cpu_wait is not None and before.cpu_wait is not None:
        amounts["cpu_wait"] = round(now.cpu_wait - before.cpu_wait, 6)
    if now.throttled[0] == before.throttled[0]:  # Otherwise moved to another cgroup.
        amounts["throttled"] = round(now.throttled[1] - before.throttled[1], 6)
    run_wait = sum(s - before.run_wait.get(t, 0.0) for t, s in now.run_wait.items())
    nothing = TcpStats(0, 0, 0.0, 0.0, 0.0, 0.0)
    pairs = [(before.connections.get(key, nothing), c) for key, c in now.connections.items()]
    old, busiest = max(pairs, key=lambda p: p[1].sent - p[0].sent, default=(nothing, nothing))
    return {
        **amounts,
        "run_wait": round(max(0.0, run_wait), 6),
        "rss": now.rss,
        "threads": now.threads,
        "net_in": sum(c.received - o.received for o, c in pairs),
        "net_out": sum(c.sent - o.sent for o, c in pairs),
        "net_busy": round(busiest.busy_s - old.busy_s, 6),
        "net_blocked": round(busiest.blocked_s - old.blocked_s, 6),
        "rtt": busiest.rtt_s,
        "rtt_least": busiest.rtt_least_s,
    }


class HostSamplerLock:
    """Elects one process per network namespace to sample the host: the first to bind a name.

    An abstract socket needs no file and is free again when its holder dies.
    """

    def __init__(self, run_key: str) -> None:
        digest = hashlib.sha256(run_key.encode()).hexdigest()[:24]
        self._name = f"\0paceline-vitals-{digest}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_bound = False

    def is_held(self) -> bool:
        if not self._is_bound:
            with contextlib.suppress(OSError):
                self._socket.bind(self._name)
                self._is_bound = True
        return self._is_bound

    def release(self) -> None:
        self._socket.close()
        self._is_bound = False


class MetricsDownsampler:
    """Merges the metrics of several seconds in long runs, which bounds the size of the folder."""

    def __init__(self, write: Callable[[Event], None], lines_a_stage: int = LINES_A_STAGE) -> None:
        self._write = write
        self._lines_a_stage = lines_a_stage
        self._together = 1
        self._lines = 0
        self._kept: dict[type[Event], list[ProcessMetrics | HostMetrics]] = {}

    def __call__(self, event: ProcessMetrics | HostMetrics) -> None:
        kept = self._kept.setdefault(type(event), [])
        kept.append(event)
        if len(kept) >= self._together:
            self._write(merge_metrics(self._kept.pop(type(event))))
            if isinstance(event, ProcessMetrics):
                self._lines += 1
                if self._lines % self._lines_a_stage == 0:
                    self._together *= 2

    def flush(self) -> None:
        for kept in self._kept.values():
            self._write(merge_metrics(kept))
        self._kept.clear()

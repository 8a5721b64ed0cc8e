"""A thread that samples its process every second, and on one process per host the host.

It also probes the interpreter's lock twenty times a second: a thread that wakes up and does not get
to run, although a core is free for it, waits for Python code that holds the lock.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics
from paceline.telemetry.phase_clock import INPUT, PhaseClock, ServerClock
from paceline.telemetry.proc_stats import (
    HostReading,
    ProcessReading,
    TcpStats,
    process_age_s,
    read_machine,
    read_process,
    thread_run_wait_s,
    thread_state,
)

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


class ServerCounters:
    """Totals counted by a server; `waiting` is the maximum since the last sample."""

    def __init__(self) -> None:
        self.pushes = self.pulls = self.queued_us = self.apply_us = 0
        self.waiting = 0

    def snapshot_and_reset(self) -> dict[str, int]:
        found = {
            "pushes": self.pushes,
            "pulls": self.pulls,
            "queued_us": self.queued_us,
            "apply_us": self.apply_us,
            "waiting": self.waiting,
        }
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
        self._main = threading.main_thread().native_id
        self._process = read_process()
        self._machine: HostReading | None = None
        self._t = self._machine_t = now_s()
        self._ns = clock.read_ns() if clock is not None else []
        if clock is not None:
            # The first window includes the time before this thread started, but not the time of
            # a resumed run before this process started.
            self._t = max(0.0, now_s() - process_age_s())
            self._ns = [int(self._t * 1e9), *([0] * (len(self._ns) - 1))]
            self._process = ProcessReading()
        self._counted = (0, 0, 0, 0)
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
            self._sample()

    def _sample(self) -> None:
        t = self._now_s()
        dt = t - self._t
        if dt < 1e-3:
            return
        process = read_process()
        amounts = difference(self._process, process)
        phases: list[int] = []
        counters = self._counters
        counted = (counters.steps, counters.samples, counters.comm_hidden_us, 0)
        if self._clock is not None:
            ns = self._clock.read_ns()
            # `reassign` can make a difference negative.
            phases = [max(0, (b - a) // 1000) for a, b in zip(self._ns, ns, strict=True)]
            self._ns = ns
            counted = (*counted[:3], self._clock.input_cpu_ns // 1000)
        steps, samples, hidden, input_cpu = (
            b - a for a, b in zip(self._counted, counted, strict=True)
        )
        self._counted = counted
        gil, self._gil = self._gil, [0, 0, 0, 0, 0]
        self._tell(
            ProcessMetrics(
                t=round(t, 6),
                dt=round(dt, 6),
                phases=phases,
                epoch=counters.epoch,
                steps=steps,
                samples=samples,
                comm_hidden=hidden,
                input_cpu=0 if isinstance(self._clock, ServerClock) else input_cpu,
                gil=gil,
                serving=self._take_serving(),
                **amounts,
            )
        )
        self._process, self._t = process, t
        self._sample_machine(t)

    def _take_serving(self) -> dict[str, int] | None:
        if self._serving is None:
            return None
        now, before = self._serving.snapshot_and_reset(), self._served
        self._served = now
        return {k: v if k == "waiting" else v - before[k] for k, v in now.items()}

    def _sample_machine(self, t: float) -> None:
        if not self._post.is_held():
            return
        now, before = read_machine(), self._machine
        self._machine = now
        since, self._machine_t = self._machine_t, t
        if before is None or t - since < 1e-3:
            return
        links = {
            name: [b - a for a, b in zip(before.links.get(name, (0, 0)), both, strict=True)]
            for name, both in now.links.items()
        }
        outside = [both for name, both in links.items() if name != "lo"]
        cpu = {name: round(now.cpu_s[name] - before.cpu_s[name], 4) for name in now.cpu_s}
        self._tell(
            HostMetrics(
                t=round(t, 6),
                host=socket.gethostname(),
                dt=round(t - since, 6),
                cpu_user=cpu["user"],
                cpu_system=cpu["system"],
                cpu_iowait=cpu["iowait"],
                cpu_steal=cpu["steal"],
                cpu_idle=cpu["idle"],
                cores_busy=[
                    round(now.cores_busy_s[c] - before.cores_busy_s.get(c, 0.0), 4)
                    for c in sorted(now.cores_busy_s)
                ],
                memory_used=now.memory_used,
                memory_total=now.memory_total,
                net_in=sum(both[0] for both in outside),
                net_out=sum(both[1] for both in outside),
                loopback=links.get("lo", [0, 0])[1],
                links={name: both for name, both in links.items() if any(both)},
                disk_read=now.disk_read - before.disk_read,
                disk_write=now.disk_write - before.disk_write,
                gpus=now.gpus,
            )
        )


def difference(before: ProcessReading, now: ProcessReading) -> dict[str, Any]:
    """Returns the amounts between two readings, and the levels of the second."""
    wait = None
    if now.cpu_wait_s is not None and before.cpu_wait_s is not None:
        wait = round(now.cpu_wait_s - before.cpu_wait_s, 6)
    throttled = 0.0
    if now.throttled[0] == before.throttled[0]:  # Otherwise moved to another cgroup.
        throttled = now.throttled[1] - before.throttled[1]
    run_wait = sum(s - before.run_wait_s.get(t, 0.0) for t, s in now.run_wait_s.items())
    nothing = TcpStats(0, 0, 0.0, 0.0, 0.0, 0.0)
    pairs = [(before.connections.get(key, nothing), c) for key, c in now.connections.items()]
    old, busiest = max(pairs, key=lambda p: p[1].sent - p[0].sent, default=(nothing, nothing))
    return {
        "cpu_user": round(now.cpu_user_s - before.cpu_user_s, 6),
        "cpu_system": round(now.cpu_system_s - before.cpu_system_s, 6),
        "cpu_wait": wait,
        "run_wait": round(max(0.0, run_wait), 6),
        "main_wait": round(now.main_wait_s - before.main_wait_s, 6),
        "throttled": round(throttled, 6),
        "rss": now.rss,
        "threads": now.threads,
        "net_in": sum(c.received - o.received for o, c in pairs),
        "net_out": sum(c.sent - o.sent for o, c in pairs),
        "net_busy": round(busiest.busy_s - old.busy_s, 6),
        "net_blocked": round(busiest.blocked_s - old.blocked_s, 6),
        "rtt": busiest.rtt_s,
        "rtt_least": busiest.rtt_least_s,
        "disk_read": now.disk_read - before.disk_read,
        "disk_write": now.disk_write - before.disk_write,
    }


class HostSamplerLock:
    """Elects one process per network namespace to sample the host: the first to bind a name.

    An abstract socket needs no file and is free again when its holder dies.
    """

    def __init__(self, run_key: str) -> None:
        digest = hashlib.sha256(run_key.encode()).hexdigest()[:24]
        self._name = f"\0paceline-vitals-{digest}"
        self._held: socket.socket | None = None

    def is_held(self) -> bool:
        if self._held is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                sock.bind(self._name)
            except OSError:
                sock.close()
                return False
            self._held = sock
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


class MetricsDownsampler:
    """Merges the metrics of several seconds in long runs, which bounds the size of the folder."""

    def __init__(self, write: Callable[[Event], None], lines_a_stage: int = LINES_A_STAGE) -> None:
        self._write = write
        self._lines_a_stage = lines_a_stage
        self._together = 1
        self._lines = 0
        self._kept: dict[type[Event], list[ProcessMetrics | HostMetrics]] = {
            ProcessMetrics: [],
            HostMetrics: [],
        }

    def __call__(self, event: ProcessMetrics | HostMetrics) -> None:
        kept = self._kept[type(event)]
        kept.append(event)
        if len(kept) >= self._together:
            self._write(merge_process_metrics(kept))
            kept.clear()
            if isinstance(event, ProcessMetrics):
                self._lines += 1
                if self._lines % self._lines_a_stage == 0:
                    self._together *= 2

    def flush(self) -> None:
        for kept in self._kept.values():
            if kept:
                self._write(merge_process_metrics(kept))
                kept.clear()


_LEVELS = {"t", "host", "epoch", "rss", "threads", "rtt", "rtt_least"}
_LEVELS |= {"memory_used", "memory_total", "gpus"}


def merge_process_metrics(
    events: list[ProcessMetrics | HostMetrics],
) -> ProcessMetrics | HostMetrics:
    """Merges several events: amounts are added, levels are those of the last."""
    if len(events) == 1:
        return events[0]
    last = events[-1]
    values = {}
    for name in last.__dataclass_fields__:
        if name == "kind":
            continue
        values[name] = getattr(last, name)
        if name not in _LEVELS:
            values[name] = _add([getattr(e, name) for e in events])
    return type(last)(**values)


def _add(values: list[Any]) -> Any:
    known = [v for v in values if v is not None]
    if not known:
        return None
    if isinstance(known[0], list):
        return [_add(list(v)) for v in zip(*known, strict=False)]
    if isinstance(known[0], dict):
        names = dict.fromkeys(k for v in known for k in v)
        return {
            n: max(v.get(n, 0) for v in known)
            if n == "waiting"
            else _add([v[n] for v in known if n in v])
            for n in names
        }
    total = sum(known)
    return round(total, 6) if isinstance(total, float) else total

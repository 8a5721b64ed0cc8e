"""Single steps, sums of metrics and time categories, taken from events."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from paceline.telemetry import events as ev


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a worker; time categories in microseconds, `began` and `ended` in seconds."""

    number: int
    began: float
    ended: float
    epoch: int
    start: int
    lo: int
    hi: int
    loss: float | None
    staleness: int
    input: int
    forward: int
    backward: int
    comm_exposed: int
    optimizer: int
    wait: int
    queue: int
    comm_hidden: int
    pieces: list[list[int]]

    @property
    def samples(self) -> int:
        return self.hi - self.lo

    @property
    def compute_s(self) -> float:
        """Seconds of input, forward and backward."""
        return (self.input + self.forward + self.backward) / 1e6


def steps_of_window(window: ev.StepWindow) -> Iterator[StepRecord]:
    """Yields the steps of a window; columns that an older version did not write are filled."""
    nothing: list[list[int]] = []
    columns: list[Iterable[object]] = [
        window.epoch, window.start, window.lo, window.hi,
        window.loss or itertools.repeat(None), window.staleness or itertools.repeat(-1),
        *(getattr(window, name) or itertools.repeat(0) for name in ev.STEP_PHASES),
        window.comm_hidden or itertools.repeat(-1), window.pieces or itertools.repeat(nothing),
    ]  # fmt: skip
    began_s = window.began or window.t
    before = began_s
    rows = zip(window.end or itertools.repeat(0), *columns, strict=False)
    for index, (end_us, *values) in enumerate(rows):
        ended = began_s + end_us / 1e6
        yield StepRecord(window.first_step + index, before, ended, *values)
        before = ended


def window_seconds(window: ev.StepWindow | ev.StepSummary) -> dict[str, float]:
    """Returns the seconds by time category of a window of steps, single or summed."""
    if isinstance(window, ev.StepSummary):
        return {name: window.phases_us.get(name, 0) / 1e6 for name in ev.STEP_PHASES}
    return {name: sum(getattr(window, name)) / 1e6 for name in ev.STEP_PHASES}


def phase_names(process: str) -> tuple[str, ...]:
    return ev.SERVER_PHASES if process.startswith("server-") else ev.PHASES


def phase_seconds(process: str, event: ev.ProcessMetrics) -> dict[str, float]:
    """Returns the seconds by time category of one metrics event."""
    return {n: us / 1e6 for n, us in zip(phase_names(process), event.phases, strict=False)}


_LEVELS = {"t", "host", "epoch", "rss", "threads", "rtt", "rtt_least"}
_LEVELS |= {"memory_used", "memory_total", "memory_cached", "swap_used", "gpus"}
_LEVELS |= {"load", "namespace"}

Metrics = TypeVar("Metrics", bound=ev.ProcessMetrics | ev.HostMetrics)


def merge_metrics(events: Sequence[Metrics]) -> Metrics:
    """Merges several events: amounts are added, levels are those of the last."""
    if len(events) == 1:
        return events[0]
    names = [f.name for f in fields(events[0]) if f.name not in _LEVELS]
    return replace(events[-1], **{n: _add([getattr(e, n) for e in events]) for n in names})


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

"""Verdicts: what limits a run, found by small rules over its resource metrics.

`verdicts(run)` is a pure function of the recorded metrics. Each rule matches one cause.

To add a verdict, add a function with `@verdict_rule` here and a row in docs/verdicts.md. Rules run
in the order of this file: a cause comes before the symptoms that it also explains. A rule yields
nothing if an earlier verdict in `found` explains what it sees.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.telemetry.events import VerdictChanged
from paceline.telemetry.reader import RunRecord
from paceline.telemetry.verdict_window import ProcessWindow, RunWindow
from paceline.telemetry.verdict_window import summarize_window as summarize_window

LIVE_S = 6.0
"""A run in progress is judged by its last seconds; a straggler is reported well within 10 s."""
SLOW_FACTOR = 1.5
"""A worker that computes this many times slower than the median is a straggler."""
SLOW_FACTOR_WITH_NEIGHBOURS = 2.5
"""The same while other programs use the cores, which makes run-queue wait unreliable."""
THROTTLED_FRACTION = 0.1
CROWDED_FRACTION = 0.3
"""Run-queue wait relative to CPU time, summed over all processes on a host."""
OTHER_PROGRAMS_FRACTION = 0.25
INPUT_FRACTION = 0.12
MIN_INPUT_S = 0.001
"""Shorter input times per step are not reported, whatever their fraction."""
MIN_PROBES = 5
IN_FLIGHT_FRACTION = 0.25
"""Fraction of a step in which bytes are in flight and nothing else happens."""
MIN_QUEUE_BYTES = 16_000
"""Bytes in flight on a congested link: about ten packets."""
QUEUED_FRACTION = 0.15
APPLYING_FRACTION = 0.4


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bottleneck: one line of text, a suggestion, and the measurements behind them."""

    rule: str
    who: str
    """`worker-3`, `server-0`, the name of a host, or `run` for the whole run."""
    text: str
    suggestion: str
    share: float
    """Approximate fraction of the step time that it costs, 0 to 1."""
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.who

    def to_event(self, t: float, state: str) -> VerdictChanged:
        shown = {n: getattr(self, n) for n in ("rule", "who", "text", "suggestion", "figures")}
        return VerdictChanged(t=round(t, 6), state=state, **shown)


Rule = Callable[[RunWindow, list[Verdict]], Iterable[Verdict]]
"""Receives the window and the verdicts of earlier rules; returns its own verdicts."""

RULES: list[Rule] = []
"""All rules, in the order in which they run."""


def verdict_rule(rule: Rule) -> Rule:
    """Registers a rule; used as a decorator."""
    RULES.append(rule)
    return rule


def verdicts(run: RunRecord, last_s: float | None = None) -> list[Verdict]:
    """Returns the verdicts, the costliest first, over the whole run or its last `last_s` seconds.

    Returns none for a run with less than a few seconds of training.
    """
    window = summarize_window(run, last_s)
    if window is None:
        return []
    found: list[Verdict] = []
    for rule in RULES:
        found += list(rule(window, found))
    return sorted(found, key=lambda verdict: -verdict.share)


@verdict_rule
def judge_quota(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """A cgroup CPU quota throttles a process."""
    for seen in (*window.workers, *window.servers):
        share = seen.per_second("throttled")
        if share < THROTTLED_FRACTION:
            continue
        slowness = None if seen.record.is_server else window.slowness(seen)
        figures = {"throttled": round(share, 3), "cores_used": round(seen.cores_used, 3)}
        detail = f"throttled {share:.0%} of the time at {seen.cores_used:.2f} cores"
        text = f"{seen.name} is limited by a CPU quota: {detail}"
        if slowness is not None and slowness >= SLOW_FACTOR:
            figures["times_slower"] = round(slowness, 2)
            text = (
                f"{seen.name} computes {slowness:.1f}x slower than the median: CPU quota ({detail})"
            )
        yield Verdict(
            rule="quota",
            who=seen.who,
            text=text,
            suggestion="raise the cgroup's CPU quota, or give it a smaller share "
            "of the batch (allreduce(balance=auto))",
            share=min(1.0, share),
            figures=figures,
        )


@verdict_rule
def judge_crowding(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """This run has more threads than cores on a host."""
    for host in window.hosts:
        workers = [seen for seen in host.processes if seen.record.is_worker]
        threads, cores = sum(seen.threads for seen in workers), len(host.cores)
        if not cores or threads <= cores or host.cores_short < CROWDED_FRACTION * host.cores_used:
            continue
        yield Verdict(
            rule="crowding",
            who=host.host,
            text=f"{len(workers)} workers with {threads} threads share {_cores(cores)} on "
            f"{host.host}: runnable threads wait {host.share_waiting:.0%} of the time",
            suggestion="use fewer --workers or --threads, or more cores",
            share=host.share_waiting,
            figures={"workers": len(workers), "threads": threads, **host.figures},
        )


@verdict_rule
def judge_neighbours(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """Other programs take the cores that this run could use."""
    for host in window.hosts if not _has(found, "crowding") else ():
        cores = len(host.cores)
        if (
            not cores
            or host.cores_others < OTHER_PROGRAMS_FRACTION * cores
            or host.cores_short < 0.1 * host.cores_used
        ):
            continue
        yield Verdict(
            rule="neighbours",
            who=host.host,
            text=f"other programs use {host.cores_others:.1f} of {_cores(cores)} on "
            f"{host.host}: this run waits for a core {host.share_waiting:.0%} of the time",
            suggestion="stop them, or reserve cores for this run (taskset)",
            share=host.share_waiting,
            figures={"cores_others": round(host.cores_others, 3), **host.figures},
        )


@verdict_rule
def judge_straggler(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """A worker computes much slower than the others, for no reason found by another rule."""
    for seen in window.workers:
        slowness = window.slowness(seen)
        if slowness is None or _has(found, "quota", seen.who):
            continue
        rest = [w for w in window.workers if w is not seen and w.compute_s > 0]
        # A worker that waits for a core more often computes as fast whenever it has one.
        having_one = statistics.median(w.compute_with_core_s for w in rest)
        enough = SLOW_FACTOR_WITH_NEIGHBOURS if _has(found, "neighbours") else SLOW_FACTOR
        if slowness < SLOW_FACTOR or seen.compute_with_core_s < enough * having_one:
            continue
        others = statistics.median(w.compute_s for w in rest)
        yield Verdict(
            rule="straggler",
            who=seen.who,
            text=f"{seen.name} computes {slowness:.1f}x slower than the median: "
            f"{1e3 * seen.compute_s:.3g} vs. {1e3 * others:.3g} ms per sample",
            suggestion="give it a smaller share (allreduce(balance=auto)), let the others "
            "proceed without waiting (ps), or remove it",
            share=1 - 1 / slowness,
            figures={
                "times_slower": round(slowness, 2),
                "ms_a_sample": round(1e3 * seen.compute_s, 4),
                "ms_a_sample_median": round(1e3 * others, 4),
                "cores_used": round(seen.cores_used, 3),
            },
        )


@verdict_rule
def judge_input(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """Steps wait for their batches: for storage, for Python code, or for decoding."""
    throttled = {verdict.who for verdict in found if verdict.rule == "quota"}
    slow = [
        w
        for w in window.workers
        if w.who not in throttled
        and w.share("input") >= INPUT_FRACTION
        and w.phases["input"] >= MIN_INPUT_S * w.sums.steps
    ]
    if not slow:
        return
    worst = max(slow, key=lambda w: w.share("input"))
    share, input_s = worst.share("input"), worst.phases["input"]
    on_cpu = worst.sums.input_cpu / 1e6 / input_s
    made, held, blocked = worst.sums.gil[2:5] or (0, 0, 0)
    if made >= MIN_PROBES:
        # Faster reading or decoding does not help a runnable thread without a core.
        computes = (made - held - blocked) * worst.share_running
        reads, holds = blocked > max(held, computes), held > max(blocked, computes)
    else:
        reads, holds = on_cpu < 0.5 * worst.share_running, False
    figures: dict[str, object] = {
        "input": round(share, 3),
        "input_ms_a_step": round(1e3 * input_s / worst.sums.steps, 3),
        "input_on_cpu": round(on_cpu, 3),
        "workers": [w.who for w in slow],
    }
    if made:
        figures |= {"lock_held": round(held / made, 3), "blocked": round(blocked / made, 3)}
    if reads:
        rate = worst.per_second("disk_read")
        figures["disk_read_mb_s"] = round(rate / 1e6, 3)
        rule, text = "reading", f"input: {share:.0%} of each step waits for storage"
        if rate > 1e5:
            text += f" ({rate / 1e6:.1f} MB/s from disk)"
        suggestion = "prefetch in other processes, cache the data in memory, or use a faster disk"
    elif holds:
        rule, text = "gil", f"input: {share:.0%} of each step is Python code holding the GIL"
        suggestion = "transform whole batches (numpy, torch), or use other processes"
    else:
        rule, text = "decoding", f"input: {share:.0%} of each step waits for decoding"
        suggestion = "decode once and cache the result, or decode ahead in other processes"
    yield Verdict(
        rule=rule, who="run", text=text, suggestion=suggestion, share=share, figures=figures
    )


@verdict_rule
def judge_link(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """A link is saturated: bytes are always in flight, and packets queue up."""
    exchange = window.exchange
    senders = [s for s in (*window.workers, *window.servers) if s.sums.dt and _is_link_bound(s)]
    if exchange < IN_FLIGHT_FRACTION or not senders:
        return
    worst = max(senders, key=lambda s: s.per_second("net_busy"))
    rate = worst.sums.net_out / worst.sums.net_busy
    if window.servers and len(senders) > 1:
        # Several at once: the bottleneck is the link they share, at the server.
        worst = max(window.servers, key=lambda s: s.sums.net_in + s.sums.net_out)
        rate = max(worst.per_second("net_in"), worst.per_second("net_out"))
    who, whose = worst.who, f"{worst.name}'s link is"
    if not window.servers and len(senders) > 1:
        who, whose = "run", "the workers' links are"
    yield Verdict(
        rule="link",
        who=who,
        text=f"{whose} saturated: {rate / 1e6:.3g} MB/s, "
        f"{exchange:.0%} of each step is communication",
        suggestion="send less (a codec, local_sgd, a larger batch), or use more servers "
        "on other hosts",
        share=exchange,
        figures={
            "mb_s": round(rate / 1e6, 3),
            "exchange": round(exchange, 3),
            "busy": round(worst.per_second("net_busy"), 3),
            "round_trip_ms": round(1e3 * worst.rtt_s, 3),
            "round_trip_least_ms": round(1e3 * worst.rtt_least_s, 3),
        },
    )


def _is_link_bound(seen: ProcessWindow) -> bool:
    sums = seen.sums
    if (
        seen.per_second("net_busy") < IN_FLIGHT_FRACTION
        or sums.net_blocked > 0.5 * sums.net_busy
        # A process that waits for a core sends and answers late on any link.
        or seen.run_queue_s + sums.throttled > 0.5 * sums.net_busy
    ):
        return False
    # On a saturated link packets queue up, and the round-trip time is many times its minimum.
    # A few bytes that are acknowledged late are not a queue.
    queued = sums.net_out / sums.net_busy * seen.rtt_s
    long = seen.rtt_s >= 0.001 and seen.rtt_s >= 5 * seen.rtt_least_s
    return long and queued >= MIN_QUEUE_BYTES


@verdict_rule
def judge_server(window: RunWindow, found: list[Verdict]) -> Iterator[Verdict]:
    """Workers wait for a server that is busy applying updates."""
    queued = statistics.median(w.share("queue") for w in window.workers)
    for server in window.servers if queued >= QUEUED_FRACTION else ():
        applying = server.phases.get("apply", 0.0) / server.sums.dt if server.sums.dt else 0.0
        if applying < APPLYING_FRACTION or _has(found, "quota", server.who):
            continue
        serving = server.sums.serving or {}
        wait_ms = serving.get("queued_us", 0) / 1e3 / (serving.get("pulls") or 1)
        yield Verdict(
            rule="server",
            who=server.who,
            text=f"{server.name} is overloaded: updates take {applying:.0%} of its "
            f"time, {queued:.0%} of each step waits in its queue",
            suggestion="use more servers, fewer pushes (a larger batch, sync=kasync(k)), "
            "or a lighter optimizer",
            share=queued,
            figures={
                "applying": round(applying, 3),
                "queue": round(queued, 3),
                "wait_ms_a_pull": round(wait_ms, 3),
                "updates_a_s": round(server.per_second("steps"), 2),
            },
        )


def _has(found: list[Verdict], rule: str, who: str | None = None) -> bool:
    return any(v.rule == rule and who in (None, v.who) for v in found)


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"

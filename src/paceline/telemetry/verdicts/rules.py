"""Verdict rules: one function per bottleneck.

To add a verdict, add a function with `@verdict_rule` here and a row in docs/verdicts.md. Rules run
in the order of this file: a cause comes before the symptoms that it also explains. A rule returns
nothing if an earlier verdict in `found` explains what it sees.
"""

from __future__ import annotations

import statistics

from paceline.telemetry.verdicts.verdict import Verdict, verdict_rule
from paceline.telemetry.verdicts.window import ProcessWindow, RunWindow

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


@verdict_rule
def judge_quota(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """A cgroup CPU quota throttles a process."""
    verdicts = []
    for seen in (*window.workers, *window.servers):
        share = seen.throttled_s / seen.dt if seen.dt else 0.0
        if share < THROTTLED_FRACTION:
            continue
        used = seen.cpu_s / seen.dt
        slowness = None if seen.record.is_server else window.slowness(seen)
        figures = {"throttled": round(share, 3), "cores_used": round(used, 3)}
        detail = f"throttled {_percent(share)} of the time at {used:.2f} cores"
        if slowness is not None and slowness >= SLOW_FACTOR:
            figures["times_slower"] = round(slowness, 2)
            text = (
                f"{seen.name} computes {slowness:.1f}x slower than the median: CPU quota ({detail})"
            )
        else:
            text = f"{seen.name} is limited by a CPU quota: {detail}"
        verdicts.append(
            Verdict(
                rule="quota",
                who=seen.who,
                text=text,
                suggestion="raise the cgroup's CPU quota, or give it a smaller share "
                "of the batch (allreduce(balance=auto))",
                share=min(1.0, share),
                figures=figures,
            )
        )
    return verdicts


@verdict_rule
def judge_crowding(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """This run has more threads than cores on a host."""
    verdicts = []
    for host in window.hosts:
        threads = sum(s.threads for s in host.processes if s.record.is_worker)
        workers = sum(s.record.is_worker for s in host.processes)
        cores = len(host.cores)
        if not cores or threads <= cores or host.cores_short < CROWDED_FRACTION * host.cores_used:
            continue
        waiting = host.cores_short / (host.cores_used + host.cores_short)
        verdicts.append(
            Verdict(
                rule="crowding",
                who=host.host,
                text=f"{workers} workers with {threads} threads share {_cores(cores)} on "
                f"{host.host}: runnable threads wait {_percent(waiting)} of the time",
                suggestion="use fewer --workers or --threads, or more cores",
                share=waiting,
                figures={
                    "workers": workers,
                    "threads": threads,
                    "cores": cores,
                    "cores_used": round(host.cores_used, 3),
                    "cores_wanted": round(host.cores_used + host.cores_short, 3),
                },
            )
        )
    return verdicts


@verdict_rule
def judge_neighbours(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Other programs take the cores that this run could use."""
    if _has(found, "crowding"):
        return []
    verdicts = []
    for host in window.hosts:
        cores = len(host.cores)
        if (
            not cores
            or host.cores_others < OTHER_PROGRAMS_FRACTION * cores
            or host.cores_short < 0.1 * host.cores_used
        ):
            continue
        waiting = host.cores_short / (host.cores_used + host.cores_short)
        verdicts.append(
            Verdict(
                rule="neighbours",
                who=host.host,
                text=f"other programs use {host.cores_others:.1f} of {_cores(cores)} on "
                f"{host.host}: this run waits for a core {_percent(waiting)} of the time",
                suggestion="stop them, or reserve cores for this run (taskset)",
                share=waiting,
                figures={
                    "cores": cores,
                    "cores_others": round(host.cores_others, 3),
                    "cores_used": round(host.cores_used, 3),
                    "cores_wanted": round(host.cores_used + host.cores_short, 3),
                },
            )
        )
    return verdicts


@verdict_rule
def judge_straggler(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """A worker computes much slower than the others, for no reason found by another rule."""
    verdicts = []
    for seen in window.workers:
        slowness = window.slowness(seen)
        if slowness is None or ("quota", seen.who) in {v.key for v in found}:
            continue
        rest = [w for w in window.workers if w is not seen]
        # A worker that waits for a core more often computes as fast whenever it has one.
        having_one = statistics.median(w.compute_with_core_s for w in rest if w.compute_s > 0)
        enough = SLOW_FACTOR_WITH_NEIGHBOURS if _has(found, "neighbours") else SLOW_FACTOR
        if slowness < SLOW_FACTOR or seen.compute_with_core_s < enough * having_one:
            continue
        others = statistics.median(w.compute_s for w in rest if w.compute_s > 0)
        verdicts.append(
            Verdict(
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
                    "cores_used": round(seen.cpu_s / seen.dt, 3),
                },
            )
        )
    return verdicts


@verdict_rule
def judge_input(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Steps wait for their batches: for storage, for Python code, or for decoding."""
    slow = [
        w
        for w in window.workers
        if w.share("input") >= INPUT_FRACTION and w.phases["input"] >= MIN_INPUT_S * w.steps
    ]
    if not slow:
        return []
    worst = max(slow, key=lambda w: w.share("input"))
    share = worst.share("input")
    on_cpu = worst.input_cpu_s / worst.phases["input"]
    made, held, blocked = worst.gil[2:5]
    if made >= MIN_PROBES:
        # Faster reading or decoding does not help a runnable thread without a core.
        computes = (made - held - blocked) * worst.share_running
        reads, holds = blocked > max(held, computes), held > max(blocked, computes)
    else:
        reads, holds = on_cpu < 0.5 * worst.share_running, False
    figures: dict[str, object] = {
        "input": round(share, 3),
        "input_ms_a_step": round(1e3 * worst.phases["input"] / worst.steps, 3),
        "input_on_cpu": round(on_cpu, 3),
        "workers": [w.who for w in slow],
    }
    if made:
        figures |= {"lock_held": round(held / made, 3), "blocked": round(blocked / made, 3)}
    if reads:
        rate = worst.disk_read / worst.dt
        figures["disk_read_mb_s"] = round(rate / 1e6, 3)
        rule, text = "reading", f"input: {_percent(share)} of each step waits for storage"
        if rate > 1e5:
            text += f" ({rate / 1e6:.1f} MB/s from disk)"
        suggestion = "prefetch in other processes, cache the data in memory, or use a faster disk"
    elif holds:
        rule = "gil"
        text = f"input: {_percent(share)} of each step is Python code holding the GIL"
        suggestion = "transform whole batches (numpy, torch), or use other processes"
    else:
        rule, text = "decoding", f"input: {_percent(share)} of each step waits for decoding"
        suggestion = "decode once and cache the result, or decode ahead in other processes"
    return [
        Verdict(
            rule=rule, who="run", text=text, suggestion=suggestion, share=share, figures=figures
        )
    ]


@verdict_rule
def judge_link(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """A link is saturated: bytes are always in flight, and packets queue up."""
    exchange = window.exchange
    if exchange < IN_FLIGHT_FRACTION:
        return []
    senders = [s for s in (*window.workers, *window.servers) if s.dt and _is_link_bound(s)]
    if not senders:
        return []
    worst = max(senders, key=lambda s: s.net_busy_s / s.dt)
    rate = worst.net_out / worst.net_busy_s
    who, whose = worst.who, f"{worst.name}'s link is"
    if window.servers and len(senders) > 1:
        # Several at once: the bottleneck is the link they share, at the server.
        worst = max(window.servers, key=lambda s: s.net_in + s.net_out)
        who, whose = worst.who, f"{worst.name}'s link is"
        rate = max(worst.net_in, worst.net_out) / worst.dt
    elif len(senders) > 1:
        who, whose = "run", "the workers' links are"
    return [
        Verdict(
            rule="link",
            who=who,
            text=f"{whose} saturated: {rate / 1e6:.3g} MB/s, "
            f"{_percent(exchange)} of each step is communication",
            suggestion="send less (a codec, local_sgd, a larger batch), or use more servers "
            "on other hosts",
            share=exchange,
            figures={
                "mb_s": round(rate / 1e6, 3),
                "exchange": round(exchange, 3),
                "busy": round(worst.net_busy_s / worst.dt, 3),
                "round_trip_ms": round(1e3 * worst.rtt_s, 3),
                "round_trip_least_ms": round(1e3 * worst.rtt_least_s, 3),
            },
        )
    ]


def _is_link_bound(seen: ProcessWindow) -> bool:
    busy = seen.net_busy_s / seen.dt
    if busy < IN_FLIGHT_FRACTION or seen.net_blocked_s > 0.5 * seen.net_busy_s:
        return False
    if seen.run_queue_s + seen.throttled_s > 0.5 * seen.net_busy_s:
        return False  # A process that waits for a core sends and answers late on any link.
    # On a saturated link packets queue up, and the round-trip time is many times its minimum.
    # A few bytes that are acknowledged late are not a queue.
    queued = seen.net_out / seen.net_busy_s * seen.rtt_s
    long = seen.rtt_s >= 0.001 and seen.rtt_s >= 5 * seen.rtt_least_s
    return long and queued >= MIN_QUEUE_BYTES


@verdict_rule
def judge_server(window: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Workers wait for a server that is busy applying updates."""
    queued = statistics.median(w.share("queue") for w in window.workers)
    if queued < QUEUED_FRACTION:
        return []
    verdicts = []
    for server in window.servers:
        applying = server.phases.get("apply", 0.0) / server.dt if server.dt else 0.0
        if applying < APPLYING_FRACTION or ("quota", server.who) in {v.key for v in found}:
            continue
        wait_ms = 1e3 * server.queued_s / server.pulls if server.pulls else 0.0
        verdicts.append(
            Verdict(
                rule="server",
                who=server.who,
                text=f"{server.name} is overloaded: updates take {_percent(applying)} of its "
                f"time, {_percent(queued)} of each step waits in its queue",
                suggestion="use more servers, fewer pushes (a larger batch, sync=kasync(k)), "
                "or a lighter optimizer",
                share=queued,
                figures={
                    "applying": round(applying, 3),
                    "queue": round(queued, 3),
                    "wait_ms_a_pull": round(wait_ms, 3),
                    "updates_a_s": round(server.steps / server.dt, 2),
                },
            )
        )
    return verdicts


def _has(found: list[Verdict], rule: str) -> bool:
    return any(v.rule == rule for v in found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"

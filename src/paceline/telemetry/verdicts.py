"""What limits a run, in one line each: small rules over its vitals.

`verdicts(run)` is a pure function of what was recorded. A rule fires on its own cause and on no
other's: where one cause explains the symptoms of another, the explained one stays silent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.telemetry.events import PHASES, STEP_PHASES, VerdictChanged
from paceline.telemetry.reader import Plain, ProcessRecord, RunRecord

LIVE_S = 6.0
"""A run that goes on is judged by so many seconds: a straggler is named well within 10 s."""
FEWEST_S = 3.0
"""Less training than this is not judged."""
FEWEST_STEPS = 3
LONGEST_LOOK_S = 60.0
"""Where steps are long, a run that goes on is judged by more than the last seconds."""
WARM_UP_S = 2.0
"""Left out at the beginning of training: caches, allocators and connections are cold then."""

SLOW = 1.5
"""A worker that computes so many times slower than the median is a straggler."""
SLOW_AMONG_OTHERS = 2.5
"""Where other programs take the cores, who waited how long for one is known only roughly."""
THROTTLED = 0.1
CROWDED = 0.3
"""Waiting for a core beside running on one, summed over all processes of a machine."""
OUTSIDE = 0.25
"""Share of the cores that other programs take."""
INPUT = 0.12
INPUT_S = 0.001
"""Shorter input a step is not worth a word, whatever its share."""
FEWEST_PROBES = 5
ON_THE_WAY = 0.25
"""Share of a step in which bytes are on their way and nothing else happens."""
QUEUE_BYTES = 16_000
"""On the way at a time: ten packets or so."""
QUEUED = 0.15
APPLYING = 0.4


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One line for people, with the figures it rests on and a change that may help."""

    rule: str
    who: str
    """`worker-3`, `server-0`, a machine's name, or `run` for all of it."""
    text: str
    suggestion: str
    share: float
    """About how much of the run's step time it costs: 0 to 1."""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.who

    @property
    def line(self) -> str:
        return f"{self.text}: {self.suggestion}"

    def to_event(self, t: float, state: str) -> VerdictChanged:
        return VerdictChanged(
            t=round(t, 6),
            state=state,
            rule=self.rule,
            who=self.who,
            text=self.text,
            suggestion=self.suggestion,
            figures=self.figures,
        )


def verdicts(run: RunRecord, last_s: float | None = None) -> list[Verdict]:
    """What limits the run, the costliest first; over all of it, or over its last seconds.

    Nothing is said of a run that has trained for less than a few seconds.
    """
    scene = summarize_window(run, last_s)
    if scene is None:
        return []
    found: list[Verdict] = []
    for rule in RULES:
        found.extend(rule(scene, found))
    return sorted(found, key=lambda v: -v.share)


# ---- what a rule sees ------------------------------------------------------------------------


@dataclass
class ProcessWindow:
    """One process over the stretch that is judged: sums of its vitals."""

    record: ProcessRecord
    dt: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    cpu_s: float = 0.0
    run_wait_s: float = 0.0
    main_wait_s: float = 0.0
    throttled_s: float = 0.0
    input_cpu_s: float = 0.0
    gil: list[int] = field(default_factory=lambda: [0] * 5)
    net_out: int = 0
    net_in: int = 0
    net_busy_s: float = 0.0
    net_blocked_s: float = 0.0
    rtt_s: float = 0.0
    rtt_least_s: float = 0.0
    disk_read: int = 0
    queued_s: float = 0.0
    pulls: int = 0

    @property
    def who(self) -> str:
        return self.record.process_name

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def step_s(self) -> float:
        """Seconds inside steps: start-up, evaluation and switches apart."""
        return sum(self.phases.get(name, 0.0) for name in STEP_PHASES)

    def share(self, phase: str) -> float:
        whole = self.step_s
        return self.phases.get(phase, 0.0) / whole if whole > 0 else 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward a sample; 0 where none was computed."""
        busy = self.phases.get("forward", 0.0) + self.phases.get("backward", 0.0)
        return busy / self.samples if self.samples else 0.0

    @property
    def compute_with_core_s(self) -> float:
        """The same without waiting for a core; how much of the rest is left is known roughly."""
        waited = self.main_wait_s / self.samples if self.samples else 0.0
        return max(self.compute_s - waited, 0.2 * self.compute_s)

    @property
    def crowding_s(self) -> float:
        """Seconds of waiting for a core for another reason than a quota."""
        return max(0.0, self.run_wait_s - self.throttled_s)

    @property
    def share_running(self) -> float:
        """Of the time that threads wanted to run, how much they did."""
        wanted = self.cpu_s + max(self.run_wait_s, self.throttled_s)
        return self.cpu_s / wanted if wanted > 0 else 1.0

    def add(self, event: Plain) -> None:
        self.dt += event["dt"]
        for name, seconds in self.record.phase_seconds(event).items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.steps += event["steps"]
        self.samples += event["samples"]
        self.cpu_s += event["cpu_user"] + event["cpu_system"]
        self.run_wait_s += event["run_wait"]
        self.main_wait_s += event.get("main_wait", 0.0)
        self.throttled_s += event["throttled"]
        self.input_cpu_s += event["input_cpu"] / 1e6
        self.gil = [a + b for a, b in zip(self.gil, event["gil"], strict=False)]
        self.net_out += event["net_out"]
        self.net_in += event["net_in"]
        self.net_busy_s += event["net_busy"]
        self.net_blocked_s += event["net_blocked"]
        self.rtt_s += event["rtt"] * event["dt"]
        self.rtt_least_s = event["rtt_least"] or self.rtt_least_s
        self.disk_read += event["disk_read"]
        serving = event.get("serving") or {}
        self.queued_s += serving.get("queued_us", 0) / 1e6
        self.pulls += serving.get("pulls", 0)


@dataclass
class HostWindow:
    """A machine and the processes of this run on it."""

    host: str
    inside: list[ProcessWindow]
    dt: float = 0.0
    cores_busy: list[float] = field(default_factory=list)

    @property
    def cores(self) -> list[int]:
        return sorted({c for seen in self.inside for c in seen.record.started.get("cores", ())})

    @property
    def cpu(self) -> float:
        """Cores that this run's processes keep busy."""
        return sum(seen.cpu_s / seen.dt for seen in self.inside if seen.dt)

    @property
    def crowding(self) -> float:
        """Cores more that they would keep busy if there were any."""
        return sum(seen.crowding_s / seen.dt for seen in self.inside if seen.dt)

    @property
    def outside(self) -> float:
        """Cores, of those that this run may use, that other programs keep busy."""
        if not self.dt:
            return 0.0
        busy = [self.cores_busy[c] / self.dt for c in self.cores if c < len(self.cores_busy)]
        return max(0.0, sum(busy) - self.cpu)


@dataclass
class RunWindow:
    workers: list[ProcessWindow]
    servers: list[ProcessWindow]
    places: list[HostWindow]

    @property
    def exchange(self) -> float:
        """Share of a step in the exchange itself: of the worker that waits for nobody in it."""
        return min((w.share("comm_exposed") for w in self.workers if w.steps), default=0.0)

    def slowness(self, seen: ProcessWindow) -> float | None:
        """Times that a worker computes slower than the median of the others."""
        others = [w.compute_s for w in self.workers if w is not seen and w.compute_s > 0]
        if not others or seen.compute_s <= 0:
            return None
        return seen.compute_s / statistics.median(others)


def summarize_window(run: RunRecord, last_s: float | None) -> RunWindow | None:
    """Sum up the stretch to be judged; None where there is too little of it."""
    training = {w.process_name: [v for v in w.vitals if _trains(w, v)] for w in run.workers}
    heard = [rows for rows in training.values() if rows]
    if not heard:
        return None
    began = min(rows[0]["t"] for rows in heard) + WARM_UP_S
    ended = max(rows[-1]["t"] for rows in heard)
    if last_s is not None:
        began = max(began, _look_back(heard, ended, last_s))
    workers = []
    for worker in run.workers:
        seen = _sum_up(
            worker, [v for v in training[worker.process_name] if v["t"] - v["dt"] / 2 >= began]
        )
        if seen.steps:
            workers.append(seen)
    if not workers or max(w.dt for w in workers) < FEWEST_S:
        return None
    if min(w.steps for w in workers) < FEWEST_STEPS:
        return None
    # Servers and the coordinator's process over the same seconds.
    busy = [(v["t"] - v["dt"] / 2, v["t"]) for v in _rows(run.workers, began, ended)]
    inside = (min(a for a, _ in busy), ended) if busy else (began, ended)
    servers = [_sum_up(s, _between(s.vitals, inside)) for s in run.servers]
    rest = [p for who, p in run.processes.items() if who == "run"]
    others = [_sum_up(p, _between(p.vitals, inside)) for p in rest]
    return RunWindow(workers, servers, _places(run, workers, servers, others, inside))


_STEP = slice(PHASES.index(STEP_PHASES[0]), PHASES.index(STEP_PHASES[-1]) + 1)


def _trains(worker: ProcessRecord, event: Plain) -> bool:
    # Often called: by place, without names.
    return float(sum(event["phases"][_STEP])) > 0.5e6 * float(event["dt"])


def _look_back(heard: list[list[Plain]], ended: float, last_s: float) -> float:
    """From when on to look: some seconds, or more where these hold too few steps."""
    since = ended - last_s
    for rows in heard:
        steps = 0
        for event in reversed(rows):
            steps += event["steps"]
            if steps >= FEWEST_STEPS:
                since = min(since, event["t"] - event["dt"])
                break
    return max(since, ended - LONGEST_LOOK_S)


def _rows(processes: Sequence[ProcessRecord], began: float, ended: float) -> list[Plain]:
    return [v for p in processes for v in p.vitals if _trains(p, v) and began <= v["t"] <= ended]


def _between(rows: Sequence[Plain], inside: tuple[float, float]) -> list[Plain]:
    return [v for v in rows if inside[0] <= v["t"] - v["dt"] / 2 and v["t"] <= inside[1] + v["dt"]]


def _sum_up(record: ProcessRecord, rows: Sequence[Plain]) -> ProcessWindow:
    seen = ProcessWindow(record)
    for event in rows:
        seen.add(event)
    if seen.dt:
        seen.rtt_s /= seen.dt
    return seen


def _places(
    run: RunRecord,
    workers: list[ProcessWindow],
    servers: list[ProcessWindow],
    others: list[ProcessWindow],
    inside: tuple[float, float],
) -> list[HostWindow]:
    """The machines whose vitals are known, each with the processes of this run on it."""
    places: list[HostWindow] = []
    for who, rows in run.machines.items():
        measured = _between(rows, inside)
        if not measured:
            continue
        host = str(measured[-1]["host"])
        if host in {place.host for place in places}:
            continue  # Two network namespaces of one machine.
        on_it = [s for s in (*workers, *servers) if s.record.started.get("host") == host]
        if who == "run" or any(s.who == who for s in on_it):
            # The coordinator's process is on the machine that it measures, or else counts nowhere.
            on_it += [s for s in others if who == "run" or len(run.machines) == 1]
        place = HostWindow(host, on_it, dt=sum(m["dt"] for m in measured))
        columns = zip(*(m["cores_busy"] for m in measured), strict=False)
        place.cores_busy = [sum(column) for column in columns]
        if place.inside:
            places.append(place)
    return places


# ---- the rules -------------------------------------------------------------------------------

Rule = Callable[[RunWindow, list[Verdict]], list[Verdict]]


def judge_quota(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """A control group's quota keeps a process from running."""
    verdicts = []
    for seen in (*scene.workers, *scene.servers):
        share = seen.throttled_s / seen.dt if seen.dt else 0.0
        if share < THROTTLED:
            continue
        used = seen.cpu_s / seen.dt
        slowness = None if seen.record.is_server else scene.slowness(seen)
        figures = {"throttled": round(share, 3), "cores_used": round(used, 3)}
        says = f"held back {_percent(share)} of the time at {used:.2f} cores"
        if slowness is not None and slowness >= SLOW:
            figures["times_slower"] = round(slowness, 2)
            text = (
                f"{seen.name} computes {slowness:.1f}x slower than the median: CPU quota ({says})"
            )
        else:
            text = f"{seen.name} is limited by a CPU quota: {says}"
        verdicts.append(
            Verdict(
                rule="quota",
                who=seen.who,
                text=text,
                suggestion="raise the quota of its control group, or give it a smaller share "
                "of the batch (allreduce(balance=auto))",
                share=min(1.0, share),
                figures=figures,
            )
        )
    return verdicts


def judge_crowding(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """This run's own processes have more threads than there are cores for them."""
    verdicts = []
    for place in scene.places:
        threads = sum(
            int(s.record.started.get("threads", 1))
            for s in place.inside
            if s.who.startswith("worker-")
        )
        workers = sum(s.who.startswith("worker-") for s in place.inside)
        cores = len(place.cores)
        if not cores or threads <= cores or place.crowding < CROWDED * place.cpu:
            continue
        waiting = place.crowding / (place.cpu + place.crowding)
        verdicts.append(
            Verdict(
                rule="crowding",
                who=place.host,
                text=f"{workers} workers of {threads} threads share {_cores(cores)} on "
                f"{place.host}: threads that could run wait {_percent(waiting)} of the time",
                suggestion="use fewer --workers or --threads, or more cores",
                share=waiting,
                figures={
                    "workers": workers,
                    "threads": threads,
                    "cores": cores,
                    "cores_used": round(place.cpu, 3),
                    "cores_wanted": round(place.cpu + place.crowding, 3),
                },
            )
        )
    return verdicts


def judge_neighbours(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Other programs take the cores that this run could use."""
    if _has(found, "crowding"):
        return []
    verdicts = []
    for place in scene.places:
        cores = len(place.cores)
        if not cores or place.outside < OUTSIDE * cores or place.crowding < 0.1 * place.cpu:
            continue
        waiting = place.crowding / (place.cpu + place.crowding)
        verdicts.append(
            Verdict(
                rule="neighbours",
                who=place.host,
                text=f"other programs keep {place.outside:.1f} of {_cores(cores)} on {place.host} "
                f"busy: this run waits for a core {_percent(waiting)} of the time",
                suggestion="end them, or keep cores for this run (taskset)",
                share=waiting,
                figures={
                    "cores": cores,
                    "cores_others": round(place.outside, 3),
                    "cores_used": round(place.cpu, 3),
                    "cores_wanted": round(place.cpu + place.crowding, 3),
                },
            )
        )
    return verdicts


def judge_straggler(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """One worker computes much slower than the others, for no reason that another rule knows."""
    verdicts = []
    for seen in scene.workers:
        slowness = scene.slowness(seen)
        if slowness is None or ("quota", seen.who) in {v.key for v in found}:
            continue
        rest = [w for w in scene.workers if w is not seen]
        # One that finds a core less often than the others computes as fast whenever it has one.
        having_one = statistics.median(w.compute_with_core_s for w in rest if w.compute_s > 0)
        enough = SLOW_AMONG_OTHERS if _has(found, "neighbours") else SLOW
        if slowness < SLOW or seen.compute_with_core_s < enough * having_one:
            continue
        others = statistics.median(w.compute_s for w in rest if w.compute_s > 0)
        verdicts.append(
            Verdict(
                rule="straggler",
                who=seen.who,
                text=f"{seen.name} computes {slowness:.1f}x slower than the median: "
                f"{1e3 * seen.compute_s:.3g} against {1e3 * others:.3g} ms a sample",
                suggestion="give it a smaller share (allreduce(balance=auto)), let the others go "
                "on without waiting (ps), or leave it out",
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


def judge_input(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Steps wait for their batches: for a reader, for Python code, or for decoding."""
    slow = [
        w
        for w in scene.workers
        if w.share("input") >= INPUT and w.phases["input"] >= INPUT_S * w.steps
    ]
    if not slow:
        return []
    worst = max(slow, key=lambda w: w.share("input"))
    share = worst.share("input")
    on_cpu = worst.input_cpu_s / worst.phases["input"]
    made, held, blocked = worst.gil[2:5]
    if made >= FEWEST_PROBES:
        # Ready but without a core is nothing that reading or decoding better would change.
        computes = (made - held - blocked) * worst.share_running
        reads, holds = blocked > max(held, computes), held > max(blocked, computes)
    else:
        reads, holds = on_cpu < 0.5 * worst.share_running, False
    figures: dict[str, Any] = {
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
        rule, text = "reading", f"input: {_percent(share)} of each step waits for its reader"
        if rate > 1e5:
            text += f" ({rate / 1e6:.1f} MB/s from disk)"
        suggestion = "read ahead in other processes, keep the data in memory or on a faster disk"
    elif holds:
        rule = "gil"
        text = f"input: {_percent(share)} of each step runs Python code that holds its lock"
        suggestion = "do the transform on whole batches (numpy, torch), or in other processes"
    else:
        rule, text = "decoding", f"input: {_percent(share)} of each step waits for decoding"
        suggestion = "decode once and keep the result, or decode ahead in other processes"
    return [
        Verdict(
            rule=rule, who="run", text=text, suggestion=suggestion, share=share, figures=figures
        )
    ]


def judge_link(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Bytes are on their way all the time, the peer has room for them, and they queue up."""
    exchange = scene.exchange
    if exchange < ON_THE_WAY:
        return []
    senders = [s for s in (*scene.workers, *scene.servers) if s.dt and _is_link_bound(s)]
    if not senders:
        return []
    worst = max(senders, key=lambda s: s.net_busy_s / s.dt)
    rate = worst.net_out / worst.net_busy_s
    who, whose = worst.who, f"{worst.name}'s link is"
    if scene.servers and len(senders) > 1:
        # Several at once: it is the link that they share, at the server.
        worst = max(scene.servers, key=lambda s: s.net_in + s.net_out)
        who, whose = worst.who, f"{worst.name}'s link is"
        rate = max(worst.net_in, worst.net_out) / worst.dt
    elif len(senders) > 1:
        who, whose = "run", "the workers' links are"
    return [
        Verdict(
            rule="link",
            who=who,
            text=f"{whose} full: {rate / 1e6:.3g} MB/s, "
            f"{_percent(exchange)} of each step is exchange",
            suggestion="send less (a codec, local_sgd, a larger batch), or use more servers "
            "on other machines",
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
    if busy < ON_THE_WAY or seen.net_blocked_s > 0.5 * seen.net_busy_s:
        return False
    if seen.crowding_s + seen.throttled_s > 0.5 * seen.net_busy_s:
        return False  # Whoever waits for a core sends late and answers late, on any link.
    # Behind a full link packets queue up: the round trip grows to many times the least. A few
    # bytes that are acknowledged late are no queue.
    queued = seen.net_out / seen.net_busy_s * seen.rtt_s
    long = seen.rtt_s >= 0.001 and seen.rtt_s >= 5 * seen.rtt_least_s
    return long and queued >= QUEUE_BYTES


def judge_server(scene: RunWindow, found: list[Verdict]) -> list[Verdict]:
    """Workers wait for a server that is busy with updates."""
    queued = statistics.median(w.share("queue") for w in scene.workers)
    if queued < QUEUED:
        return []
    verdicts = []
    for server in scene.servers:
        applying = server.phases.get("apply", 0.0) / server.dt if server.dt else 0.0
        if applying < APPLYING or ("quota", server.who) in {v.key for v in found}:
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


RULES: tuple[Rule, ...] = (
    judge_quota,
    judge_crowding,
    judge_neighbours,
    judge_straggler,
    judge_input,
    judge_link,
    judge_server,
)
"""In an order in which a cause comes before what it would also explain."""


def _has(found: list[Verdict], rule: str) -> bool:
    return any(v.rule == rule for v in found)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"

"""Examines all machines of a pool concurrently, each with a deadline.

A failing machine does not affect the others. One probe per machine stays connected for the whole
examination, because measurements between two machines need both. The result is plain data;
`diagnosis.py` derives the problems from it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.cluster.pool import Host, Pool
from paceline.cluster.shell import RemoteProgram, run_on_all, run_program
from paceline.cluster.ssh import SshTimeouts, open_shell
from paceline.errors import HostError

PACKAGES = ("torch", "numpy", "paceline")
MASTER_PORT = 29500
"""Default rendezvous port of torchrun and most scripts."""
CLOCK_SAMPLES = 5
FACTS_TIMEOUT_S = 20.0
REACH_TIMEOUT_S = 15.0
STEPS_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ExaminationOptions:
    """Scope and time limits of an examination."""

    timeouts: SshTimeouts = field(default_factory=SshTimeouts)
    ports: tuple[int, ...] = (MASTER_PORT,)
    packages: tuple[str, ...] = PACKAGES
    link_s: float = 0.3
    """Duration of the bandwidth measurement, per pair and direction."""
    links_budget_s: float = 60.0
    """Time limit for all pairs. In a large pool the remaining pairs are not measured."""
    flops_s: float = 0.5
    job: Mapping[str, Any] | None = None
    """Fields of a job whose training steps are timed on every machine."""
    on_progress: Callable[[str], None] = field(default=lambda line: None)


@dataclass(kw_only=True)
class MachineExamination:
    """Results for one machine."""

    host: Host
    error: HostError | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    clock_offset_s: float | None = None
    """Its clock minus the local clock, accurate to `clock_error_s`."""
    clock_error_s: float = 0.0
    address: str | None = None
    """Address at which the other machines reach it."""
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Source address, interface and MTU towards each other machine."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Interface of each local address."""
    listening: dict[int, int | None] = field(default_factory=dict)
    """The bound port for each requested port (0: any), or None if it is in use."""
    gflops: float | None = None
    gpu_gflops: list[float] = field(default_factory=list)
    """Rate of each GPU that torch finds."""
    steps: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.host.host


@dataclass(kw_only=True)
class MachinePair:
    """Results for one direction between two machines."""

    source: str
    target: str
    reached: dict[int, str] = field(default_factory=dict)
    """For each requested port, "ok" or the reason why it was not reached."""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    why_not: str | None = None


@dataclass(kw_only=True)
class Examination:
    pool: Pool
    machines: list[MachineExamination]
    pairs: list[MachinePair]

    @property
    def present(self) -> list[MachineExamination]:
        """Machines that could be examined."""
        return [machine for machine in self.machines if machine.facts]

    def of(self, name: str) -> MachineExamination:
        return next(each for each in self.machines if each.name == name)


@dataclass
class _ReachableMachine:
    """A connected machine with a running probe."""

    found: MachineExamination
    probe: RemoteProgram


async def examine(pool: Pool, options: ExaminationOptions) -> Examination:
    """Examines every machine. A failure is recorded in its result; the others continue."""
    machines = [MachineExamination(host=host) for host in pool.hosts]
    async with AsyncExitStack() as stack:
        options.on_progress(f"connecting to {len(machines)} machines")
        reachable = await _connect_all(machines, options, stack)
        pairs = [
            MachinePair(source=a.found.name, target=b.found.name)
            for a in reachable
            for b in reachable
            if a is not b
        ]
        query_routes = partial(_query_routes, reachable=reachable)
        if pairs:
            options.on_progress("routes and ports between all pairs")
            # The local machine comes first: its address follows from its routes to the others.
            await _each([p for p in reachable if p.found.address is None], query_routes)
            await _each(reachable, query_routes)
            token = secrets.token_hex(16)
            await _query_ports(reachable, pairs, options, token)
            options.on_progress("bandwidth and latency between pairs")
            await _measure_links(reachable, pairs, options, token)
        options.on_progress("speed of each machine")
        await _each(reachable, lambda p: _measure_speed(p, options))
        if options.job is not None:
            options.on_progress("training steps of the job's model")
            share = max(1, int(options.job.get("batch", 128)) // max(1, len(pool.slots)))
            await _each(reachable, lambda p: _time_steps(p, options, share))
    return Examination(pool=pool, machines=machines, pairs=pairs)


async def _connect_all(
    machines: list[MachineExamination], options: ExaminationOptions, stack: AsyncExitStack
) -> list[_ReachableMachine]:
    async def one(found: MachineExamination) -> _ReachableMachine:
        shell = await open_shell(found.host, options.timeouts)
        stack.push_async_callback(shell.close)
        probe = await stack.enter_async_context(run_program(shell, "probe"))
        request = {"do": "facts", "packages": list(options.packages)}
        found.facts = await probe.ask(request, FACTS_TIMEOUT_S)
        found.address = shell.address
        await _query_clock(found, probe)
        return _ReachableMachine(found, probe)

    connected = []
    for found, result in zip(machines, await run_on_all(machines, one), strict=True):
        if isinstance(result, HostError):
            found.error = result
        else:
            connected.append(result)
    return connected


async def _each(reachable: list[_ReachableMachine], do: Callable[[_ReachableMachine], Any]) -> None:
    """Runs one step on all machines. A machine that fails is excluded from later steps."""
    results = await run_on_all(reachable, do)
    for machine, result in list(zip(reachable, results, strict=True)):
        if isinstance(result, HostError):
            machine.found.error = result
            reachable.remove(machine)


async def _query_clock(found: MachineExamination, probe: RemoteProgram) -> None:
    """Estimates the clock offset from the sample with the shortest round trip."""
    best = float("inf")
    for _ in range(CLOCK_SAMPLES):
        before = time.time()
        remote = float((await probe.ask({"do": "clock"}, FACTS_TIMEOUT_S))["time"])
        after = time.time()
        if after - before < best:
            best = after - before
            found.clock_offset_s = remote - (before + after) / 2
            found.clock_error_s = best / 2


async def _query_routes(machine: _ReachableMachine, reachable: list[_ReachableMachine]) -> None:
    others = [p for p in reachable if p is not machine and p.found.address is not None]
    request = [p.found.address for p in others]
    answer = await machine.probe.ask({"do": "routes", "peers": request}, FACTS_TIMEOUT_S)
    machine.found.addresses = answer["addresses"]
    machine.found.routes = {p.found.name: answer["routes"][p.found.address] for p in others}
    if machine.found.address is None:
        # The local machine is reached at the address from which it reaches the others.
        machine.found.address = most_common(
            [route["source"] for route in machine.found.routes.values() if route["source"]]
        )


def most_common(values: list[str]) -> str | None:
    return max(values, key=values.count) if values else None


async def _query_ports(
    reachable: list[_ReachableMachine],
    pairs: list[MachinePair],
    options: ExaminationOptions,
    token: str,
) -> None:
    async def listen(machine: _ReachableMachine) -> None:
        for port in (0, *options.ports):
            request = {"do": "listen", "token": token, "port": port}
            answer = await machine.probe.ask(request, FACTS_TIMEOUT_S)
            machine.found.listening[port] = answer["port"]

    async def reach(machine: _ReachableMachine) -> None:
        asked = [
            (pair, port, [other.address, bound])
            for pair in pairs
            if pair.source == machine.found.name and (other := by_name.get(pair.target))
            for port, bound in other.listening.items()
            if bound is not None and other.address is not None
        ]
        message = {"do": "reach", "targets": [target for *_, target in asked], "token": token}
        answer = await machine.probe.ask(message, REACH_TIMEOUT_S)
        for (pair, port, _), result in zip(asked, answer["reached"], strict=True):
            pair.reached[port] = result

    await _each(reachable, listen)
    by_name = {machine.found.name: machine.found for machine in reachable}
    await _each(reachable, reach)


async def _measure_links(
    reachable: list[_ReachableMachine],
    pairs: list[MachinePair],
    options: ExaminationOptions,
    token: str,
) -> None:
    """Measures in rounds, so that each machine takes part in one measurement at a time."""
    deadline = time.monotonic() + options.links_budget_s
    by_name = {machine.found.name: machine for machine in reachable}

    async def measure(pair: MachinePair) -> None:
        source, target = by_name.get(pair.source), by_name.get(pair.target)
        if source is None or target is None or pair.reached.get(0) != "ok":
            pair.why_not = "not reachable"
            return
        message = {
            "do": "link",
            "address": target.found.address,
            "port": target.found.listening[0],
            "token": token,
            "seconds": options.link_s,
        }
        try:
            answer = await source.probe.ask(message, REACH_TIMEOUT_S + 10 * options.link_s)
        except HostError as error:
            pair.why_not = error.problem
            return
        pair.latency_s, pair.bytes_per_s = answer["latency_s"], answer["bytes_per_s"]

    for matches in round_robin_pairs(list(by_name)):
        for forward in (True, False):
            names = [(a, b) if forward else (b, a) for a, b in matches]
            chosen = [pair for pair in pairs if (pair.source, pair.target) in names]
            if time.monotonic() > deadline:
                for pair in chosen:
                    pair.why_not = "not measured: the time limit for links was reached"
                continue
            await asyncio.gather(*(measure(pair) for pair in chosen))


def round_robin_pairs(names: list[str]) -> list[list[tuple[str, str]]]:
    """Returns rounds of disjoint pairs in which every two names meet once (circle method)."""
    circle: list[str | None] = [*names]
    if len(circle) % 2:
        circle.append(None)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


async def _measure_speed(machine: _ReachableMachine, options: ExaminationOptions) -> None:
    request = {"do": "flops", "seconds": options.flops_s}
    answer = await machine.probe.ask(request, STEPS_TIMEOUT_S)  # importing torch can be slow
    machine.found.gflops = answer["gflops"]
    machine.found.gpu_gflops = answer["gpus"]


async def _time_steps(machine: _ReachableMachine, options: ExaminationOptions, share: int) -> None:
    request = {"do": "training steps", "job": options.job, "share": share}
    machine.found.steps = await machine.probe.ask(request, STEPS_TIMEOUT_S)

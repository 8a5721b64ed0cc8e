"""Examining the machines of a pool: all at once, each with a deadline, none able to stop the rest.

One probe a machine stays connected for the whole examination, because the questions between two
machines need both. What is found is plain data; `diagnosis.py` says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.cluster.pool import Host, Pool
from paceline.cluster.shell import RemoteProgram, Shell, run_on_all, run_program
from paceline.cluster.ssh import SshTimeouts, open_shell
from paceline.errors import HostError

PACKAGES = ("torch", "numpy", "paceline")
MASTER_PORT = 29500
"""Where torch's launcher and most scripts meet, unless told otherwise."""
CLOCK_ASKS = 5
FACTS_S = 20.0
REACH_S = 15.0
STEPS_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ExaminationOptions:
    """What to examine, and for how long at most."""

    patience: SshTimeouts = field(default_factory=SshTimeouts)
    ports: tuple[int, ...] = (MASTER_PORT,)
    packages: tuple[str, ...] = PACKAGES
    link_s: float = 0.3
    """How long bandwidth is measured for each pair and direction."""
    links_budget_s: float = 60.0
    """In a large pool the pairs that are left when this is over are not measured."""
    flops_s: float = 0.5
    job: dict[str, Any] | None = None
    """A job's fields: its training steps are timed on every machine."""
    tell: Callable[[str], None] = field(default=lambda line: None)


@dataclass(kw_only=True)
class MachineExamination:
    """One machine."""

    host: Host
    error: HostError | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    clock_offset_s: float | None = None
    """Its clock minus ours; known to within `clock_error_s`."""
    clock_error_s: float = 0.0
    address: str | None = None
    """Where the others reach it."""
    routes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the other machine: source address, interface and MTU towards it."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Its own addresses, and the interface of each."""
    listening: dict[int, int | None] = field(default_factory=dict)
    """By the port that was asked for (0: any): the one it listens on; None if it is taken."""
    gflops: float | None = None
    steps: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.host.host


@dataclass(kw_only=True)
class MachinePair:
    """From one machine to another, in this direction."""

    source: str
    target: str
    reached: dict[int, str] = field(default_factory=dict)
    """By the port that was asked for: "ok", or why not."""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    why_not: str | None = None


@dataclass(kw_only=True)
class Examination:
    pool: Pool
    machines: list[MachineExamination]
    pairs: list[MachinePair]

    def of(self, name: str) -> MachineExamination:
        return next(each for each in self.machines if each.name == name)


@dataclass
class _ReachableMachine:
    """A machine that answers."""

    found: MachineExamination
    shell: Shell
    probe: RemoteProgram


async def examine(pool: Pool, orders: ExaminationOptions) -> Examination:
    """Everything about every machine; one that fails is noted, and the others go on."""
    machines = [MachineExamination(host=host) for host in pool.hosts]
    async with AsyncExitStack() as stack:
        orders.tell(f"connecting to {len(machines)} machines")
        patients = await _admit(machines, orders, stack)
        pairs = [
            MachinePair(source=a.found.name, target=b.found.name)
            for a in patients
            for b in patients
            if a is not b
        ]
        ask_routes = partial(_ask_routes, patients=patients)
        if pairs:
            orders.tell("routes and ports between all pairs")
            # Where the machine that we sit at is reached shows from its own routes: it comes first.
            await _each([p for p in patients if p.found.address is None], ask_routes)
            await _each(patients, ask_routes)
            token = secrets.token_hex(16)
            await _ask_ports(patients, pairs, orders, token)
            orders.tell("bandwidth and latency between pairs")
            await _measure_links(patients, pairs, orders, token)
        orders.tell("speed of each machine")
        await _each(patients, lambda p: _measure_speed(p, orders))
        if orders.job is not None:
            orders.tell("training steps of the job's model")
            share = max(1, int(orders.job.get("batch", 128)) // max(1, len(pool.slots)))
            await _each(patients, lambda p: _time_steps(p, orders, share))
    return Examination(pool=pool, machines=machines, pairs=pairs)


async def _admit(
    machines: list[MachineExamination], orders: ExaminationOptions, stack: AsyncExitStack
) -> list[_ReachableMachine]:
    async def one(found: MachineExamination) -> _ReachableMachine:
        shell = await open_shell(found.host, orders.patience)
        stack.push_async_callback(shell.close)
        probe = await stack.enter_async_context(run_program(shell, "probe"))
        asked = {"do": "facts", "packages": list(orders.packages)}
        found.facts = await probe.ask(asked, FACTS_S)
        found.address = shell.address
        await _ask_clock(found, probe)
        return _ReachableMachine(found, shell, probe)

    admitted = []
    for found, result in zip(machines, await run_on_all(machines, one), strict=True):
        if isinstance(result, HostError):
            found.error = result
        else:
            admitted.append(result)
    return admitted


async def _each(patients: list[_ReachableMachine], do: Callable[[_ReachableMachine], Any]) -> None:
    """One step of the examination on all; who fails takes no part in later ones."""
    results = await run_on_all(patients, do)
    for patient, result in list(zip(patients, results, strict=True)):
        if isinstance(result, HostError):
            patient.found.error = result
            patients.remove(patient)


async def _ask_clock(found: MachineExamination, probe: RemoteProgram) -> None:
    """The answer with the shortest way there and back bounds the offset best."""
    best = float("inf")
    for _ in range(CLOCK_ASKS):
        before = time.time()
        theirs = float((await probe.ask({"do": "clock"}, FACTS_S))["time"])
        after = time.time()
        if after - before < best:
            best = after - before
            found.clock_offset_s = theirs - (before + after) / 2
            found.clock_error_s = best / 2


async def _ask_routes(patient: _ReachableMachine, patients: list[_ReachableMachine]) -> None:
    others = [p for p in patients if p is not patient and p.found.address is not None]
    asked = [p.found.address for p in others]
    answer = await patient.probe.ask({"do": "routes", "peers": asked}, FACTS_S)
    patient.found.addresses = answer["addresses"]
    patient.found.routes = {p.found.name: answer["routes"][p.found.address] for p in others}
    if patient.found.address is None:
        # The machine that we sit at: reached at the address from which it reaches the others.
        patient.found.address = most_common(
            [route["source"] for route in patient.found.routes.values() if route["source"]]
        )


def most_common(values: list[str]) -> str | None:
    return max(values, key=values.count) if values else None


async def _ask_ports(
    patients: list[_ReachableMachine],
    pairs: list[MachinePair],
    orders: ExaminationOptions,
    token: str,
) -> None:
    wanted = (0, *orders.ports)

    async def listen(patient: _ReachableMachine) -> None:
        for port in wanted:
            asked = {"do": "listen", "token": token, "port": port}
            answer = await patient.probe.ask(asked, FACTS_S)
            patient.found.listening[port] = answer["port"]

    async def reach(patient: _ReachableMachine) -> None:
        targets, slots = [], []
        for pair in pairs:
            if pair.source != patient.found.name:
                continue
            other = next((p.found for p in patients if p.found.name == pair.target), None)
            if other is None or other.address is None:
                continue
            for asked, actual in other.listening.items():
                if actual is not None:
                    targets.append([other.address, actual])
                    slots.append((pair, asked))
        message = {"do": "reach", "targets": targets, "token": token}
        answer = await patient.probe.ask(message, REACH_S)
        for (pair, asked), result in zip(slots, answer["reached"], strict=True):
            pair.reached[asked] = result

    await _each(patients, listen)
    await _each(patients, reach)


async def _measure_links(
    patients: list[_ReachableMachine],
    pairs: list[MachinePair],
    orders: ExaminationOptions,
    token: str,
) -> None:
    """Round by round, so that no machine is measured against two others at a time."""
    deadline = time.monotonic() + orders.links_budget_s
    by_name = {patient.found.name: patient for patient in patients}

    async def measure(pair: MachinePair) -> None:
        source, target = by_name.get(pair.source), by_name.get(pair.target)
        if source is None or target is None or pair.reached.get(0) != "ok":
            pair.why_not = "not reached"
            return
        message = {
            "do": "link",
            "address": target.found.address,
            "port": target.found.listening[0],
            "token": token,
            "seconds": orders.link_s,
        }
        try:
            answer = await source.probe.ask(message, REACH_S + 10 * orders.link_s)
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
                    pair.why_not = "not measured: the time for it was over"
                continue
            await asyncio.gather(*(measure(pair) for pair in chosen))


def round_robin_pairs(names: list[str]) -> list[list[tuple[str, str]]]:
    """Every two meet once, and in a round each meets one other: all but one stay, the rest turn."""
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


async def _measure_speed(patient: _ReachableMachine, orders: ExaminationOptions) -> None:
    asked = {"do": "flops", "seconds": orders.flops_s}
    answer = await patient.probe.ask(asked, STEPS_S)  # importing torch may take long
    patient.found.gflops = answer["gflops"]


async def _time_steps(patient: _ReachableMachine, orders: ExaminationOptions, share: int) -> None:
    async with run_program(patient.shell, "step_timing") as program:
        await program.tell({"job": orders.job, "share": share})
        patient.found.steps = await program.answer(STEPS_S, "training steps")

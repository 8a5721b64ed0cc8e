"""Injects the faults of `--fault` into a simulated run, in the text form of real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from paceline.errors import UsageError
from paceline.launch.deadlines import SILENCE_S
from paceline.specs.fault import InjectedFault
from paceline.telemetry.events import Event, FaultInjected
from paceline.twin.failures import EXIT_S
from paceline.twin.simulator import Simulator


def check_simulated_faults(faults: Sequence[InjectedFault], *, is_elastic: bool) -> None:
    """Raises UsageError for faults that have no meaning in virtual time."""
    for fault in faults:
        if fault.target != "worker" and fault.kind in ("stop", "slow"):
            raise UsageError(
                f"--fault '{fault.text}': a simulation stops and slows only workers; "
                "choose a worker, or kill or cut"
            )
        if fault.kind == "stop" and fault.for_s is None and not is_elastic:
            raise UsageError(
                f"--fault '{fault.text}': a worker that is stopped forever is a hang, which a "
                "simulation does not wait for; add for=30s, or use kill"
            )


def inject_faults(
    simulator: Simulator, faults: Sequence[InjectedFault], note: Callable[[Event], None]
) -> None:
    """Injects each fault when the coordinator has counted the samples of its point."""
    work = simulator.work
    waiting = [(fault.at.resolve(work.samples, work.epochs), fault) for fault in faults]
    waiting.sort(key=lambda each: each[0])
    simulator.failures.expected |= any(fault.kind != "slow" for fault in faults)

    def watch(now: float) -> None:
        while waiting and waiting[0][0] <= simulator.coordinator.history.samples:
            _, fault = waiting.pop(0)
            note(FaultInjected(t=round(now, 6), text=fault.text))
            _inject(simulator, fault, now)

    simulator.observers.append(watch)


def _inject(simulator: Simulator, fault: InjectedFault, now: float) -> None:
    for_s = math.inf if fault.for_s is None else fault.for_s
    name, why = fault.process.replace("-", " "), f"(injected: --fault '{fault.text}')"
    failures = simulator.failures
    if fault.kind == "stop":
        if simulator.plan.is_elastic and for_s > SILENCE_S:
            silent = f"{name} sent no heartbeat for {SILENCE_S:g} s {why}"
            failures.end_worker(fault.index, silent, now, noticed_s=SILENCE_S)
        else:
            simulator.fleet.pause(fault.index, now + for_s)
    elif fault.kind == "slow":
        simulator.fleet.slow_down(fault.index, fault.factor, now + for_s)
    else:
        how = "was killed" if fault.kind == "kill" else "lost its connections"
        text = f"{name} {how} {why}"
        if fault.target == "worker":
            failures.end_worker(fault.index, text, now)
        else:
            simulator.timeline.schedule(now + EXIT_S, partial(simulator.fail, text))

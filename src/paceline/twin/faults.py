"""Injects the faults of `--fault` into a simulated run, in the text form of real runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.errors import UsageError
from paceline.specs.fault import InjectedFault
from paceline.telemetry.events import Event, FaultInjected
from paceline.twin.simulator import Simulator


def check_simulated_faults(faults: Sequence[InjectedFault]) -> None:
    """Raises UsageError for faults that have no meaning in virtual time."""
    for fault in faults:
        if fault.target != "worker" and fault.kind in ("stop", "slow"):
            raise UsageError(
                f"--fault '{fault.text}': a simulation stops and slows only workers; "
                "choose a worker, or kill or cut"
            )
        if fault.kind == "stop" and fault.for_s is None:
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

    def watch(now: float) -> None:
        while waiting and waiting[0][0] <= simulator.coordinator.history.samples:
            _, fault = waiting.pop(0)
            note(FaultInjected(t=round(now, 6), text=fault.text))
            _inject(simulator, fault, now)

    simulator.observers.append(watch)


def _inject(simulator: Simulator, fault: InjectedFault, now: float) -> None:
    until = now + (math.inf if fault.for_s is None else fault.for_s)
    if fault.kind == "stop":
        simulator.fleet.pause(fault.index, until)
    elif fault.kind == "slow":
        simulator.fleet.slow_down(fault.index, fault.factor, until)
    else:
        if fault.target == "worker":
            simulator.dead.add(fault.index)
        name = fault.process.replace("-", " ")
        how = "was killed" if fault.kind == "kill" else "lost its connections"
        simulator.fail_later(f"{name} {how} (injected: --fault '{fault.text}')", now)

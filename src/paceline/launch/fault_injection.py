"""Injects the faults of a run (`--fault`) when it reaches their points, each of them once."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import SpecError
from paceline.launch.launcher import LaunchedProcess
from paceline.protocol.history import CoordinatorMemory
from paceline.specs.fault import InjectedFault
from paceline.telemetry.events import Event, FaultInjected, RunLengthKnown
from paceline.worker.faults import FOREVER_S, carry_out, fault_command


@dataclass(frozen=True)
class FaultTarget:
    """The run that faults are injected into."""

    memory: CoordinatorMemory | None
    """The checkpoint that it starts from."""
    server_parents: Sequence[int | None]
    """The workers that started the servers; None for a server that was launched."""
    processes: Mapping[str, LaunchedProcess]
    """Its processes at present, by name."""
    show: Callable[[Event], None]
    """Records an event; the process may end immediately afterwards."""
    drop_connections: Callable[[], None]
    """Closes all connections of the coordinator."""


class FaultInjector:
    """Decides which faults are due, and carries them out through the workers or here."""

    def __init__(self, faults: Sequence[InjectedFault], run: FaultTarget) -> None:
        self._waiting = list(faults)
        self._run = run
        self._due: list[tuple[int, InjectedFault]] = []
        self._injected: dict[str, str] = {}
        self._helpers: list[subprocess.Popen[bytes]] = []

    def observe(self, event: Event) -> None:
        """Finds the points of the faults when the length of the run is known.

        Faults before the checkpoint that the run starts from are over. Raises SpecError for a
        fraction of an unknown length.
        """
        if not isinstance(event, RunLengthKnown) or event.samples_per_epoch is None:
            return
        memory = self._run.memory
        begun = int(memory["history"]["samples"]) if memory is not None else 0
        for fault in self._waiting:
            try:
                at = fault.at.resolve(event.samples_per_epoch, event.epochs)
            except SpecError as error:
                raise SpecError(f"--fault '{fault.text}': {error}") from None
            if at > begun:
                self._due.append((at, fault))
        self._due.sort(key=lambda each: each[0])
        self._waiting = []

    def inject_due(self, samples: int, now: float) -> None:
        """Injects the faults that are due after this many samples."""
        while self._due and self._due[0][0] <= samples:
            _, fault = self._due.pop(0)
            self._run.show(FaultInjected(t=round(now, 6), text=fault.text))
            self._injected[fault.process] = fault.text
            self._inject(fault)

    def _inject(self, fault: InjectedFault) -> None:
        if fault.target == "coordinator":
            if fault.kind == "cut":
                self._run.drop_connections()
                return
            for_s = FOREVER_S if fault.for_s is None else fault.for_s
            helper = carry_out(fault.kind, for_s, fault.factor)
            if helper is not None:
                self._helpers.append(helper)
            return
        worker, server = fault.process, None
        if (
            fault.target == "server"
            and (parent := self._run.server_parents[fault.index]) is not None
        ):
            worker, server = f"worker-{parent}", fault.index
        line = fault_command(fault.kind, fault.for_s, fault.factor, server)
        if (process := self._run.processes.get(worker)) is not None:
            process.send_command(line)

    def explain(self, who: str) -> str:
        """Returns the remark for the next failure of this process, empty without a fault."""
        text = self._injected.pop(who, None)
        return f" (injected: --fault '{text}')" if text is not None else ""

    def close(self) -> None:
        """Ends the helpers of this process."""
        for helper in self._helpers:
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
            helper.wait()

"""Heartbeats of a worker to the coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.comm.control import ControlConnection
from paceline.errors import PacelineError
from paceline.protocol.messages import Heartbeat
from paceline.telemetry.events import PHASES
from paceline.telemetry.phase_clock import PhaseClock

HEARTBEAT_S = 1.0


class HeartbeatThread(threading.Thread):
    """Sends a heartbeat every second; calls `on_lost` if the coordinator is unreachable."""

    def __init__(
        self,
        *,
        rank: int,
        control: ControlConnection,
        clock: PhaseClock,
        step: Callable[[], int],
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(daemon=True)
        self._rank = rank
        self._control = control
        self._clock = clock
        self._step = step
        self._on_lost = on_lost
        self._stop = threading.Event()

    def run(self) -> None:
        clock = self._clock
        while not self._stop.wait(HEARTBEAT_S):
            beat = Heartbeat(self._rank, self._step(), PHASES[clock.current], clock.changes)
            try:
                self._control.send(beat)
            except PacelineError:
                if not self._stop.is_set():
                    self._on_lost()
                return

    def stop(self) -> None:
        self._stop.set()

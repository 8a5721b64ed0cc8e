"""Writes the events of a process to its file, and forwards them to the supervisor."""

from __future__ import annotations

import contextlib
import resource

from paceline.comm.control import ControlConnection
from paceline.errors import PacelineError
from paceline.protocol.messages import TelemetryForwarded
from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics
from paceline.telemetry.phase_clock import PhaseClock
from paceline.telemetry.run_folder import EventSink
from paceline.telemetry.sampler import MetricsDownsampler, Sampler, ServerCounters, StepCounters
from paceline.worker.assignment import Assignment


class TelemetryReporter:
    """Ignores connection errors: the heartbeats exit the process if the supervisor is lost."""

    def __init__(
        self,
        assignment: Assignment,
        control: ControlConnection,
        sink: EventSink,
        clock: PhaseClock,
        counters: StepCounters,
        serving: ServerCounters | None = None,
    ) -> None:
        self._who = assignment.process_name
        self._control = control
        self._on = assignment.telemetry
        self._sink = sink
        self._thinner = MetricsDownsampler(sink.write)
        self._sampler: Sampler | None = None
        if self._on:
            self._sampler = Sampler(
                now_s=clock.now_s,
                tell=self.report,
                run_key=assignment.token,
                clock=clock,
                counters=counters,
                serving=serving,
            )

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()

    def report(self, event: Event) -> None:
        if isinstance(event, ProcessMetrics | HostMetrics):
            self._thinner(event)
        else:
            self._sink.write(event)
        if self._on:
            with contextlib.suppress(PacelineError):
                self._control.send(TelemetryForwarded(self._who, event.to_plain()))

    def sample_now(self) -> None:
        """Samples metrics immediately."""
        if self._sampler is not None:
            self._sampler.sample()

    def stop(self) -> None:
        """Samples the last metrics while the counted connections are still open."""
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

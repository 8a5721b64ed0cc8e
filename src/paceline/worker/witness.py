"""What a process tells of itself: into its event file, and to the supervisor, who watches live."""

from __future__ import annotations

from paceline.comm.control import Control
from paceline.errors import PacelineError
from paceline.protocol.messages import Observed
from paceline.telemetry.events import Event, MachineVitals, Vitals
from paceline.telemetry.folder import EventSink
from paceline.telemetry.phases import PhaseClock
from paceline.telemetry.sampler import Counters, Sampler, Serving, Thinner
from paceline.worker.assignment import Assignment


class Witness:
    """Losing the supervisor is not this one's business: the heart ends the process then."""

    def __init__(
        self,
        assignment: Assignment,
        control: Control,
        sink: EventSink,
        clock: PhaseClock,
        counters: Counters,
        serving: Serving | None = None,
    ) -> None:
        self._who = assignment.who
        self._control = control
        self._on = assignment.telemetry
        self._sink = sink
        self._thinner = Thinner(sink.write)
        self._sampler: Sampler | None = None
        if self._on:
            self._sampler = Sampler(
                now_s=clock.now_s,
                tell=self.tell,
                run_key=assignment.token,
                clock=clock,
                counters=counters,
                serving=serving,
            )

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()

    def tell(self, event: Event) -> None:
        if isinstance(event, Vitals | MachineVitals):
            self._thinner(event)
        else:
            self._sink.write(event)
        if self._on:
            try:
                self._control.tell(Observed(self._who, event.to_plain()))
            except PacelineError:
                pass

    def look(self) -> None:
        """Take vitals now, whatever the second."""
        if self._sampler is not None:
            self._sampler.sample()

    def stop(self) -> None:
        """Take the last vitals; the connections whose bytes they count must still be open."""
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()

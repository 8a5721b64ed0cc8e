"""Live monitoring of a run: process metrics, verdicts, and the metrics endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.launch.metrics_server import MetricsServer
from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics, parse_event
from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.prometheus import expose
from paceline.telemetry.run_folder import COORDINATOR, EventWriter
from paceline.telemetry.sampler import MetricsDownsampler, Sampler
from paceline.telemetry.schema import RunConfig


class LiveMonitor:
    """The supervisor's own metrics, and the record of those of all processes."""

    def __init__(
        self,
        config: RunConfig,
        writer: EventWriter,
        *,
        metrics_port: int | None = None,
        metrics_file: Path | None = None,
    ) -> None:
        self.live = LiveRun(config)
        self._metrics: MetricsServer | None = None
        if metrics_port is not None:
            assert metrics_file is not None
            self._metrics = MetricsServer(metrics_port, metrics_file, lambda: expose(self.live))
        self._thinner = MetricsDownsampler(writer.write)
        self._sampler: Sampler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, now_s: Callable[[], float], run_key: str) -> None:
        self._loop = asyncio.get_running_loop()
        if self._metrics is not None:
            await self._metrics.start()
        self._sampler = Sampler(now_s=now_s, tell=self._tell, run_key=run_key)
        self._sampler.start()

    def _tell(self, event: Event) -> None:
        """Called from the sampler's thread; forwards to the event loop, which owns the record."""
        assert isinstance(event, ProcessMetrics | HostMetrics)
        assert self._loop is not None
        self._thinner(event)
        self._loop.call_soon_threadsafe(self.live.add, COORDINATOR, event)

    def record(self, who: str, plain: Mapping[str, object]) -> None:
        """Adds an event received from another process; ignores a malformed one."""
        event = parse_event(plain)
        if event is not None:
            self.live.add(who, event)

    def sample_now(self) -> None:
        """Samples this process now, because a connection is about to be closed."""
        if self._sampler is not None:
            self._sampler.sample()

    async def stop(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()

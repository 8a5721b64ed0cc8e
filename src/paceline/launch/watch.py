"""Watching a run live: its processes' vitals, verdicts, and metrics for those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.launch.metrics import MetricsServer
from paceline.telemetry.events import Event, Judged, MachineVitals, Vitals
from paceline.telemetry.folder import EventWriter
from paceline.telemetry.live import LiveRun
from paceline.telemetry.prometheus import expose
from paceline.telemetry.sampler import Sampler, Thinner


class Watch:
    """The supervisor's own vitals, and the record of everybody's."""

    def __init__(
        self,
        config: dict[str, Any],
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
        self._thinner = Thinner(writer.write)
        self._sampler: Sampler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, now_s: Callable[[], float], run_key: str) -> None:
        self._loop = asyncio.get_running_loop()
        if self._metrics is not None:
            await self._metrics.start()
        self._sampler = Sampler(now_s=now_s, tell=self._tell, run_key=run_key)
        self._sampler.start()

    def _tell(self, event: Event) -> None:
        """Comes from the sampler's thread; the live record belongs to the event loop's."""
        assert isinstance(event, Vitals | MachineVitals)
        assert self._loop is not None
        self._thinner(event)
        self._loop.call_soon_threadsafe(self.live.take, "run", event.to_plain())

    def take(self, who: str, event: dict[str, Any]) -> None:
        self.live.take(who, event)

    def look(self) -> None:
        """Take this process's vitals now: a connection is about to be closed."""
        if self._sampler is not None:
            self._sampler.sample()

    def judge(self, now_s: float) -> list[Judged]:
        return self.live.judge(now_s)

    async def stop(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()

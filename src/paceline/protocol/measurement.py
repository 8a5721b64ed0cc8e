"""Coordinator of a measurement without training: waits for the results of all workers."""

from collections.abc import Generator
from typing import Any

from paceline.protocol.coordinator import Coordinator
from paceline.protocol.messages import WorkerFinished


class MeasurementCoordinator(Coordinator):
    """Ends when every worker has sent its totals; `totals` contains them."""

    def _run_sequence(self) -> Generator[None, list[Any], None]:
        self._awaited = WorkerFinished
        finished: list[WorkerFinished] = yield
        self.totals = {each.worker: each.totals for each in finished}
        self._end("done", None)

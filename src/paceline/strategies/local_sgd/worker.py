"""Worker side of local_sgd: replicas are averaged every `h` steps, or when they drift apart."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paceline.strategies.local_runner import LocalStepsRunner
from paceline.strategies.local_sgd.spec import LocalSgd
from paceline.strategies.runner import WorkerContext


class LocalSgdRunner(LocalStepsRunner):
    """Weights are averaged every `h` steps, or when a replica has drifted too far."""

    def __init__(self, spec: LocalSgd, context: WorkerContext) -> None:
        super().__init__(spec, context)
        self._spec = spec
        self._vote: tuple[torch.Tensor, dist.Work | None] | None = None

    def _is_due(self) -> bool:
        if self._spec.drift is None:
            return super()._is_due()
        # The vote of a step is read one step later, so that no worker waits for it.
        verdict = self._finish_drift_check() > self._spec.drift
        self._start_drift_check(0.0 if verdict else self._drift())
        return verdict

    def _synchronize(self) -> None:
        self._average_in_place([p.detach() for p in self._parameters])
        self._set_anchor()

    def sync_weights(self, version: int) -> None:
        self._finish_drift_check()
        super().sync_weights(version)

    def _drift(self) -> float:
        """Returns the relative distance from the weights of the last synchronization."""
        with torch.no_grad():
            moved = sum(
                float((p - a).square().sum())
                for p, a in zip(self._parameters, self._anchor, strict=True)
            )
            size = sum(float(a.square().sum()) for a in self._anchor)
        return float((moved / max(size, 1e-30)) ** 0.5)

    def _start_drift_check(self, drift: float) -> None:
        ballot = torch.tensor([drift], dtype=torch.float64)
        self._vote = (ballot, self.context.group.all_reduce_async(ballot, largest=True))

    def _finish_drift_check(self) -> float:
        if self._vote is None:
            return 0.0
        ballot, work = self._vote
        self._vote = None
        if work is not None:
            work.wait()
        return float(ballot)

"""Worker side of diloco: local steps, then an outer step on the change of the weights."""

from collections.abc import Sequence

import torch

from paceline.state import Section
from paceline.strategies.diloco.spec import MAX_OUTER_MOMENTUM, DiLoCo
from paceline.strategies.local_sgd.worker import LocalStepsRunner
from paceline.strategies.optimizer_traits import momentum_of
from paceline.strategies.runner import WorkerContext


class DiLoCoRunner(LocalStepsRunner):
    """Applies an outer optimizer to the change of the weights since the last synchronization."""

    def __init__(self, spec: DiLoCo, context: WorkerContext) -> None:
        super().__init__(spec, context)
        self._spec = spec
        self._outer: torch.optim.SGD  # made for the imported weights

    def import_state(self, state: Section) -> None:
        super().import_state(state)
        self._outer = torch.optim.SGD(
            self._anchor,
            lr=self._spec.outer_lr,
            momentum=MAX_OUTER_MOMENTUM,
            nesterov=True,
        )
        for (name, _), anchor in zip(self.replica.trained, self._anchor, strict=True):
            momentum = state.tensors.get(f"outer/{name}")
            if momentum is not None:
                self._outer.state[anchor]["momentum_buffer"] = momentum.clone()

    def _synchronize(self) -> None:
        with torch.no_grad():
            delta = [a - p for p, a in zip(self._parameters, self._anchor, strict=True)]
            self._average_in_place(delta)
            for anchor, moved in zip(self._anchor, delta, strict=True):
                anchor.grad = moved
            self._set_momentum()
            self._outer.step()
            for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
                anchor.grad = None
                parameter.copy_(anchor)
        self._samples = self._whole = self._steps = 0

    def _set_momentum(self) -> None:
        """Sets the momentum for the steps since the last synchronization."""
        inner = max(momentum_of(group) for group in self.replica.optimizer.param_groups)
        momentum = self._spec.outer_momentum_after(self._steps, inner)
        for group in self._outer.param_groups:
            group |= {"momentum": momentum, "nesterov": momentum > 0}

    def recover_state(self, version: int, lost_servers: Sequence[tuple[str, int]] = ()) -> Section:
        return self._with_momentum(super().recover_state(version, lost_servers))

    def export_state(self) -> Section:
        return self._with_momentum(super().export_state())

    def _with_momentum(self, section: Section) -> Section:
        for (name, _), anchor in zip(self.replica.trained, self._anchor, strict=True):
            momentum = self._outer.state.get(anchor, {}).get("momentum_buffer")
            if momentum is not None:
                section.tensors[f"outer/{name}"] = momentum
        return section

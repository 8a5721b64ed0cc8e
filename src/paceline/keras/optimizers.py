"""Keras's optimizers as torch optimizers, with the same formulas, for use in any strategy.

Keras and torch differ in more than names (the position of epsilon, the combination of momentum and
learning rate), so torch's own classes would give other results. Slots have the names of Keras's
variables, so that they can be converted in both directions. Does not import Keras, which servers do
not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

Slots = dict[str, Tensor]
Group = dict[str, Any]


class TorchKerasOptimizer(torch.optim.Optimizer):
    """Base class: decoupled weight decay, and gradient clipping per parameter."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Tensors with the shape of the parameter, initially zero."""
    defaults_of: ClassVar[Mapping[str, float | bool]] = {}

    def __init__(self, params: Iterable[Any], lr: float = 0.001, **options: Any) -> None:
        common = {"lr": lr, "weight_decay": 0.0, "clipnorm": 0.0, "clipvalue": 0.0}
        unknown = set(options) - set(common) - set(self.defaults_of)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)[0]!r}")
        super().__init__(params, {**common, **self.defaults_of, **options})

    @property
    def elementwise(self) -> bool:
        """True if a slice of a parameter can be updated independently of the rest."""
        return not any(group["clipnorm"] for group in self.param_groups)

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = {name: torch.zeros_like(parameter) for name in self.slots}
        return {"step": torch.zeros((), dtype=torch.float32), **made}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.first_slots(parameter, group))
                gradient = _clip(parameter.grad, group)
                if group["weight_decay"]:
                    parameter.sub_(parameter, alpha=group["weight_decay"] * group["lr"])
                state["step"] += 1
                self.update(parameter, gradient, state, group)

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        raise NotImplementedError


def _clip(gradient: Tensor, group: Group) -> Tensor:
    if group["clipnorm"]:
        norm = gradient.square().sum().sqrt()
        limit = float(group["clipnorm"])
        return gradient * (limit / norm.clamp(min=limit))
    if group["clipvalue"]:
        return gradient.clamp(-group["clipvalue"], group["clipvalue"])
    return gradient


class SGD(TorchKerasOptimizer):
    slots = ("momentum",)
    defaults_of: ClassVar[Mapping[str, float | bool]] = {"momentum": 0.0, "nesterov": False}

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = super().first_slots(parameter, group)
        if not group["momentum"]:
            del made["momentum"]
        return made

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        lr, momentum = group["lr"], group["momentum"]
        if not momentum:
            parameter.sub_(gradient, alpha=lr)
            return
        moved = state["momentum"].mul_(momentum).sub_(gradient, alpha=lr)
        if group["nesterov"]:
            parameter.add_(moved, alpha=momentum).sub_(gradient, alpha=lr)
        else:
            parameter.add_(moved)


class Adam(TorchKerasOptimizer):
    slots = ("momentum", "velocity")
    defaults_of: ClassVar[Mapping[str, float | bool]] = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "amsgrad": False,
    }

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = super().first_slots(parameter, group)
        if group["amsgrad"]:
            made["velocity_hat"] = torch.zeros_like(parameter)
        return made

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        step, beta_1, beta_2 = float(state["step"]), group["beta_1"], group["beta_2"]
        alpha = group["lr"] * (1 - beta_2**step) ** 0.5 / (1 - beta_1**step)
        mean, square = state["momentum"], state["velocity"]
        mean.lerp_(gradient, 1 - beta_1)
        square.lerp_(gradient.square(), 1 - beta_2)
        if group["amsgrad"]:
            square = torch.maximum(state["velocity_hat"], square, out=state["velocity_hat"])
        parameter.addcdiv_(mean, square.sqrt().add_(group["epsilon"]), value=-alpha)


class AdamW(Adam):
    """Adam with the weight decay of the base class, under Keras's name."""


class Adamax(TorchKerasOptimizer):
    slots = ("momentum", "norm")
    defaults_of: ClassVar[Mapping[str, float | bool]] = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
    }

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        mean, norm = state["momentum"], state["norm"]
        mean.lerp_(gradient, 1 - group["beta_1"])
        torch.maximum(norm.mul_(group["beta_2"]), gradient.abs(), out=norm)
        alpha = group["lr"] / (1 - group["beta_1"] ** float(state["step"]))
        parameter.addcdiv_(mean, norm + group["epsilon"], value=-alpha)


class Nadam(TorchKerasOptimizer):
    slots = ("momentum", "velocity")
    defaults_of: ClassVar[Mapping[str, float | bool]] = {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
    }

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        return {**super().first_slots(parameter, group), "u_product": torch.ones(())}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        step, beta_1, beta_2 = float(state["step"]), group["beta_1"], group["beta_2"]
        u = beta_1 * (1 - 0.5 * 0.96**step)
        next_u = beta_1 * (1 - 0.5 * 0.96 ** (step + 1))
        product = float(state["u_product"].mul_(u))
        mean, square = state["momentum"], state["velocity"]
        mean.lerp_(gradient, 1 - beta_1)
        square.lerp_(gradient.square(), 1 - beta_2)
        ahead = mean * (next_u / (1 - product * next_u)) + gradient * ((1 - u) / (1 - product))
        scale = (square / (1 - beta_2**step)).sqrt_().add_(group["epsilon"])
        parameter.addcdiv_(ahead, scale, value=-group["lr"])


class RMSprop(TorchKerasOptimizer):
    slots = ("velocity",)
    defaults_of: ClassVar[Mapping[str, float | bool]] = {
        "rho": 0.9,
        "momentum": 0.0,
        "epsilon": 1e-7,
        "centered": False,
    }

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = super().first_slots(parameter, group)
        if group["momentum"]:
            made["momentum"] = torch.zeros_like(parameter)
        if group["centered"]:
            made["average_gradient"] = torch.zeros_like(parameter)
        return made

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        rho = group["rho"]
        square = state["velocity"].lerp_(gradient.square(), 1 - rho)
        if group["centered"]:
            square = square - state["average_gradient"].lerp_(gradient, 1 - rho).square()
        step = gradient * group["lr"] / (square + group["epsilon"]).sqrt_()
        if group["momentum"]:
            step = state["momentum"].mul_(group["momentum"]).add_(step)
        parameter.sub_(step)


class Adagrad(TorchKerasOptimizer):
    defaults_of: ClassVar[Mapping[str, float | bool]] = {
        "initial_accumulator_value": 0.1,
        "epsilon": 1e-7,
    }

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = super().first_slots(parameter, group)
        first = group["initial_accumulator_value"]
        return {**made, "accumulator": torch.full_like(parameter, first)}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        total = state["accumulator"].addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, (total + group["epsilon"]).sqrt_(), value=-group["lr"])


class Adadelta(TorchKerasOptimizer):
    slots = ("accumulated_grad", "accumulated_delta_var")
    defaults_of: ClassVar[Mapping[str, float | bool]] = {"rho": 0.95, "epsilon": 1e-7}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        rho, epsilon = group["rho"], group["epsilon"]
        square, moved = state["accumulated_grad"], state["accumulated_delta_var"]
        square.lerp_(gradient.square(), 1 - rho)
        step = (moved + epsilon).sqrt_().mul_(gradient).div_((square + epsilon).sqrt_())
        moved.lerp_(step.square(), 1 - rho)
        parameter.sub_(step, alpha=group["lr"])


class Lion(TorchKerasOptimizer):
    slots = ("momentum",)
    defaults_of: ClassVar[Mapping[str, float | bool]] = {"beta_1": 0.9, "beta_2": 0.99}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        mean = state["momentum"]
        parameter.sub_(mean.lerp(gradient, 1 - group["beta_1"]).sign_(), alpha=group["lr"])
        mean.lerp_(gradient, 1 - group["beta_2"])


CLASSES: dict[str, type[TorchKerasOptimizer]] = {
    c.__name__: c for c in (SGD, Adam, AdamW, Adamax, Nadam, RMSprop, Adagrad, Adadelta, Lion)
}
"""Optimizer classes by their Keras names."""

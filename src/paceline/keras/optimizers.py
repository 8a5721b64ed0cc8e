"""Keras's optimizers as torch optimizers, with the same formulas, for use in any strategy.

Keras and torch differ in more than names (the position of epsilon, the combination of momentum and
learning rate), so torch's own classes would give other results. Options and slots have the names of
Keras's, so that they can be converted in both directions. Does not import Keras, which servers do
not need.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.specs.optimizer import OPTIMIZERS, OptimizerSpec

Slots = dict[str, Tensor]
Group = dict[str, Any]

UNSUPPORTED = {
    "use_ema": "a moving average of weights",
    "loss_scale_factor": "loss scaling",
    "gradient_accumulation_steps": "gradient accumulation (choose a larger batch)",
}


class TorchKerasOptimizer(torch.optim.Optimizer):
    """Base class: decoupled weight decay, and gradient clipping per parameter.

    Options and their defaults are those of the spec of the same name.
    """

    slots: ClassVar[Mapping[str, str]] = {}
    """Tensors with the shape of the parameter, initially zero, and the attribute of each in Keras:
    a list with one variable per trained weight."""
    optional: ClassVar[Mapping[str, str]] = {}
    """Slots that exist only if an option is set."""

    def __init__(self, params: Iterable[Any], lr: float = 0.001, **options: Any) -> None:
        defaults = OPTIMIZERS[f"keras_{type(self).__name__.lower()}"]().options()
        unknown = set(options) - set(defaults)
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)[0]!r}")
        super().__init__(params, {"lr": lr, **defaults, **options})

    @property
    def elementwise(self) -> bool:
        """True if a slice of a parameter can be updated independently of the rest."""
        return not any(group["clipnorm"] for group in self.param_groups)

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        names = (n for n in self.slots if n not in self.optional or group[self.optional[n]])
        made = {name: torch.zeros_like(parameter) for name in names}
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
    slots: ClassVar = {"momentum": "momentums"}
    optional: ClassVar = {"momentum": "momentum"}

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
    slots: ClassVar = {
        "momentum": "_momentums",
        "velocity": "_velocities",
        "velocity_hat": "_velocity_hats",
    }
    optional: ClassVar = {"velocity_hat": "amsgrad"}

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
    slots: ClassVar = {"momentum": "_m", "norm": "_u"}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        mean, norm = state["momentum"], state["norm"]
        mean.lerp_(gradient, 1 - group["beta_1"])
        torch.maximum(norm.mul_(group["beta_2"]), gradient.abs(), out=norm)
        alpha = group["lr"] / (1 - group["beta_1"] ** float(state["step"]))
        parameter.addcdiv_(mean, norm + group["epsilon"], value=-alpha)


class Nadam(TorchKerasOptimizer):
    slots: ClassVar = {"momentum": "_momentums", "velocity": "_velocities"}

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
    slots: ClassVar = {
        "velocity": "_velocities",
        "momentum": "_momentums",
        "average_gradient": "_average_gradients",
    }
    optional: ClassVar = {"momentum": "momentum", "average_gradient": "centered"}

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
    slots: ClassVar = {"accumulator": "_accumulators"}

    def first_slots(self, parameter: Tensor, group: Group) -> Slots:
        made = super().first_slots(parameter, group)
        made["accumulator"].fill_(group["initial_accumulator_value"])
        return made

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        total = state["accumulator"].addcmul_(gradient, gradient)
        parameter.addcdiv_(gradient, (total + group["epsilon"]).sqrt_(), value=-group["lr"])


class Adadelta(TorchKerasOptimizer):
    slots: ClassVar = {
        "accumulated_grad": "_accumulated_grads",
        "accumulated_delta_var": "_accumulated_delta_vars",
    }

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        rho, epsilon = group["rho"], group["epsilon"]
        square, moved = state["accumulated_grad"], state["accumulated_delta_var"]
        square.lerp_(gradient.square(), 1 - rho)
        step = (moved + epsilon).sqrt_().mul_(gradient).div_((square + epsilon).sqrt_())
        moved.lerp_(step.square(), 1 - rho)
        parameter.sub_(step, alpha=group["lr"])


class Lion(TorchKerasOptimizer):
    slots: ClassVar = {"momentum": "_momentums"}

    def update(self, parameter: Tensor, gradient: Tensor, state: Slots, group: Group) -> None:
        mean = state["momentum"]
        parameter.sub_(mean.lerp(gradient, 1 - group["beta_1"]).sign_(), alpha=group["lr"])
        mean.lerp_(gradient, 1 - group["beta_2"])


CLASSES: dict[str, type[TorchKerasOptimizer]] = {
    c.__name__: c for c in (SGD, Adam, AdamW, Adamax, Nadam, RMSprop, Adagrad, Adadelta, Lion)
}
"""Optimizer classes by their Keras names."""


def translate(optimizer: Any) -> tuple[OptimizerSpec, float | None]:
    """Returns the spec and the maximum gradient norm. Raises UsageError for unsupported options."""
    name = type(optimizer).__name__
    if name not in CLASSES or not type(optimizer).__module__.startswith("keras."):
        raise UsageError(
            f"the Keras optimizer {name} is not supported; use one of {', '.join(CLASSES)}"
        )
    config = optimizer.get_config()
    for option, what in UNSUPPORTED.items():
        if config.get(option):
            raise UsageError(f"{name}({option}={config[option]!r}): {what} is not supported")
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise UsageError(f"{name}.exclude_from_weight_decay() is not supported")
    cls = OPTIMIZERS[f"keras_{name.lower()}"]
    known = cls().options()
    options = {k: v for k, v in config.items() if k in known and v is not None}
    return cls(**options), config.get("global_clipnorm") or None


def make_torch_optimizer(optimizer: Any, parameters: Iterable[Tensor]) -> TorchKerasOptimizer:
    """Returns a torch optimizer equivalent to the Keras optimizer."""
    options = translate(optimizer)[0].options()
    cls = CLASSES[type(optimizer).__name__]
    return cls(parameters, lr=float(optimizer.learning_rate), **options)


def import_slots(optimizer: Any, model: Any, converted: TorchKerasOptimizer) -> None:
    """Initializes the torch slots from a loaded Keras optimizer."""
    if not optimizer.built or int(optimizer.iterations) == 0:
        return
    for index, variable in enumerate(model.trainable_variables):
        state = converted.first_slots(variable.value.detach(), converted.param_groups[0])
        state["step"].fill_(int(optimizer.iterations))
        for slot, kept in _keras_slots(optimizer, index).items():
            if slot in state:
                state[slot].copy_(kept.value.detach())
        converted.state[variable.value] = state


def export_slots(optimizer: Any, variables: list[Any], slots: list[dict[str, Any]]) -> None:
    """Copies the slots of each variable to the Keras optimizer, so that saving it keeps them."""
    if not optimizer.built:
        optimizer.build(variables)
    for index, given in enumerate(slots):
        for slot, kept in _keras_slots(optimizer, index).items():
            if slot in given:
                kept.assign(given[slot])


def _keras_slots(optimizer: Any, index: int) -> dict[str, Any]:
    """Returns the Keras variables of one trained weight, by the slot that corresponds to each."""
    attributes = CLASSES[type(optimizer).__name__].slots
    lists = {slot: getattr(optimizer, attribute, []) for slot, attribute in attributes.items()}
    found = {slot: kept[index] for slot, kept in lists.items() if kept}
    # Shared by all weights, and only Nadam has it.
    product = getattr(optimizer, "_u_product", None)
    return found if product is None else {**found, "u_product": product}


def step_at(epoch: int, start: int, samples: int, batch: int) -> int:
    """Returns Keras's step count at a position of an epoch, independent of the strategy."""
    return epoch * -(-samples // batch) + start // batch

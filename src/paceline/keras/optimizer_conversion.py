"""Converts Keras optimizers to torch and back: options, learning rate, slots."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.keras.module import import_keras
from paceline.keras.optimizers import CLASSES, TorchKerasOptimizer
from paceline.specs.optimizer import OPTIMIZERS, OptimizerSpec

UNSUPPORTED = {
    "use_ema": "a moving average of weights",
    "loss_scale_factor": "loss scaling",
    "gradient_accumulation_steps": "gradient accumulation (choose a larger batch)",
}


@dataclass(frozen=True)
class ConvertedOptimizer:
    """An optimizer spec; `clip` is the maximum norm of the whole gradient."""

    spec: OptimizerSpec
    clip: float | None


def translate(optimizer: Any) -> ConvertedOptimizer:
    """Converts a Keras optimizer. Raises UsageError for unsupported options."""
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
    return ConvertedOptimizer(cls(**options), config.get("global_clipnorm") or None)


def make_torch_optimizer(
    optimizer: Any, parameters: Iterable[torch.nn.Parameter]
) -> TorchKerasOptimizer:
    """Returns a torch optimizer equivalent to the Keras optimizer."""
    spec = translate(optimizer).spec
    cls = CLASSES[type(optimizer).__name__]
    return cls(parameters, lr=float(optimizer.learning_rate), **spec.options())


def import_slots(optimizer: Any, model: Any, converted: TorchKerasOptimizer) -> None:
    """Initializes the torch slots from a loaded Keras optimizer."""
    if not optimizer.built or int(optimizer.iterations) == 0:
        return
    for index, variable in enumerate(model.trainable_variables):
        state = converted.first_slots(variable.value.detach(), converted.param_groups[0])
        state["step"].fill_(int(optimizer.iterations))
        if "u_product" in state:
            state["u_product"].copy_(optimizer._u_product.value.detach())
        for slot, attribute in converted.slots.items():
            kept = getattr(optimizer, attribute, [])
            if slot in state and kept:
                state[slot].copy_(kept[index].value.detach())
        converted.state[variable.value] = state


def export_slots(
    optimizer: Any, variables: list[Any], names: list[str], slots: dict[str, dict[str, Any]]
) -> None:
    """Copies slots back to the Keras optimizer, so that saving it keeps them."""
    if not optimizer.built:
        optimizer.build(variables)
    for index, name in enumerate(names):
        for slot, attribute in CLASSES[type(optimizer).__name__].slots.items():
            kept = getattr(optimizer, attribute, [])
            if kept and slot in slots.get(name, {}):
                kept[index].assign(slots[name][slot])
        if "u_product" in slots.get(name, {}):
            optimizer._u_product.assign(slots[name]["u_product"])


class KerasSchedule:
    """A Keras learning-rate schedule for a job; its step counts global batches.

    Pickled as JSON: the schedule's class and configuration.
    """

    def __init__(self, schedule: Any, batch: int, base: float) -> None:
        self._text = json.dumps(import_keras().saving.serialize_keras_object(schedule))
        self._batch = batch
        self._base = base
        self._schedule: Any = None

    def __str__(self) -> str:
        return f"keras {json.loads(self._text)['class_name']}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_schedule": None}

    def factor(self, samples: int, *, per_epoch: int, total: int) -> float:
        if self._schedule is None:
            saving = import_keras().saving
            self._schedule = saving.deserialize_keras_object(json.loads(self._text))
        step = step_at(samples // per_epoch, samples % per_epoch, per_epoch, self._batch)
        return float(self._schedule(step)) / self._base

    def drops(self, *, per_epoch: int, total: int) -> list[float]:
        return []


def step_at(epoch: int, start: int, samples: int, batch: int) -> int:
    """Returns Keras's step count at a position of an epoch, independent of the strategy."""
    return epoch * -(-samples // batch) + start // batch


def schedule_of(optimizer: Any) -> Any | None:
    """Returns the Keras schedule of an optimizer's learning rate, if there is one."""
    keras = import_keras()
    kept = getattr(optimizer, "_learning_rate", None)
    return kept if isinstance(kept, keras.optimizers.schedules.LearningRateSchedule) else None

"""Optimizer specs: the names and options of torch.optim and of Keras, without the learning rate.

The formulas of Keras's optimizers differ from those of torch's of the same name; `paceline.keras`
implements them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.specs.base import Spec, bool_field, float_field, numbers_field, parse_spec, spec_field

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {}

_SLOTS = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1, "adadelta": 2}

_from_zero = float_field(0.0)
_share = float_field(0.0, 1.0)
_eps = float_field(0.0, above=True)


def count_slots(word: str, options: Mapping[str, Any]) -> int:
    """State values per weight; two for an optimizer that is not known by name."""
    further = sum(bool(options.get(name)) for name in ("momentum", "centered", "amsgrad"))
    return _SLOTS.get(word.lower(), 2) + further


def parse_optimizer(text: str) -> OptimizerSpec:
    return parse_spec(text, OPTIMIZERS, "optimizer")


class OptimizerSpec(Spec):
    """A class with a name is added to `OPTIMIZERS`; `torch_class` implements it (module:Class)."""

    torch_class: ClassVar[str]

    def __init_subclass__(cls, *, name: str = "", torch_class: str = "") -> None:
        cls.name, cls.torch_class = name, torch_class
        if name:
            OPTIMIZERS[name] = cls

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the torch class, without the learning rate."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Not asked for is left to torch, not forbidden.
        return {k: v for k, v in given.items() if k != "fused" or v}


@dataclass(frozen=True)
class SgdSpec(OptimizerSpec, name="sgd", torch_class="torch.optim:SGD"):
    momentum: float = spec_field(_share, 0.0)
    weight_decay: float = spec_field(_from_zero, 0.0)
    nesterov: bool = spec_field(bool_field, False)
    dampening: float = spec_field(_share, 0.0)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdamSpec(OptimizerSpec, name="adam", torch_class="torch.optim:Adam"):
    betas: tuple[float, ...] = spec_field(numbers_field(_share), (0.9, 0.999))
    eps: float = spec_field(_eps, 1e-8)
    weight_decay: float = spec_field(_from_zero, 0.0)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdamWSpec(AdamSpec, name="adamw", torch_class="torch.optim:AdamW"):
    weight_decay: float = spec_field(_from_zero, 0.01)


@dataclass(frozen=True)
class AdagradSpec(OptimizerSpec, name="adagrad", torch_class="torch.optim:Adagrad"):
    lr_decay: float = spec_field(_from_zero, 0.0)
    weight_decay: float = spec_field(_from_zero, 0.0)
    eps: float = spec_field(_eps, 1e-10)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdadeltaSpec(OptimizerSpec, name="adadelta", torch_class="torch.optim:Adadelta"):
    rho: float = spec_field(_share, 0.9)
    eps: float = spec_field(_eps, 1e-6)
    weight_decay: float = spec_field(_from_zero, 0.0)


@dataclass(frozen=True)
class RmsPropSpec(OptimizerSpec, name="rmsprop", torch_class="torch.optim:RMSprop"):
    alpha: float = spec_field(_share, 0.99)
    eps: float = spec_field(_eps, 1e-8)
    momentum: float = spec_field(_share, 0.0)
    weight_decay: float = spec_field(_from_zero, 0.0)


_KERAS = "paceline.keras.optimizers:"


@dataclass(frozen=True)
class KerasOptimizerSpec(OptimizerSpec):
    """Options of every Keras optimizer; 0 stands for None in Keras."""

    weight_decay: float = spec_field(_from_zero, 0.0)
    clipnorm: float = spec_field(_from_zero, 0.0)
    clipvalue: float = spec_field(_from_zero, 0.0)


@dataclass(frozen=True)
class KerasSgd(KerasOptimizerSpec, name="keras_sgd", torch_class=f"{_KERAS}SGD"):
    momentum: float = spec_field(_share, 0.0)
    nesterov: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasNadam(KerasOptimizerSpec, name="keras_nadam", torch_class=f"{_KERAS}Nadam"):
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.999)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasAdamax(KerasNadam, name="keras_adamax", torch_class=f"{_KERAS}Adamax"):
    """Adam with the infinity norm."""


@dataclass(frozen=True)
class KerasAdam(KerasNadam, name="keras_adam", torch_class=f"{_KERAS}Adam"):
    amsgrad: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdamW(KerasAdam, name="keras_adamw", torch_class=f"{_KERAS}AdamW"):
    """Adam with decoupled weight decay."""


@dataclass(frozen=True)
class KerasRmsProp(KerasOptimizerSpec, name="keras_rmsprop", torch_class=f"{_KERAS}RMSprop"):
    rho: float = spec_field(_share, 0.9)
    momentum: float = spec_field(_share, 0.0)
    epsilon: float = spec_field(_eps, 1e-7)
    centered: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdagrad(KerasOptimizerSpec, name="keras_adagrad", torch_class=f"{_KERAS}Adagrad"):
    initial_accumulator_value: float = spec_field(_from_zero, 0.1)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasAdadelta(KerasOptimizerSpec, name="keras_adadelta", torch_class=f"{_KERAS}Adadelta"):
    rho: float = spec_field(_share, 0.95)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasLion(KerasOptimizerSpec, name="keras_lion", torch_class=f"{_KERAS}Lion"):
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.99)

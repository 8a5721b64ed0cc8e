"""Specs of Keras optimizers, with the option names of Keras; `paceline.keras` creates them.

Their formulas differ from those of torch's optimizers of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import bool_field, float_field, spec_field
from paceline.specs.optimizer_base import OptimizerSpec

_from_zero = float_field(0.0)
_share = float_field(0.0, 1.0)
_eps = float_field(0.0, above=True)


@dataclass(frozen=True)
class KerasOptimizerSpec(OptimizerSpec):
    """Options of every Keras optimizer; 0 stands for None in Keras."""

    weight_decay: float = spec_field(_from_zero, 0.0)
    clipnorm: float = spec_field(_from_zero, 0.0)
    clipvalue: float = spec_field(_from_zero, 0.0)


@dataclass(frozen=True)
class KerasSgd(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_sgd"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:SGD"
    momentum: float = spec_field(_share, 0.0)
    nesterov: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdam(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_adam"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adam"
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.999)
    epsilon: float = spec_field(_eps, 1e-7)
    amsgrad: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdamW(KerasAdam):
    name: ClassVar[str] = "keras_adamw"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:AdamW"


@dataclass(frozen=True)
class KerasAdamax(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_adamax"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adamax"
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.999)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasNadam(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_nadam"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Nadam"
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.999)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasRmsProp(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_rmsprop"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:RMSprop"
    rho: float = spec_field(_share, 0.9)
    momentum: float = spec_field(_share, 0.0)
    epsilon: float = spec_field(_eps, 1e-7)
    centered: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdagrad(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_adagrad"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adagrad"
    initial_accumulator_value: float = spec_field(_from_zero, 0.1)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasAdadelta(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_adadelta"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adadelta"
    rho: float = spec_field(_share, 0.95)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasLion(KerasOptimizerSpec):
    name: ClassVar[str] = "keras_lion"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Lion"
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.99)


KERAS_OPTIMIZERS: dict[str, type[OptimizerSpec]] = {
    c.name: c
    for c in (
        KerasSgd,
        KerasAdam,
        KerasAdamW,
        KerasAdamax,
        KerasNadam,
        KerasRmsProp,
        KerasAdagrad,
        KerasAdadelta,
        KerasLion,
    )
}

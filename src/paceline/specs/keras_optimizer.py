"""Keras's optimizers as data, with Keras's names for their options; `paceline.keras` writes them.

Their formulas differ from those of torch's optimizers of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import boolean, option, real
from paceline.specs.optimizer_base import Optimizer

_from_zero = real(0.0)
_share = real(0.0, 1.0)
_eps = real(0.0, above=True)


@dataclass(frozen=True)
class KerasOptimizer(Optimizer):
    """Options of all of them; 0 stands for Keras's None."""

    weight_decay: float = option(_from_zero, 0.0)
    clipnorm: float = option(_from_zero, 0.0)
    clipvalue: float = option(_from_zero, 0.0)


@dataclass(frozen=True)
class KerasSgd(KerasOptimizer):
    word: ClassVar[str] = "keras_sgd"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:SGD"
    momentum: float = option(_share, 0.0)
    nesterov: bool = option(boolean, False)


@dataclass(frozen=True)
class KerasAdam(KerasOptimizer):
    word: ClassVar[str] = "keras_adam"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adam"
    beta_1: float = option(_share, 0.9)
    beta_2: float = option(_share, 0.999)
    epsilon: float = option(_eps, 1e-7)
    amsgrad: bool = option(boolean, False)


@dataclass(frozen=True)
class KerasAdamW(KerasAdam):
    word: ClassVar[str] = "keras_adamw"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:AdamW"


@dataclass(frozen=True)
class KerasAdamax(KerasOptimizer):
    word: ClassVar[str] = "keras_adamax"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adamax"
    beta_1: float = option(_share, 0.9)
    beta_2: float = option(_share, 0.999)
    epsilon: float = option(_eps, 1e-7)


@dataclass(frozen=True)
class KerasNadam(KerasOptimizer):
    word: ClassVar[str] = "keras_nadam"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Nadam"
    beta_1: float = option(_share, 0.9)
    beta_2: float = option(_share, 0.999)
    epsilon: float = option(_eps, 1e-7)


@dataclass(frozen=True)
class KerasRmsProp(KerasOptimizer):
    word: ClassVar[str] = "keras_rmsprop"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:RMSprop"
    rho: float = option(_share, 0.9)
    momentum: float = option(_share, 0.0)
    epsilon: float = option(_eps, 1e-7)
    centered: bool = option(boolean, False)


@dataclass(frozen=True)
class KerasAdagrad(KerasOptimizer):
    word: ClassVar[str] = "keras_adagrad"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adagrad"
    initial_accumulator_value: float = option(_from_zero, 0.1)
    epsilon: float = option(_eps, 1e-7)


@dataclass(frozen=True)
class KerasAdadelta(KerasOptimizer):
    word: ClassVar[str] = "keras_adadelta"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Adadelta"
    rho: float = option(_share, 0.95)
    epsilon: float = option(_eps, 1e-7)


@dataclass(frozen=True)
class KerasLion(KerasOptimizer):
    word: ClassVar[str] = "keras_lion"
    torch_class: ClassVar[str] = "paceline.keras.optimizers:Lion"
    beta_1: float = option(_share, 0.9)
    beta_2: float = option(_share, 0.99)


KERAS_OPTIMIZERS: dict[str, type[Optimizer]] = {
    c.word: c
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

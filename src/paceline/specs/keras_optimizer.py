"""Specs of Keras optimizers, with the option names of Keras; `paceline.keras` creates them.

Their formulas differ from those of torch's optimizers of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def __init_subclass__(cls, *, keras_class: str) -> None:
        super().__init_subclass__()
        cls.name = f"keras_{keras_class.lower()}"
        cls.torch_class = f"paceline.keras.optimizers:{keras_class}"


@dataclass(frozen=True)
class KerasSgd(KerasOptimizerSpec, keras_class="SGD"):
    momentum: float = spec_field(_share, 0.0)
    nesterov: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdamax(KerasOptimizerSpec, keras_class="Adamax"):
    beta_1: float = spec_field(_share, 0.9)
    beta_2: float = spec_field(_share, 0.999)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasNadam(KerasAdamax, keras_class="Nadam"):
    """The options of Adamax."""


@dataclass(frozen=True)
class KerasAdam(KerasAdamax, keras_class="Adam"):
    amsgrad: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdamW(KerasAdam, keras_class="AdamW"):
    """The options of Adam."""


@dataclass(frozen=True)
class KerasRmsProp(KerasOptimizerSpec, keras_class="RMSprop"):
    rho: float = spec_field(_share, 0.9)
    momentum: float = spec_field(_share, 0.0)
    epsilon: float = spec_field(_eps, 1e-7)
    centered: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class KerasAdagrad(KerasOptimizerSpec, keras_class="Adagrad"):
    initial_accumulator_value: float = spec_field(_from_zero, 0.1)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasAdadelta(KerasOptimizerSpec, keras_class="Adadelta"):
    rho: float = spec_field(_share, 0.95)
    epsilon: float = spec_field(_eps, 1e-7)


@dataclass(frozen=True)
class KerasLion(KerasOptimizerSpec, keras_class="Lion"):
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

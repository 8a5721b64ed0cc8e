"""Optimizer specs: the names and options of torch.optim and of Keras, without the learning rate.

The formulas of Keras's optimizers differ from those of torch's of the same name; `paceline.keras`
implements them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.specs.base import (
    Converter,
    Spec,
    bool_field,
    float_field,
    numbers_field,
    parse_spec,
    spec_field,
)

_SLOTS = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1, "rmsprop": 1, "adadelta": 2}


def count_slots(word: str, options: Mapping[str, Any]) -> int:
    """State values per weight; two for an optimizer that is not known by name."""
    further = sum(bool(options.get(name)) for name in ("momentum", "centered", "amsgrad"))
    return _SLOTS.get(word.lower(), 2) + further


def parse_optimizer(text: str) -> OptimizerSpec:
    return parse_spec(text, OPTIMIZERS, "optimizer")


class OptimizerSpec(Spec):
    """Options of an optimizer; `torch_class` implements it (module:Class)."""

    torch_class: ClassVar[str]

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the torch class, without the learning rate."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Not asked for is left to torch, not forbidden.
        return {k: v for k, v in given.items() if k != "fused" or v}


Options = Mapping[str, tuple[Converter, Any]]
"""Converter and default of each option, in the order of positional values."""

_from_zero = float_field(0.0)
_share = float_field(0.0, 1.0)
_eps = float_field(0.0, above=True)

_MOMENTUM: Options = {"momentum": (_share, 0.0)}
_DECAY: Options = {"weight_decay": (_from_zero, 0.0)}
_NESTEROV: Options = {"nesterov": (bool_field, False)}
_FUSED: Options = {"fused": (bool_field, False)}
_BETAS: Options = {"betas": (numbers_field(_share), (0.9, 0.999))}
_ADAM: Options = {**_BETAS, "eps": (_eps, 1e-8), **_DECAY, **_FUSED}
# Of every Keras optimizer; 0 stands for None in Keras.
_KERAS: Options = {**_DECAY, "clipnorm": (_from_zero, 0.0), "clipvalue": (_from_zero, 0.0)}
_EPSILON: Options = {"epsilon": (_eps, 1e-7)}
_KERAS_ADAM: Options = {**_KERAS, "beta_1": (_share, 0.9), "beta_2": (_share, 0.999), **_EPSILON}
_AMSGRAD: Options = {"amsgrad": (bool_field, False)}

_TABLE: dict[str, tuple[str, Options]] = {
    "sgd": ("SGD", {**_MOMENTUM, **_DECAY, **_NESTEROV, "dampening": (_share, 0.0), **_FUSED}),
    "adam": ("Adam", _ADAM),
    "adamw": ("AdamW", {**_ADAM, "weight_decay": (_from_zero, 0.01)}),
    "adagrad": (
        "Adagrad",
        {"lr_decay": (_from_zero, 0.0), **_DECAY, "eps": (_eps, 1e-10), **_FUSED},
    ),
    "adadelta": ("Adadelta", {"rho": (_share, 0.9), "eps": (_eps, 1e-6), **_DECAY}),
    "rmsprop": ("RMSprop", {"alpha": (_share, 0.99), "eps": (_eps, 1e-8), **_MOMENTUM, **_DECAY}),
    "keras_sgd": ("SGD", {**_KERAS, **_MOMENTUM, **_NESTEROV}),
    "keras_nadam": ("Nadam", _KERAS_ADAM),
    "keras_adamax": ("Adamax", _KERAS_ADAM),
    "keras_adam": ("Adam", {**_KERAS_ADAM, **_AMSGRAD}),
    "keras_adamw": ("AdamW", {**_KERAS_ADAM, **_AMSGRAD}),
    "keras_rmsprop": (
        "RMSprop",
        {**_KERAS, "rho": (_share, 0.9), **_MOMENTUM, **_EPSILON, "centered": (bool_field, False)},
    ),
    "keras_adagrad": (
        "Adagrad",
        {**_KERAS, "initial_accumulator_value": (_from_zero, 0.1), **_EPSILON},
    ),
    "keras_adadelta": ("Adadelta", {**_KERAS, "rho": (_share, 0.95), **_EPSILON}),
    "keras_lion": ("Lion", {**_KERAS, "beta_1": (_share, 0.9), "beta_2": (_share, 0.99)}),
}


def _make_spec(name: str, torch_name: str, options: Options) -> type[OptimizerSpec]:
    module = "paceline.keras.optimizers" if name.startswith("keras_") else "torch.optim"
    return dataclasses.make_dataclass(
        f"{torch_name}Spec",
        [(option, Any, spec_field(*declared)) for option, declared in options.items()],
        bases=(OptimizerSpec,),
        namespace={"name": name, "torch_class": f"{module}:{torch_name}"},
        frozen=True,
    )


OPTIMIZERS = {name: _make_spec(name, *row) for name, row in _TABLE.items()}

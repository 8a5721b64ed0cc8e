"""Optimizer specs with the names and options of torch.optim, without the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import bool_field, float_field, numbers_field, parse_spec, spec_field
from paceline.specs.keras_optimizer import KERAS_OPTIMIZERS
from paceline.specs.optimizer_base import OptimizerSpec

_decay = float_field(0.0)
_share = float_field(0.0, 1.0)
_eps = float_field(0.0, above=True)


@dataclass(frozen=True)
class SgdSpec(OptimizerSpec):
    name: ClassVar[str] = "sgd"
    torch_class: ClassVar[str] = "torch.optim:SGD"
    momentum: float = spec_field(_share, 0.0)
    weight_decay: float = spec_field(_decay, 0.0)
    nesterov: bool = spec_field(bool_field, False)
    dampening: float = spec_field(_share, 0.0)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdamSpec(OptimizerSpec):
    name: ClassVar[str] = "adam"
    torch_class: ClassVar[str] = "torch.optim:Adam"
    betas: tuple[float, ...] = spec_field(numbers_field(_share), (0.9, 0.999))
    eps: float = spec_field(_eps, 1e-8)
    weight_decay: float = spec_field(_decay, 0.0)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdamWSpec(OptimizerSpec):
    name: ClassVar[str] = "adamw"
    torch_class: ClassVar[str] = "torch.optim:AdamW"
    betas: tuple[float, ...] = spec_field(numbers_field(_share), (0.9, 0.999))
    eps: float = spec_field(_eps, 1e-8)
    weight_decay: float = spec_field(_decay, 0.01)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdagradSpec(OptimizerSpec):
    name: ClassVar[str] = "adagrad"
    torch_class: ClassVar[str] = "torch.optim:Adagrad"
    lr_decay: float = spec_field(_decay, 0.0)
    weight_decay: float = spec_field(_decay, 0.0)
    eps: float = spec_field(_eps, 1e-10)
    fused: bool = spec_field(bool_field, False)


@dataclass(frozen=True)
class AdadeltaSpec(OptimizerSpec):
    name: ClassVar[str] = "adadelta"
    torch_class: ClassVar[str] = "torch.optim:Adadelta"
    rho: float = spec_field(_share, 0.9)
    eps: float = spec_field(_eps, 1e-6)
    weight_decay: float = spec_field(_decay, 0.0)


@dataclass(frozen=True)
class RmsPropSpec(OptimizerSpec):
    name: ClassVar[str] = "rmsprop"
    torch_class: ClassVar[str] = "torch.optim:RMSprop"
    alpha: float = spec_field(_share, 0.99)
    eps: float = spec_field(_eps, 1e-8)
    momentum: float = spec_field(_share, 0.0)
    weight_decay: float = spec_field(_decay, 0.0)


OPTIMIZERS: Mapping[str, type[OptimizerSpec]] = {
    **{c.name: c for c in (SgdSpec, AdamSpec, AdamWSpec, AdagradSpec, AdadeltaSpec, RmsPropSpec)},
    **KERAS_OPTIMIZERS,
}


def parse_optimizer(text: str) -> OptimizerSpec:
    return parse_spec(text, OPTIMIZERS, "optimizer")

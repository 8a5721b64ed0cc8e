"""Optimizers as data: names and options as torch.optim has them, the learning rate kept apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.specs.base import boolean, numbers, option, read_text, real
from paceline.specs.keras_optimizer import KERAS_OPTIMIZERS
from paceline.specs.optimizer_base import Optimizer

_decay = real(0.0)
_share = real(0.0, 1.0)
_eps = real(0.0, above=True)


@dataclass(frozen=True)
class Sgd(Optimizer):
    word: ClassVar[str] = "sgd"
    torch_class: ClassVar[str] = "torch.optim:SGD"
    momentum: float = option(_share, 0.0)
    weight_decay: float = option(_decay, 0.0)
    nesterov: bool = option(boolean, False)
    dampening: float = option(_share, 0.0)
    fused: bool = option(boolean, False)


@dataclass(frozen=True)
class Adam(Optimizer):
    word: ClassVar[str] = "adam"
    torch_class: ClassVar[str] = "torch.optim:Adam"
    betas: tuple[float, ...] = option(numbers(_share), (0.9, 0.999))
    eps: float = option(_eps, 1e-8)
    weight_decay: float = option(_decay, 0.0)
    fused: bool = option(boolean, False)


@dataclass(frozen=True)
class AdamW(Optimizer):
    word: ClassVar[str] = "adamw"
    torch_class: ClassVar[str] = "torch.optim:AdamW"
    betas: tuple[float, ...] = option(numbers(_share), (0.9, 0.999))
    eps: float = option(_eps, 1e-8)
    weight_decay: float = option(_decay, 0.01)
    fused: bool = option(boolean, False)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    word: ClassVar[str] = "adagrad"
    torch_class: ClassVar[str] = "torch.optim:Adagrad"
    lr_decay: float = option(_decay, 0.0)
    weight_decay: float = option(_decay, 0.0)
    eps: float = option(_eps, 1e-10)
    fused: bool = option(boolean, False)


@dataclass(frozen=True)
class Adadelta(Optimizer):
    word: ClassVar[str] = "adadelta"
    torch_class: ClassVar[str] = "torch.optim:Adadelta"
    rho: float = option(_share, 0.9)
    eps: float = option(_eps, 1e-6)
    weight_decay: float = option(_decay, 0.0)


@dataclass(frozen=True)
class RmsProp(Optimizer):
    word: ClassVar[str] = "rmsprop"
    torch_class: ClassVar[str] = "torch.optim:RMSprop"
    alpha: float = option(_share, 0.99)
    eps: float = option(_eps, 1e-8)
    momentum: float = option(_share, 0.0)
    weight_decay: float = option(_decay, 0.0)


OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    **{c.word: c for c in (Sgd, Adam, AdamW, Adagrad, Adadelta, RmsProp)},
    **KERAS_OPTIMIZERS,
}


def read_optimizer(text: str) -> Optimizer:
    return read_text(text, OPTIMIZERS, "optimizer")

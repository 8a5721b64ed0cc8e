"""Optimizer traits are decided by type, never by class name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.comm.flat_layout import FlatLayout
from paceline.keras import optimizers as keras_optimizers
from paceline.strategies.optimizer_traits import (
    ELEMENTWISE_TYPES,
    SLICEABLE_TYPES,
    momentum_of,
    optimizer_traits,
)
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.registry import parse_strategy


class Adam(torch.optim.Optimizer):
    """A user's own class with a well-known name: it normalizes by the whole parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class SubclassOfSgd(torch.optim.SGD):
    """May override anything, so it does not inherit the traits."""


class DeclaredElementwise(Adam):
    elementwise = True


def parameter(count: int = 64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(count))


def test_own_class_called_adam_is_not_split() -> None:
    weights = parameter(1 << 16)
    traits = optimizer_traits(Adam([weights]))
    assert not traits.elementwise
    assert not traits.flattenable
    assert not traits.sliceable
    assert traits.reason == (
        f"{__name__}.Adam is not known to be element-wise and has no `elementwise` attribute"
    )
    layout = FlatLayout([weights], 2, elementwise=traits.elementwise)
    assert [len(shard.slices) for shard in layout.shards] == [1, 0]


def test_torch_adam_is_split() -> None:
    weights = parameter(1 << 16)
    traits = optimizer_traits(torch.optim.Adam([weights]))
    assert (traits.elementwise, traits.flattenable, traits.sliceable) == (True, True, True)
    assert traits.reason == "torch.optim.Adam updates each element independently"
    layout = FlatLayout([weights], 2, elementwise=traits.elementwise)
    assert [len(shard.slices) for shard in layout.shards] == [1, 1]


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE_TYPES, key=lambda kind: kind.__name__))
def test_types_of_torch(kind: Any) -> None:
    traits = optimizer_traits(kind([parameter()], lr=0.1))
    assert traits.elementwise
    assert traits.flattenable
    assert traits.sliceable is (kind in SLICEABLE_TYPES)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_types_that_need_whole_parameters(kind: Any) -> None:
    traits = optimizer_traits(kind([parameter()], lr=0.1))
    assert not traits.elementwise
    assert not traits.flattenable
    assert not traits.sliceable


def test_subclass_does_not_inherit_the_traits() -> None:
    assert not optimizer_traits(SubclassOfSgd([parameter()], lr=0.1)).elementwise


def test_fused_kernels_are_not_flattened() -> None:
    traits = optimizer_traits(torch.optim.SGD([parameter()], lr=0.1, fused=True))
    assert traits.elementwise
    assert not traits.flattenable


def test_attribute_decides_for_a_class_of_ones_own() -> None:
    traits = optimizer_traits(DeclaredElementwise([parameter()]))
    assert traits.elementwise
    # Both need a second instance that computes the same, which only torch's own types promise.
    assert not traits.flattenable
    assert not traits.sliceable
    assert traits.reason == f"{__name__}.DeclaredElementwise declares elementwise=True"


def test_attribute_overrules_the_type() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    optimizer.elementwise = False  # type: ignore[attr-defined]
    traits = optimizer_traits(optimizer)
    assert (traits.elementwise, traits.flattenable, traits.sliceable) == (False, False, False)


def test_keras_optimizer_decides_by_its_own_options() -> None:
    free = optimizer_traits(keras_optimizers.Adam([parameter()]))
    clipped = optimizer_traits(keras_optimizers.Adam([parameter()], clipnorm=1.0))
    assert (free.elementwise, clipped.elementwise) == (True, False)
    assert not free.flattenable


def test_the_momentum_of_an_optimizer_is_known_by_any_of_its_names() -> None:
    weights = [parameter()]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (torch.optim.SGD(weights, lr=0.1), 0.0),
        (torch.optim.SGD(weights, lr=0.1, momentum=0.95), 0.95),
        (torch.optim.AdamW(weights, betas=(0.8, 0.9)), 0.8),
        (torch.optim.Adagrad(weights), 0.0),
        (keras_optimizers.SGD(weights, lr=0.1, momentum=0.7), 0.7),
        (keras_optimizers.Adam(weights), 0.9),
    ]
    for optimizer, expected in optimizers:
        assert momentum_of(optimizer.param_groups[0]) == expected


@pytest.mark.parametrize(
    ("spec", "shards"),
    [
        ("ps(servers=4)", 4),
        ("ps(servers=4, min_shard_kb=512)", 2),
        ("ps(servers=4, min_shard_kb=2048)", 1),
        ("ps(servers=4, max_shards=3)", 3),
        ("ps(servers=2, min_shard_kb=256, max_shards=3)", 2),
    ],
)
def test_shards_have_a_minimum_size_and_a_maximum_number(spec: str, shards: int) -> None:
    chosen = parse_strategy(spec)
    assert isinstance(chosen, ParameterServer)
    weights = parameter(1 << 18)  # 1 MiB
    layout = FlatLayout([weights], chosen.servers, elementwise=True, shards_of=chosen.shards_of)
    sizes = [shard.hi - shard.lo for shard in layout.shards if shard.slices]
    assert len(layout.shards) == chosen.servers
    assert len(sizes) == shards
    assert max(sizes) - min(sizes) <= 4096
    assert parse_strategy(str(chosen)) == chosen

"""FlatOptimizer: the same results as per-parameter updates, with fewer calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.strategies.flat_optimizer import FlatOptimizer, FlatSegment
from paceline.strategies.optimizer_traits import ELEMENTWISE_TYPES

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"weight_decay": 0.01},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.5, "centered": True},
}
SHAPES = [(3, 5), (7,), (2, 2, 4), (1,)]
GAP = 3
"""Numbers between pieces: always 0."""


class Pieces:
    """Pieces in one buffer, a gradient of theirs in another, and two optimizers' ways to go."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(1)
        self.starts, at = [], 0
        for shape in SHAPES:
            self.starts.append(at)
            at += torch.Size(shape).numel() + GAP
        self.buffer, self.gradient = torch.zeros(at, dtype=dtype), torch.zeros(at, dtype=dtype)
        self.pieces = [torch.nn.Parameter(self.view(self.buffer, i)) for i in range(len(SHAPES))]
        with torch.no_grad():
            for piece in self.pieces:
                piece.copy_(torch.randn(piece.shape, dtype=dtype))
        groups = [{"params": self.pieces[:2]}, {"params": self.pieces[2:], "lr": 0.02}]
        made: Any = getattr(torch.optim, kind)
        self.optimizer: torch.optim.Optimizer = made(groups, lr=0.05, **OPTIONS.get(kind, {}))

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        count = torch.Size(SHAPES[index]).numel()
        return buffer[self.starts[index] :][:count].view(SHAPES[index])

    def rows(self) -> list[FlatSegment]:
        cut = self.starts[2]
        return [
            FlatSegment(torch.nn.Parameter(part), list(zip(pieces, starts, strict=True)), group)
            for group, part, pieces, starts in (
                (0, self.buffer[:cut], self.pieces[:2], self.starts[:2]),
                (1, self.buffer[cut:], self.pieces[2:], [s - cut for s in self.starts[2:]]),
            )
        ]

    def draw(self, seed: int) -> list[torch.Tensor]:
        """A gradient into the buffer; its rows."""
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(SHAPES):
            drawn = torch.randn(shape, generator=generator, dtype=self.gradient.dtype)
            self.view(self.gradient, index).copy_(drawn)
        cut = self.starts[2]
        return [self.gradient[:cut], self.gradient[cut:]]

    def step_pieces(self, seed: int, skip: tuple[int, ...] = ()) -> None:
        self.draw(seed)
        for index, piece in enumerate(self.pieces):
            piece.grad = None if index in skip else self.view(self.gradient, index)
        self.optimizer.step()

    def gaps(self) -> list[float]:
        ends = [s + torch.Size(shape).numel() for s, shape in zip(self.starts, SHAPES, strict=True)]
        return [float(x) for end in ends for x in self.buffer[end : end + GAP]]


def take(case: Pieces) -> FlatOptimizer:
    flat = FlatOptimizer.from_optimizer(case.optimizer, case.rows())
    assert flat is not None
    return flat


def assert_same(one: Pieces, two: Pieces) -> None:
    torch.testing.assert_close(one.buffer, two.buffer, rtol=0, atol=1e-12)
    for mine, theirs in zip(one.pieces, two.pieces, strict=True):
        a, b = one.optimizer.state[mine], two.optimizer.state[theirs]
        assert a.keys() == b.keys()
        for slot, value in a.items():
            torch.testing.assert_close(value, b[slot], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", sorted(kind.__name__ for kind in ELEMENTWISE_TYPES))
@settings(max_examples=15, deadline=None)
@given(plan=st.lists(st.booleans(), min_size=1, max_size=6))
def test_rows_do_what_pieces_do(kind: str, plan: list[bool]) -> None:
    """Changing between the two at any step, options changed on the way."""
    plain, mixed = Pieces(kind), Pieces(kind)
    flat: FlatOptimizer | None = None
    for seed, in_rows in enumerate(plan):
        for case in (plain, mixed):
            case.optimizer.param_groups[0]["lr"] = 0.05 / (1 + seed)
        plain.step_pieces(seed)
        if in_rows:
            flat = flat or take(mixed)
            flat.prepare(mixed.draw(seed)).step()
        else:
            if flat is not None:
                flat.write_back()
                flat = None
            mixed.step_pieces(seed)
    if flat is not None:
        flat.write_back()
    assert_same(plain, mixed)
    assert set(mixed.gaps()) == {0.0}


def test_pieces_that_differ_in_what_is_remembered_stay_pieces() -> None:
    """Adam counts steps: a piece that missed one is not like its neighbours."""
    case = Pieces("Adam")
    case.step_pieces(0, skip=(1,))
    assert FlatOptimizer.from_optimizer(case.optimizer, case.rows()) is None
    case.step_pieces(1)
    assert FlatOptimizer.from_optimizer(case.optimizer, case.rows()) is None


def test_what_is_remembered_is_kept_once() -> None:
    case = Pieces("SGD")
    case.step_pieces(0)
    take(case)
    slots = [case.optimizer.state[piece]["momentum_buffer"] for piece in case.pieces[:2]]
    assert slots[0].untyped_storage().data_ptr() == slots[1].untyped_storage().data_ptr()


def test_scalars_are_not_flattened() -> None:
    single = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([single], lr=0.1)
    row = FlatSegment(torch.nn.Parameter(torch.ones(1)), [(single, 0)], 0)
    assert FlatOptimizer.from_optimizer(optimizer, [row]) is None

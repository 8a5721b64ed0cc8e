"""Layers in slices and shards over replicas: the same training as one process."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import Job, models
from paceline.comm.process_group import CollectiveGroup
from paceline.errors import UsageError
from paceline.strategies.allreduce.sharded import assign_owners, fsdp_units
from paceline.strategies.registry import parse_strategy
from paceline.strategies.tensor.sliced_layers import _drawing_apart, slice_model
from paceline.worker.job_builder import cross_entropy
from test_pipeline import SAMPLES, largest_difference, make_rows, make_text, make_transformer, train


class Together(CollectiveGroup):
    """Workers of one process, a thread each, that meet at a barrier."""

    def __init__(self, rank: int, size: int, table: dict[int, torch.Tensor], barrier: Any) -> None:
        super().__init__(rank, size)
        self._table = table
        self._barrier = barrier

    def _swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = tensor.clone()
        self._barrier.wait(30)
        everybody = [self._table[rank] for rank in range(self.size)]
        self._barrier.wait(30)
        return everybody

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._swap(tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._swap(tensor)


class WithAttention(nn.Module):
    """torch's own attention, with a mask and an odd number of outputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.out(self.encoder(x, mask=mask).mean(1))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "attention":
        return WithAttention().double()
    shape, classes = SAMPLES[name]
    return models.build(name, input_shape=shape, classes=classes).double()


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", [*SAMPLES, "attention"])
def test_slices_compute_what_the_whole_layer_does(name: str, parts: int) -> None:
    whole = build(name)
    if name == "attention":
        inputs, targets = torch.randn(6, 5, 12, dtype=torch.float64), torch.arange(6)
    else:
        inputs, targets = make_rows(name, 6)
    barrier, table = threading.Barrier(parts), dict[int, torch.Tensor]()
    copies = [copy.deepcopy(whole) for _ in range(parts)]
    cross_entropy(whole(inputs), targets).backward()

    def work(part: int) -> Any:
        group = Together(part, parts, table, barrier)
        done = slice_model(copies[part], part, parts, group)
        loss = cross_entropy(copies[part](inputs), targets)
        loss.backward()
        return done

    with ThreadPoolExecutor(parts) as pool:
        done = [one.result(60) for one in [pool.submit(work, part) for part in range(parts)]]
    assert done[0].cuts
    held = sum(p.numel() for p in copies[0].parameters())
    assert held < sum(p.numel() for p in whole.parameters())
    for key, parameter in whole.named_parameters():
        assert parameter.grad is not None
        for part, model in enumerate(copies):
            mine = dict(model.named_parameters())[key].grad
            assert mine is not None
            cut = done[part].cuts.get(key)
            expected = parameter.grad if cut is None else cut.take(parameter.grad, part)
            assert torch.allclose(mine, expected, rtol=1e-7, atol=1e-10), key
        cut = done[0].cuts.get(key)
        if cut is not None:
            pieces = [cut.take(parameter.data, part) for part in range(parts)]
            assert torch.equal(cut.join(pieces), parameter.data)


@pytest.mark.parametrize(
    ("strategy", "workers", "fields"),
    [
        ("tensor(size=2)", 2, {"optimizer": "adam", "lr": 0.01, "clip": 0.5}),
        pytest.param(
            "tensor(size=2)", 4, {"optimizer": "sgd(momentum=0.9)"}, marks=pytest.mark.slow
        ),
        ("allreduce(shard=optimizer)", 3, {"optimizer": "adam", "lr": 0.01, "clip": 0.5}),
        ("allreduce(shard=full)", 2, {"optimizer": "adam", "lr": 0.01, "clip": 0.5}),
        pytest.param(
            "allreduce(shard=full)", 3, {"optimizer": "sgd(momentum=0.9)"}, marks=pytest.mark.slow
        ),
        ("switch(tensor(size=2), allreduce(shard=full), at=50%)", 2, {"optimizer": "adam"}),
        pytest.param(
            "switch(allreduce(shard=full), allreduce(shard=optimizer), at=50%)",
            2,
            {},
            marks=pytest.mark.slow,
        ),
        ("switch(ps(sync=bsp), tensor(size=2), at=50%)", 2, {"optimizer": "adam"}),
    ],
)
def test_split_training_equals_one_process(
    tmp_path: Path, strategy: str, workers: int, fields: dict[str, Any]
) -> None:
    fields = {"lr": 0.05, **fields}
    alone = train(tmp_path / "alone", "single", 1, **fields)
    there = train(tmp_path / "there", strategy, workers, **fields)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9
    for name in ("train_loss", "train_acc", "val_loss", "val_acc", "samples"):
        assert there["history"][0][name] == pytest.approx(alone["history"][0][name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor(size=2)", "allreduce(shard=full)"])
def test_a_transformer_with_tied_weights(tmp_path: Path, strategy: str) -> None:
    fields = {"model": make_transformer, "data": make_text, "optimizer": "adam", "lr": 0.01}
    train(tmp_path / "alone", "single", 1, **fields)
    train(tmp_path / "there", strategy, 2, **fields)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9


def test_heads_are_dropped_apart_and_all_else_alike() -> None:
    states, drawn = [], []
    for part in range(3):
        torch.manual_seed(5)
        with _drawing_apart(0.5, part):
            drawn.append(float(torch.rand(part + 1)[0]))
        states.append(torch.get_rng_state())
    assert len(set(drawn)) == 3
    assert all(torch.equal(state, states[0]) for state in states)


def test_parameters_are_shared_out_evenly() -> None:
    model = build("resnet20")
    named = list(model.named_parameters())
    owners = assign_owners(named, 3)
    loads = [sum(p.numel() for n, p in named if owners[n] == w) for w in range(3)]
    assert sum(loads) == sum(p.numel() for _, p in named)
    assert max(loads) - min(loads) <= max(p.numel() for _, p in named)


def test_layers_that_share_weights_are_gathered_together() -> None:
    model = models.build("char-transformer", input_shape=(64,), classes=300)
    units = fsdp_units(model)
    assert units
    tied = model.characters.weight
    assert not any(p is tied for unit in units for p in unit.parameters())


def test_a_model_without_layers_to_slice_is_told(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no linear, convolution or attention layer to slice"):
        train(tmp_path / "run", "tensor(size=2)", 2, model=Bare)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.weight.T


class Blurred(torch.utils.data.Dataset[Any]):
    """Draws at random whenever it is read, as transforms of images do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(6), index % 2


def blurred_sets() -> Any:
    return Blurred(), None, None


def small_net() -> nn.Module:
    return nn.Linear(6, 2)


def test_parts_that_read_different_values_are_told(tmp_path: Path) -> None:
    job = Job(model=small_net, data=blurred_sets, batch=8, epochs=1)
    with pytest.raises(UsageError, match="must depend on seed and epoch"):
        paceline.train(job, "tensor(size=2)", 2, out=tmp_path / "run")


def test_strategies_read_back_as_written() -> None:
    for text in ("tensor(size=4)", "allreduce(shard=full)", "pipeline(cut=auto, recompute=true)"):
        assert str(parse_strategy(text)) == str(parse_strategy(str(parse_strategy(text))))
    job = Job(model="mlp-128", data="digits", batch=1)
    with pytest.raises(Exception, match="smaller than"):
        paceline.train(job, "tensor(size=2)", 4)

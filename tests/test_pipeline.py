"""The model in stages: the same losses and weights as one process, whatever the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from conftest import RunCli
from paceline import Job, models
from paceline.errors import SpecError, UsageError
from paceline.specs.strategy import read_strategy
from paceline.strategies.stages import balance, cut_evenly, order_of_steps, trace
from safetensors.torch import load_file


def make_images(side: int = 8, channels: int = 1, count: int = 48) -> Any:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(count, channels, side, side, generator=made, dtype=torch.float64)
    y = torch.randint(0, 10, (count,), generator=made)
    return (x, y), (x[:12], y[:12]), None


def train(out: Path, strategy: str, workers: int, **fields: Any) -> dict[str, Any]:
    job = Job(
        **{
            "model": "mlp-300-100",
            "data": make_images,
            "batch": 16,
            "epochs": 1,
            "lr": 0.1,
            "dtype": "float64",
            "seed": 3,
            **fields,
        }
    )
    return paceline.train(job, strategy, workers, out=out, timeout_s=60)


def largest_difference(a: Path, b: Path) -> float:
    mine, theirs = (load_file(p / "model.safetensors") for p in (a, b))
    assert set(mine) == set(theirs)
    return max(float((mine[n] - theirs[n]).abs().max()) for n in mine)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (2, 4), (3, 8)])
def test_stages_train_as_one_process(
    tmp_path: Path, stages: int, micro: int, schedule: str
) -> None:
    alone = train(tmp_path / "alone", "single", 1)
    text = f"pipeline(stages={stages}, micro={micro}, schedule={schedule})"
    there = train(tmp_path / "there", text, stages)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9
    for name in ("train_loss", "val_loss", "samples"):
        assert there["history"][0][name] == pytest.approx(alone["history"][0][name])


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 5))
def test_cuts_are_those_of_brute_force(costs: list[float], stages: int) -> None:
    from itertools import combinations

    if stages > len(costs):
        return

    def dearest(starts: list[int]) -> float:
        edges = [*starts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    best = min(dearest([0, *c]) for c in combinations(range(1, len(costs)), stages - 1))
    assert dearest(balance(costs, stages)) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["1f1b", "gpipe"]))
def test_every_micro_batch_goes_forward_and_back_once(
    stages: int, micro: int, schedule: str
) -> None:
    for stage in range(stages):
        steps = order_of_steps(stage, stages, micro, schedule)
        assert sorted(steps) == sorted(
            (kind, k) for kind in ("forward", "backward") for k in range(micro)
        )
        for k in range(micro):
            assert steps.index(("forward", k)) < steps.index(("backward", k))


@pytest.mark.parametrize(
    ("text", "workers", "batch", "told"),
    [
        ("pipeline(stages=2)", 3, 12, "use 2 workers, or a multiple"),
        ("pipeline(stages=2, micro=5)", 2, 16, "does not divide into 5 micro-batches"),
        ("pipeline(stages=3, cut=a)", 3, 12, "needs 2 cuts, 1 given"),
    ],
)
def test_mistakes_are_one_line(text: str, workers: int, batch: int, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        strategy = read_strategy(text)
        strategy.check_workers(workers)
        strategy.check_batch(batch, workers)


def test_a_cut_that_is_not_there_is_told(tmp_path: Path) -> None:
    model = models.build("mlp-300-100", input_shape=(1, 8, 8), classes=10)
    with pytest.raises(UsageError, match="at most 3 stages"):
        cut_evenly(model, 4)
    with pytest.raises(Exception, match="no such layer"):
        train(tmp_path / "run", "pipeline(stages=2, cut=layers.9)", 2)


def test_skip_connections_may_cross_a_cut() -> None:
    model = models.build("resnet8", input_shape=(3, 16, 16), classes=10)
    graph = trace(model, ("blocks.1.conv2",), torch.randn(2, 3, 16, 16))
    assert len(graph.sources[1]) == 2  # the path and its shortcut

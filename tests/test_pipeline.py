"""The model in stages: the same losses and weights as one process, whatever the cut."""

from __future__ import annotations

import copy
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import paceline
from paceline import Job, models
from paceline.errors import SpecError, UsageError
from paceline.strategies.pipeline.cut_selection import cut_evenly
from paceline.strategies.pipeline.partition import (
    LayerCost,
    StageBudget,
    partition_layers,
    stage_cost,
)
from paceline.strategies.pipeline.stage_exchange import StageExchange
from paceline.strategies.pipeline.stage_graph import stage_schedule, trace_stages
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.phase_clock import PhaseClock
from paceline.worker.job_builder import cross_entropy


def make_images(side: int = 8, channels: int = 1, count: int = 48) -> Any:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(count, channels, side, side, generator=made, dtype=torch.float64)
    y = torch.randint(0, 10, (count,), generator=made)
    return (x, y), (x[:12], y[:12]), None


def make_larger() -> Any:
    return make_images(side=12)


DEFAULTS: dict[str, Any] = {
    "model": "mlp-300-100",
    "data": make_images,
    "batch": 16,
    "epochs": 1,
    "lr": 0.1,
    "dtype": "float64",
    "seed": 3,
}


def train(out: Path, strategy: str, workers: int, **fields: Any) -> dict[str, Any]:
    job = Job(**{**DEFAULTS, **fields})
    return paceline.train(job, strategy, workers, out=out, timeout_s=60)


def largest_difference(a: Path, b: Path) -> float:
    mine, theirs = (load_file(p / "model.safetensors") for p in (a, b))
    assert set(mine) == set(theirs)
    return max(float((mine[n] - theirs[n]).abs().max()) for n in mine)


@pytest.mark.parametrize(
    ("stages", "micro", "workers", "fields"),
    [
        (2, 4, 2, {"clip": 0.5, "optimizer": "adam"}),
        (3, 8, 3, {"optimizer": "sgd(momentum=0.9)"}),
        (2, 2, 4, {"optimizer": "sgd(momentum=0.9)", "clip": 0.5}),
        pytest.param(2, 1, 2, {"model": "cnn-small", "data": make_larger}, marks=pytest.mark.slow),
        pytest.param(2, 1, 2, {"model": "resnet20"}, marks=pytest.mark.slow),
    ],
)
def test_stages_train_as_one_process(
    tmp_path: Path, stages: int, micro: int, workers: int, fields: dict[str, Any]
) -> None:
    """With four workers there are two replicas of the pipeline."""
    alone = train(tmp_path / "alone", "single", 1, **fields)
    text = f"pipeline(stages={stages}, micro={micro})"
    there = train(tmp_path / "there", text, workers, **fields)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9
    for name in ("train_loss", "train_acc", "val_loss", "val_acc", "samples"):
        assert there["history"][0][name] == pytest.approx(alone["history"][0][name])


def make_text() -> Any:
    made = torch.Generator().manual_seed(0)
    text = torch.randint(0, 20, (48, 13), generator=made)
    return (text[:, :-1], text[:, 1:]), (text[:12, :-1], text[:12, 1:]), None


def make_transformer() -> torch.nn.Module:
    return models.build("char-transformer", input_shape=(12,), classes=20)


def test_tied_weights_at_both_ends(tmp_path: Path) -> None:
    """A transformer reads and predicts characters by one matrix: two stages hold it."""
    fields = {"model": make_transformer, "data": make_text, "optimizer": "adam", "lr": 0.01}
    train(tmp_path / "alone", "single", 1, **fields)
    train(tmp_path / "there", "pipeline(stages=3, micro=2, cut=auto)", 3, **fields)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9


@pytest.mark.parametrize(
    "strategy",
    [
        "switch(pipeline(stages=2, micro=2), allreduce, at=50%)",
        "switch(ps(sync=bsp), pipeline(stages=2, micro=2), at=50%)",
    ],
)
def test_switch_to_and_from_a_pipeline(tmp_path: Path, strategy: str) -> None:
    fields = {"optimizer": "adam", "lr": 0.01, "epochs": 2}
    train(tmp_path / "alone", "single", 1, **fields)
    train(tmp_path / "there", strategy, 2, **fields)
    assert largest_difference(tmp_path / "alone", tmp_path / "there") < 1e-9


class Wires:
    """The group of all stages, in one process: queues in place of connections."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self._lock = threading.Lock()

    def seen_from(self, rank: int) -> Any:
        wires = self

        class Side:
            def isend(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
                wires.queue(rank, to, tag).put(tensor.clone())
                return Done()

            def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
                return Coming(tensor, wires.queue(source, rank, tag))

        return Side()

    def queue(self, source: int, to: int, tag: int) -> queue.Queue[torch.Tensor]:
        with self._lock:
            return self._queues.setdefault((source, to, tag), queue.Queue())


class Coming:
    def __init__(self, tensor: torch.Tensor, wire: queue.Queue[torch.Tensor]) -> None:
        self._tensor, self._wire = tensor, wire

    def wait(self) -> None:
        self._tensor.copy_(self._wire.get(timeout=30))


class Done:
    def wait(self) -> None:
        return


def pass_through(
    model: torch.nn.Module,
    cuts: tuple[str, ...],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    micro: int,
    schedule: str,
    recompute: bool = False,
) -> float:
    """A step of all stages, a thread each; gradients are in the model, the loss comes back."""
    stages, wires = len(cuts) + 1, Wires()
    parts, wanted = torch.tensor_split(inputs, micro), torch.tensor_split(targets, micro)
    graphs = {part.shape: trace_stages(model, cuts, part) for part in parts}
    total = [0.0]

    def play(stage: int) -> None:
        clock = PhaseClock(time.time())
        flow = StageExchange(wires.seen_from(stage), clock, stage, 0, 0, recompute=recompute)

        def judge(k: int, output: torch.Tensor) -> torch.Tensor | None:
            if stage < stages - 1:
                return None
            loss = cross_entropy(output, wanted[k]) * (len(parts[k]) / len(inputs))
            total[0] += loss.item()
            return loss

        steps = stage_schedule(stage, stages, micro, schedule)
        flow.run(steps, parts, lambda part: graphs[part.shape], judge)

    with ThreadPoolExecutor(stages) as pool:
        for done in [pool.submit(play, stage) for stage in range(stages)]:
            done.result(60)
    return total[0]


SAMPLES: dict[str, tuple[tuple[int, ...], int]] = {
    "mlp-300-100": ((1, 8, 8), 10),
    "cnn-small": ((1, 12, 12), 10),
    "resnet20": ((3, 8, 8), 10),
    "char-transformer": ((12,), 20),
}


def make_rows(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, classes = SAMPLES[name]
    made = torch.Generator().manual_seed(1)
    if name == "char-transformer":
        text = torch.randint(0, classes, (rows, shape[0] + 1), generator=made)
        return text[:, :-1], text[:, 1:]
    inputs = torch.randn(rows, *shape, generator=made, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (rows,), generator=made)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    ("stages", "micro", "schedule"),
    [
        *((stages, micro, "1f1b") for stages, micro in ((2, 1), (2, 3), (3, 8))),
        (3, 8, "gpipe"),
        pytest.param(2, 1, "gpipe", marks=pytest.mark.slow),
        pytest.param(2, 3, "gpipe", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    name: str, schedule: str, stages: int, micro: int
) -> None:
    """Micro-batches of unequal size included. BatchNorm normalises each micro-batch by itself, as
    one process does that takes them one after another and adds up the gradients."""
    torch.manual_seed(0)
    shape, classes = SAMPLES[name]
    model = models.build(name, input_shape=shape, classes=classes).double()
    alone = copy.deepcopy(model)
    inputs, targets = make_rows(name, 10)
    loss = pass_through(
        model, cut_evenly(model, stages), inputs, targets, micro, schedule, recompute=micro == 3
    )
    pieces = micro if name == "resnet20" else 1
    expected = 0.0
    for x, y in zip(
        torch.tensor_split(inputs, pieces), torch.tensor_split(targets, pieces), strict=True
    ):
        part = cross_entropy(alone(x), y) * (len(x) / len(inputs))
        part.backward()
        expected += part.item()
    assert loss == pytest.approx(expected, rel=1e-9)
    for (key, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-7, atol=1e-10), key
    if micro != 3:  # what is computed again counts twice in running statistics
        for (key, mine), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
            assert torch.allclose(mine, theirs), key


class Skipping(torch.nn.Module):
    """The input passes the cut, and a value that depends on no weight; the start is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.first.requires_grad_(False)
        self.second = torch.nn.Linear(6, 6)
        self.third = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones_like(x) * 2
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(h * scale + x)


@pytest.mark.parametrize("cuts", [("second",), ("third",), ("second", "third")])
def test_values_without_gradients_may_cross_a_cut(cuts: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Skipping().double()
    alone = copy.deepcopy(model)
    inputs = torch.randn(6, 6, dtype=torch.float64)
    targets = torch.arange(6) % 4
    pass_through(model, cuts, inputs, targets, 3, "1f1b")
    cross_entropy(alone(inputs), targets).backward()
    for (key, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, key
        else:
            assert mine.grad is not None
            assert torch.allclose(mine.grad, theirs.grad), key


def make_numbers() -> Any:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(48, 8, generator=made, dtype=torch.float64)
    return (x, x.sum(1, keepdim=True)), (x[:12], x[:12].sum(1, keepdim=True)), None


def make_line() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))


def test_where_there_are_no_classes_there_is_no_accuracy(tmp_path: Path) -> None:
    mse = torch.nn.functional.mse_loss
    fields = {"model": make_line, "data": make_numbers, "loss": mse, "lr": 0.01}
    result = train(tmp_path / "run", "pipeline(stages=2, micro=2)", 2, **fields)
    assert result["val_acc"] is None
    assert result["val_loss"] > 0


layer = st.builds(
    LayerCost,
    st.just(""),
    st.floats(0.1, 10),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([0, 10**8, 10**9]),
)


@given(st.lists(layer, min_size=1, max_size=8), st.data())
def test_cuts_are_those_of_brute_force(layers: list[LayerCost], data: st.DataObject) -> None:
    """Machines of unequal speed and memory; also where nothing fits."""
    speeds = data.draw(st.lists(st.floats(0.5, 4), min_size=1, max_size=min(4, len(layers))))
    places = [
        StageBudget([x.seconds / speed for x in layers], data.draw(st.integers(3, 60)), stage + 1)
        for stage, speed in enumerate(speeds)
    ]

    def slowest(starts: list[int]) -> float:
        edges = [*starts, len(layers)]
        return max(
            stage_cost(layers, p, a, b) for p, (a, b) in zip(places, pairwise(edges), strict=True)
        )

    choices = combinations(range(1, len(layers)), len(places) - 1)
    best = min(slowest([0, *choice]) for choice in choices)
    found = partition_layers(layers, places)
    if best == float("inf"):
        assert found is None
    else:
        assert found is not None
        assert slowest(found) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from(["1f1b", "gpipe"]))
def test_every_micro_batch_goes_forward_and_back_once(
    stages: int, micro: int, schedule: str
) -> None:
    for stage in range(stages):
        steps = stage_schedule(stage, stages, micro, schedule)
        assert sorted(steps) == sorted(
            (kind, k) for kind in ("forward", "backward") for k in range(micro)
        )
        for k in range(micro):
            assert steps.index(("forward", k)) < steps.index(("backward", k))


@pytest.mark.parametrize(
    ("text", "workers", "batch", "told"),
    [
        ("pipeline(stages=2)", 3, 12, "use 2 workers, or a multiple"),
        ("pipeline(stages=2, micro=5)", 2, 16, "cannot be divided into 5 micro-batches"),
        ("pipeline(stages=3, cut=a)", 3, 12, "requires 2 cuts, but 1 were given"),
    ],
)
def test_mistakes_are_one_line(text: str, workers: int, batch: int, told: str) -> None:
    def check() -> None:
        strategy = parse_strategy(text)
        strategy.check_workers(workers)
        strategy.check_batch(batch, workers)

    with pytest.raises(SpecError, match=told):
        check()


def test_a_cut_that_is_not_there_is_told(tmp_path: Path) -> None:
    model = models.build("mlp-300-100", input_shape=(1, 8, 8), classes=10)
    with pytest.raises(UsageError, match="at most 3 stages"):
        cut_evenly(model, 4)
    with pytest.raises(Exception, match="no such layer"):
        train(tmp_path / "run", "pipeline(stages=2, cut=layers.9)", 2)


def test_skip_connections_may_cross_a_cut() -> None:
    model = models.build("resnet8", input_shape=(3, 16, 16), classes=10)
    graph = trace_stages(model, ("blocks.1.conv2",), torch.randn(2, 3, 16, 16))
    assert len(graph.sources[1]) == 2  # the path and its shortcut

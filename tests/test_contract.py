"""The contract: one table that every strategy goes through, on real processes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from jobs import (
    Awkward,
    Moving,
    NormOnly,
    Plain,
    largest_difference,
    make_rows,
    read_weights,
    synthetic_job,
    train_plainly,
)
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.protocol.balance import split_batch
from paceline.specs.slowdown import InjectedSlowdown
from paceline.strategies.registry import parse_strategy, records
from paceline.telemetry.events import PHASES
from paceline.telemetry.reader import read_run
from paceline.worker.batch_loader import epoch_order

ALGORITHMS = [
    "allreduce(algorithm=tree)",
    "allreduce(algorithm=butterfly)",
    "allreduce(algorithm=hierarchical, via=network)",
]
"""Sums of messages between workers, which three workers form in their own ways."""
EXACT = ["single", "allreduce", *ALGORITHMS, "ps(sync=bsp)", "ps(sync=bsp, servers=2)"]
TABLE = [
    *EXACT,
    "ps",
    "ps(servers=2)",
    "ps(sync=ssp(1))",
    "ps(sync=dssp(1, 3))",
    "ps(sync=kasync(1))",
    "ps(sync=gba)",
    "ps(overlap=true)",
    "grouped(size=1)",
    "local_sgd(h=3)",
    "local_sgd(drift=0.01)",
    "diloco(h=4, outer_lr=1, outer_momentum=0)",
    "switch(allreduce, ps, at=45%)",
    "auto",
]
"""Every strategy that exists, with the options that change its ways."""

OPTIMIZERS = [
    "sgd(momentum=0.9)",
    "adam",
    "adamw(weight_decay=0.1)",
    "adagrad",
    "adadelta",
    "rmsprop(momentum=0.5)",
]

EVERY_PAIR = (
    "switch(allreduce, ps(sync=bsp), allreduce, single, ps(sync=bsp, servers=2), ps(sync=bsp),"
    " single, allreduce, at=(samples(22), samples(66), samples(88), samples(121), samples(150),"
    " samples(176), samples(198)))"
)
"""All ordered pairs of the exact strategies, most of the switches in the middle of an epoch."""


def train(tmp_path: Path, job: paceline.Job, strategy: str, workers: int) -> dict[str, Any]:
    return paceline.train(job, strategy, workers, out=tmp_path / "run", timeout_s=60)


def test_table_covers_every_registered_strategy() -> None:
    words = {phase.name for text in TABLE for phase in parse_strategy(text).phases}
    words |= {parse_strategy(text).name for text in TABLE}
    # Those that split a model want one that can be traced, or layers they know: test_pipeline.py
    # and test_tensor.py.
    assert words | {"pipeline", "tensor"} == set(records())
    assert [text for text in TABLE if parse_strategy(text).exact] == EXACT


ONE_WORKER = [
    text
    for text in TABLE
    if not text.startswith(("ps(overlap", "diloco")) and text not in ALGORITHMS
]
"""All but one that computes on weights a step old even alone, one that goes by differences, and
sums that one worker does not form."""


@pytest.mark.parametrize("strategy", ONE_WORKER)
def test_one_worker_equals_plain_pytorch_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    job = synthetic_job(Plain, dtype="float32", optimizer="sgd(momentum=0.9)", batch=32)
    train(tmp_path, job, strategy, workers=1)
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) == 0.0


def check_equal_to_one_process(
    tmp_path: Path, strategy: str, workers: int, optimizer: str, tolerance: float, **fields: Any
) -> None:
    job = synthetic_job(Plain, optimizer=optimizer, **fields)
    result = train(tmp_path, job, strategy, workers)
    assert result["updates"] == 20
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= tolerance


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *(("allreduce", text) for text in OPTIMIZERS[:2]),
        *(pytest.param("allreduce", text, marks=pytest.mark.slow) for text in OPTIMIZERS[2:]),
        *((text, "sgd(momentum=0.9)") for text in ALGORITHMS),
        ("ps(sync=bsp, servers=2)", "adam"),
        *(
            pytest.param("ps(sync=bsp, servers=2)", text, marks=pytest.mark.slow)
            for text in OPTIMIZERS
            if text != "adam"
        ),
    ],
)
def test_three_workers_equal_one_process_on_an_indivisible_batch(
    tmp_path: Path, strategy: str, optimizer: str
) -> None:
    check_equal_to_one_process(tmp_path, strategy, 3, optimizer, 1e-9)


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_weights_that_a_layer_puts_elsewhere_go_on_being_trained(
    tmp_path: Path, strategy: str
) -> None:
    """A server knows nothing of the norm; workers keep to it whenever they compute."""
    job = synthetic_job(Moving, optimizer="sgd", lr=0.05, epochs=2)
    train(tmp_path, job, strategy, 2)
    ours, plain = read_weights(tmp_path / "run"), train_plainly(job)
    if strategy == "allreduce":
        assert largest_difference(ours, plain) <= 1e-9
    else:
        torch.manual_seed(job.seed)
        first = job.model().double().state_dict()
        assert all(largest_difference({k: ours[k]}, {k: first[k]}) > 1e-3 for k in first)


@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_other_numbers_of_workers_equal_one_process(
    tmp_path: Path, strategy: str, workers: int
) -> None:
    check_equal_to_one_process(tmp_path, strategy, workers, "sgd(momentum=0.9)", 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_every_optimizer_with_every_number_of_workers(
    tmp_path: Path, strategy: str, optimizer: str, workers: int
) -> None:
    check_equal_to_one_process(tmp_path, strategy, workers, optimizer, 1e-9)


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_float32_stays_within_rounding(tmp_path: Path, strategy: str) -> None:
    check_equal_to_one_process(tmp_path, strategy, 3, "sgd", 1e-4, dtype="float32")


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp, servers=2)"])
def test_clipping_schedule_and_more_workers_than_samples_in_a_batch(
    tmp_path: Path, strategy: str
) -> None:
    """The last batch of an epoch has 2 samples for 3 workers: one share is empty."""
    job = synthetic_job(
        Plain, samples=112, epochs=2, clip=0.05, schedule="milestones(50%, warmup=0.5)", lr=0.5
    )
    assert split_batch(112 % 11, 3) == [0, 1, 2, 2]
    train(tmp_path, job, strategy, workers=3)
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(Plain, "adam"), (Awkward, "sgd(momentum=0.9, weight_decay=0.01)")],
    ids=["adam", "awkward"],
)
def test_state_survives_every_pair_of_strategies(
    tmp_path: Path, model: type[torch.nn.Module], optimizer: str
) -> None:
    """Weights, slots, schedule and data position carry over at every switch, or this differs."""
    job = synthetic_job(model, optimizer=optimizer, schedule="cosine", samples=115, epochs=2)
    result = train(tmp_path, job, EVERY_PAIR, workers=3)
    assert [(s["from"].split("(")[0], s["to"].split("(")[0]) for s in result["switches"]] == [
        ("allreduce", "ps"),
        ("ps", "allreduce"),
        ("allreduce", "single"),
        ("single", "ps"),
        ("ps", "ps"),
        ("ps", "single"),
        ("single", "allreduce"),
    ]
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9
    assert all(0 < s["pause_s"] < 10 and s["drain_s"] >= 0 for s in result["switches"])


def positions_by_epoch(folder: Path) -> dict[int, list[tuple[int, int]]]:
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for worker in read_run(folder).workers:
        for step in worker.iter_steps():
            found[step.epoch].append((step.lo, step.hi))
    return found


MORE = [
    "grouped(size=2, servers=2)",
    "allreduce(codec=topk(0.1), balance=auto)",
    "ps(codec=int8, servers=2)",
    "switch(ps, allreduce, at=samples(150))",
    "switch(local_sgd(h=4), grouped(size=2), at=samples(150))",
    "switch(diloco(h=4), ps(sync=gba), local_sgd(drift=0.05), at=(samples(60), samples(200)))",
]


@pytest.mark.parametrize("strategy", [*TABLE[1:], *MORE])
def test_every_sample_exactly_once_an_epoch_and_telemetry_complete(
    tmp_path: Path, strategy: str
) -> None:
    """Three workers, an epoch of 115 that neither batch nor workers divide, a mid-epoch switch."""
    job = synthetic_job(Plain, samples=115, epochs=3, held_out=9)
    result = train(tmp_path, job, strategy, workers=3)
    epochs = positions_by_epoch(tmp_path / "run")
    assert sorted(epochs) == [0, 1, 2]
    for ranges in epochs.values():
        seen = sorted(position for lo, hi in ranges for position in range(lo, hi))
        assert seen == list(range(115))
    assert result["status"] == "done"
    assert result["samples"] == 3 * 115
    assert [row["samples"] for row in result["history"]] == [115, 230, 345]
    workers = read_run(tmp_path / "run").workers
    assert len(workers) == 3
    for number, worker in enumerate(workers):
        phases = result["phases"][f"worker-{number}"]
        assert set(phases) == set(PHASES)
        ended = worker.ended
        assert ended is not None
        assert sum(ended.phases.values()) == pytest.approx(ended.t, rel=0.02, abs=0.1)
        # The result counts until the report that the worker has finished, a moment earlier.
        assert sum(phases.values()) == pytest.approx(ended.t, rel=0.2, abs=0.2)
    if strategy.startswith("ps"):
        assert sum(result["staleness"]["histogram"].values()) > 0
        assert result["bytes_sent"] > 0


@pytest.mark.parametrize("strategy", ["allreduce", "ps(sync=bsp)"])
def test_running_statistics_are_averaged_by_samples(tmp_path: Path, strategy: str) -> None:
    """One step on shares of 4, 4 and 3: statistics are those of the shares, weighted so."""
    job = synthetic_job(NormOnly, samples=11, lr=1e-12)
    train(tmp_path, job, strategy, workers=3)
    inputs, _ = make_rows(11)
    order = torch.from_numpy(epoch_order(11, job.seed, 0))
    cuts = split_batch(11, 3)
    mean = torch.zeros_like(inputs[0])
    variance = torch.zeros_like(inputs[0])
    for lo, hi in itertools.pairwise(cuts):
        share = inputs[order[lo:hi]]
        mean += (hi - lo) / 11 * 0.1 * share.mean(0)
        variance += (hi - lo) / 11 * (0.9 + 0.1 * share.var(0))
    weights = read_weights(tmp_path / "run")
    assert torch.allclose(weights["norm.running_mean"], mean, atol=1e-12)
    assert torch.allclose(weights["norm.running_var"], variance, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ps(sync=ssp(0))", "local_sgd(h=1)"])
def test_the_loosest_strategies_at_their_tightest_equal_allreduce(
    tmp_path: Path, strategy: str
) -> None:
    """SSP with no slack is BSP, averaging after every step is averaging gradients: under SGD."""
    job = synthetic_job(Plain, optimizer="sgd", lr=0.2)
    train(tmp_path, job, strategy, workers=3)
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9


def test_groups_by_speed_put_the_slow_ones_together(tmp_path: Path) -> None:
    slow = (InjectedSlowdown(0, factor=20.0), InjectedSlowdown(2, factor=20.0))
    job = synthetic_job(Plain, samples=440)
    options = RunOptions(out=tmp_path / "run", workers=4, timeout_s=60, slowdowns=slow)
    result = run_training(job, parse_strategy("grouped(size=2, by=speed)"), options)
    assert result["status"] == "done"
    ranges = positions_by_worker(tmp_path / "run")
    # Workers of a group share each of their batches; groups never share one.
    assert {start for start, _ in ranges[0]} == {start for start, _ in ranges[2]}
    assert {start for start, _ in ranges[1]} == {start for start, _ in ranges[3]}


def positions_by_worker(folder: Path) -> list[list[tuple[int, int]]]:
    return [[(s.start, s.hi) for s in worker.iter_steps()] for worker in read_run(folder).workers]


def test_a_straggler_never_leads_ssp_beyond_its_bound(tmp_path: Path) -> None:
    slow = (InjectedSlowdown(0, factor=6.0),)
    job = synthetic_job(Plain, samples=440, epochs=2)
    options = RunOptions(out=tmp_path / "run", workers=3, timeout_s=60, slowdowns=slow)
    result = run_training(job, parse_strategy("ps(sync=ssp(2))"), options)
    assert 0 < result["lag"]["max"] <= 2


def test_learning_rate_of_an_asynchronous_update_follows_its_samples(tmp_path: Path) -> None:
    """One worker at a time is in force under asp: with 1 worker of 2, lr is as told."""
    job = synthetic_job(Plain, samples=44, optimizer="sgd", lr=0.2)
    one = train(tmp_path / "a", job, "ps(lr_scale=0.5)", workers=1)
    half = synthetic_job(Plain, samples=44, optimizer="sgd", lr=0.1)
    assert one["updates"] == 4
    assert largest_difference(read_weights(tmp_path / "a" / "run"), train_plainly(half)) <= 1e-12

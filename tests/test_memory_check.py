"""A model that is too large for a worker: said in one line, and trained in parts."""

from __future__ import annotations

import copy
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import StartCli
from paceline.errors import UsageError
from paceline.job import build_job
from paceline.launch.run import train
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.proc_stats import available_memory_bytes
from paceline.worker.job_builder import checkpoint_activations
from paceline.worker.memory_check import (
    check_memory,
    explain_out_of_memory,
    suggest_memory_saving_strategies,
)

JOB = """
import torch

from paceline import Job

WIDTH = 4096


class Model(torch.nn.Module):
    '''Six layers of 64 MB: 0.4 GB of weights, three times that with gradients and momentum.'''

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, WIDTH)
        self.hidden = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.out = torch.nn.Linear(WIDTH, 10)

    def forward(self, inputs):
        return self.out(self.hidden(self.first(inputs.flatten(1))))


def data():
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    return (inputs, torch.arange(16) % 10), (inputs, torch.arange(16) % 10), None


def job():
    return Job(model=Model, data=data, batch=8, epochs=1, lr=0.001, optimizer="sgd(momentum=0.9)",
               checkpoint_every="epoch(1)")
"""


def limit(gb: float) -> None:
    nbytes = int(gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["pipeline(stages=2, micro=2)", "allreduce(shard=full)", "tensor(size=2)"]
)
def test_too_large_for_one_trains_in_parts(
    start_cli: StartCli, tmp_path: Path, strategy: str
) -> None:
    """A limit of the process itself, as `ulimit -d` sets it."""
    (tmp_path / "large.py").write_text(JOB)
    common = ("train", "large.py:job", "--workers", 2, "--threads", 1, "--quiet")
    whole = start_cli(
        *common,
        "--strategy",
        "allreduce(via=network)",
        "--out",
        "whole",
        preexec=lambda: limit(1.25),
    ).wait(120)
    assert whole.code != 0
    assert "needs about 1.21 GB per worker" in whole.last_line
    assert "pipeline(stages=2) needs 0.61 GB" in whole.last_line
    assert "allreduce(shard=full) needs 0.61 GB" in whole.last_line
    done = start_cli(
        *common, "--strategy", strategy, "--out", "parts", preexec=lambda: limit(1.25)
    ).wait(240)
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "parts/result.json").read_text())
    assert result["samples"] == 16
    held = [part["weight_bytes"] for part in result["parts"].values()]
    assert max(held) < 0.6 * sum(held)
    assert (tmp_path / "parts/model.safetensors").stat().st_size > 400e6


def test_what_would_fit_is_told() -> None:
    told = suggest_memory_saving_strategies(400e6, 1, 2, 0.9e9)
    assert told == (
        "allreduce(shard=full) needs 0.60 GB, pipeline(stages=2) needs 0.60 GB, "
        "tensor(size=2) needs 0.60 GB"
    )
    assert "over 7 workers or more" in suggest_memory_saving_strategies(400e6, 1, 2, 0.2e9)


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(8192, 4096)
    optimizer = torch.optim.Adam(model.parameters())
    check_memory(parse_strategy("allreduce"), model, optimizer, 2)
    monkeypatch.setattr("paceline.worker.memory_check.available_memory_bytes", lambda: 200e6)
    with pytest.raises(UsageError, match=r"allreduce needs about 0\.54 GB .* only 0\.33 GB"):
        check_memory(parse_strategy("allreduce"), model, optimizer, 2)
    check_memory(parse_strategy("pipeline"), model, optimizer, 2)


def test_memory_that_the_system_refuses_is_told_in_words() -> None:
    error = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000 bytes."
    )
    told = explain_out_of_memory(error)
    assert told is not None
    assert "tried to allocate 8.00 GB" in told
    assert explain_out_of_memory(RuntimeError("shapes differ")) is None
    assert available_memory_bytes() > 0


def saved_bytes(model: torch.nn.Module, rows: torch.Tensor) -> int:
    """What is kept from forward for backward, which is then done."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(rows).square().mean()
    at_peak = sum(kept.values())
    loss.backward()
    return at_peak


def make_blocks() -> torch.nn.Module:
    def block() -> torch.nn.Module:
        parts = [torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.3)]
        return torch.nn.Sequential(*parts, torch.nn.Linear(32, 32), torch.nn.GELU())

    return torch.nn.Sequential(torch.nn.Linear(8, 32), *(block() for _ in range(6)))


def make_rows() -> Any:
    rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows, torch.arange(96) % 32), None, None


def test_blocks_are_computed_again_in_place_of_being_kept() -> None:
    """The same gradients, dropout included; a fraction of what a model of six blocks keeps."""
    torch.manual_seed(0)
    plain = make_blocks()
    again = copy.deepcopy(plain)
    checkpoint_activations(again)
    copied = copy.deepcopy(again)  # as a strategy does that shards it
    rows = torch.randn(64, 8)
    sizes = []
    for model in (plain, again, copied):
        torch.manual_seed(7)
        sizes.append(saved_bytes(model, rows))
    assert sizes[1] == sizes[2] < sizes[0] / 2
    for one, two, three in zip(
        plain.parameters(), again.parameters(), copied.parameters(), strict=True
    ):
        assert one.grad is not None
        assert torch.equal(one.grad, two.grad)
        assert torch.equal(one.grad, three.grad)
    with pytest.raises(UsageError, match="no blocks"):
        checkpoint_activations(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(shard=full)", "ps(sync=bsp)"])
def test_recomputed_training_is_the_same(tmp_path: Path, strategy: str) -> None:
    losses = []
    for on in (False, True):
        job = build_job(
            model=make_blocks, data=make_rows, batch=16, epochs=2, recompute=on, dtype="float64"
        )
        losses.append(train(job, strategy, 2, out=tmp_path / f"run{on}")["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_pipeline_computes_again_by_its_own_option(tmp_path: Path) -> None:
    job = build_job(
        model=make_blocks, data=make_rows, batch=16, epochs=1, recompute=True, dtype="float64"
    )
    with pytest.raises(UsageError, match=r"pipeline\(recompute=true\)"):
        train(job, "pipeline(stages=2, micro=2)", 2, out=tmp_path / "run")

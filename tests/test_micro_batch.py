"""Micro-batches: gradients of a share, accumulated in parts that fit in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import RunCli, read_result
from paceline.strategies.runner import Replica, compute_gradients
from paceline.telemetry.phase_clock import PhaseClock

TRAIN = ("train", "--model", "mlp-128", "--data", "digits", "--dtype", "float64", "--lr", 0.05)


@pytest.mark.parametrize(
    "strategy", ["single", "allreduce", "allreduce(balance=auto)", "ps(sync=bsp)", "local_sgd(h=3)"]
)
def test_weights_equal_those_of_whole_shares(
    run_cli: RunCli, tmp_path: Path, strategy: str
) -> None:
    workers = 1 if strategy == "single" else 2
    weights = []
    for name, extra in (("whole", ()), ("micro", ("--micro-batch", 7))):
        done = run_cli(
            *(*TRAIN, "--strategy", strategy, "--workers", workers, "--batch", 50, "--epochs", 2),
            *(*extra, "--clip", 1.0, "--out", tmp_path / name),
        )
        assert done.code == 0, done.stderr
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    whole, micro = weights
    for name, tensor in whole.items():
        torch.testing.assert_close(micro[name], tensor, rtol=1e-9, atol=1e-9)
    losses = [read_result(tmp_path / n)["history"][-1]["train_loss"] for n in ("whole", "micro")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Limited(torch.nn.Module):
    """Fails like torch's allocator for more than `most` samples; has an unused layer."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.calls = most, 0
        self.layer, self.unused = torch.nn.Linear(4, 3), torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(inputs) > self.most:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            )
        output: torch.Tensor = self.layer(inputs)
        return output


def gradients(most: int, attempts: int = 2) -> tuple[Limited, Replica, list[str]]:
    torch.manual_seed(0)
    model = Limited(most)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.randn(10, 4), torch.randint(3, (10,)))
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p, name=name: called.append(name)
        )
    clock = PhaseClock(0.0)
    stats = compute_gradients(
        replica, clock, batch, torch.nn.functional.cross_entropy, 10, attempts
    )
    assert (stats.samples, stats.predictions) == (10, 10)
    return model, replica, called


def test_out_of_memory_halves_the_micro_batch_once(capsys: pytest.CaptureFixture[str]) -> None:
    whole, _, _ = gradients(most=10)
    model, replica, called = gradients(most=5)
    assert replica.micro_batch == 5
    assert "out of memory in a forward pass of 10 samples" in capsys.readouterr().out
    assert sorted(called) == ["layer.bias", "layer.weight"]  # each hook once
    assert model.unused.weight.grad is None
    torch.testing.assert_close(model.layer.weight.grad, whole.layer.weight.grad)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        gradients(most=4)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        gradients(most=5, attempts=1)


def test_other_errors_are_not_repeated() -> None:
    class Broken(Limited):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            raise RuntimeError("shape mismatch")

    model = Broken(1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.randn(10, 4), torch.randint(3, (10,)))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        compute_gradients(replica, PhaseClock(0.0), batch, torch.nn.functional.cross_entropy, 10)
    assert model.calls == 1


@pytest.mark.parametrize("strategy", ["pipeline", "tensor", "allreduce(shard=full)"])
def test_strategies_that_divide_the_model_refuse_it(
    run_cli: RunCli, tmp_path: Path, strategy: str
) -> None:
    done = run_cli(
        *(*TRAIN, "--strategy", strategy, "--workers", 2, "--micro-batch", 8, "--out", tmp_path)
    )
    assert done.code == 2
    assert f"--micro-batch is not supported with {strategy}" in done.stderr

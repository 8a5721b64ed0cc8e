"""Correction for staleness: fractional optimizer steps, stable rates and delays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.protocol.clock import Push
from paceline.protocol.staleness import Fraction, StalenessMeter
from paceline.strategies.ps import fractional
from paceline.strategies.ps.fractional import (
    fractional_rate,
    fractional_step,
    has_fractional_step,
    settle_state,
)
from paceline.strategies.ps.stability import delay_rate

HALF = Fraction(share=0.5, delay=0.5, lookahead=0.5)


def parameter(values: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def step(optimizer: torch.optim.Optimizer, gradient: Any, fraction: Fraction) -> None:
    [held] = optimizer.param_groups[0]["params"]
    held.grad = torch.as_tensor(gradient, dtype=held.dtype).expand_as(held).clone()
    base = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = base * fraction.share
    fractional_step(optimizer, fraction)
    optimizer.param_groups[0]["lr"] = base


def test_a_whole_step_with_full_lookahead_is_nesterov_momentum() -> None:
    ours, theirs = parameter([1.0, -2.0, 3.0]), parameter([1.0, -2.0, 3.0])
    mine = torch.optim.SGD([ours], lr=0.1, momentum=0.9, weight_decay=0.01)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    torch.manual_seed(0)
    for _ in range(20):
        gradient = torch.randn(3, dtype=torch.float64)
        step(mine, gradient, Fraction(1.0, 1.0, 1.0))
        theirs.grad = gradient
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_fractions_of_a_constant_gradient_add_up_to_synchronous_steps(workers: int) -> None:
    """After many batches, the same distance was covered and the momentum is the same."""
    ours, theirs = parameter([0.0]), parameter([0.0])
    mine = torch.optim.SGD([ours], lr=0.1, momentum=0.9)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    share = 1 / workers
    for _ in range(100):
        for _ in range(workers):
            step(mine, 1.0, Fraction(share, 1 - share, 1.0))
        theirs.grad = torch.ones_like(theirs)
        reference.step()
    assert ours.item() == pytest.approx(theirs.item(), rel=0.02)
    settle_state(mine)
    buffers = [o.state[p]["momentum_buffer"] for o, p in ((mine, ours), (reference, theirs))]
    assert float(buffers[0]) == pytest.approx(float(buffers[1]), rel=1e-3)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fractions_of_any_size_follow_the_formula(nesterov: bool) -> None:
    """Also with whole steps in between, which use the same buffer in torch's form."""
    mu, decay, lr = 0.9, 0.01, 0.1
    held = parameter([1.0, -2.0, 3.0])
    optimizer = torch.optim.SGD([held], lr=lr, momentum=mu, weight_decay=decay, nesterov=nesterov)
    w, v = held.detach().clone(), torch.zeros(3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        s, lookahead = torch.rand(2, generator=generator).tolist()
        if number % 5 == 0:  # Sums of shares may be above 1, by rounding or by more.
            s, lookahead = 1 + (1e-15 if number % 2 else 0.25), 0.0
        gradient = torch.randn(3, dtype=torch.float64, generator=generator)
        step(optimizer, gradient, Fraction(s, lookahead, lookahead))
        g = gradient + decay * w
        k = mu * (1.0 if nesterov else lookahead)
        w = w - lr * s * ((1 + k) * g + (mu - k * (1 - mu)) * v)
        v = (1 - s * (1 - mu)) * v + s * g
        if number % 7 == 0:
            settle_state(optimizer)
            torch.testing.assert_close(optimizer.state[held]["momentum_buffer"], v)
    torch.testing.assert_close(held.detach(), w)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fractions_of_adam_follow_a_constant_gradient_like_adam(kind: Any) -> None:
    ours, theirs = parameter([1.0]), parameter([1.0])
    mine, reference = (kind([p], lr=0.01, weight_decay=0.1) for p in (ours, theirs))
    for _ in range(50):
        for _ in range(4):
            step(mine, 2.0, Fraction(0.25, 0.75, 0.75))
        theirs.grad = torch.full_like(theirs, 2.0)
        reference.step()
    assert ours.item() == pytest.approx(theirs.item(), rel=0.01)
    assert float(mine.state[ours]["step"]) == 50.0


def test_long_tensors_are_updated_in_chunks_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    gradient, start = torch.randn(1000), torch.randn(1000)
    results = []
    for chunk in (64, 1 << 20):
        monkeypatch.setattr(fractional, "CHUNK", chunk)
        held = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([held], lr=0.1)
        for _ in range(3):
            step(optimizer, gradient, HALF)
        results.append(held.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_only_known_optimizers_with_usual_options_take_fractional_steps() -> None:
    held = [parameter([1.0])]
    assert has_fractional_step(torch.optim.SGD(held, lr=0.1, momentum=0.9, nesterov=True))
    assert has_fractional_step(torch.optim.AdamW(held))
    assert not has_fractional_step(torch.optim.RMSprop(held))
    assert not has_fractional_step(torch.optim.Adam(held, amsgrad=True))
    assert not has_fractional_step(torch.optim.SGD(held, lr=0.1, maximize=True))
    assert not has_fractional_step(torch.optim.SGD(held, lr=0.1, momentum=0.9, dampening=0.5))

    class Adam(torch.optim.Adam):
        """A class of the user's with a known name."""

    assert not has_fractional_step(Adam(held))


# ---- stability --------------------------------------------------------------------------------


def stability_limit(share: float, delay: float, momentum: float) -> float:
    """Largest learning rate times curvature at which the linear recurrence does not grow."""
    steps, k = round(delay / share), min(1.0, delay) * momentum

    def grows(rate: float) -> bool:
        size = steps + 2
        matrix = np.zeros((size, size))
        matrix[0, 0] = 1
        matrix[0, steps] -= rate * share * (1 + k)
        matrix[0, -1] = -rate * share * (momentum - k * (1 - momentum))
        for row in range(1, steps + 1):
            matrix[row, row - 1] = 1
        matrix[-1, steps] += share
        matrix[-1, -1] = 1 - share * (1 - momentum)
        return bool(np.abs(np.linalg.eigvals(matrix)).max() > 1 + 1e-9)

    low, high = 1e-5, 10.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


def test_synchronous_steps_are_stable_up_to_the_known_limit() -> None:
    for momentum in (0.0, 0.5, 0.9):
        assert stability_limit(1.0, 0.0, momentum) == pytest.approx(2 * (1 + momentum), rel=1e-3)


def test_delay_rate_follows_the_eigenvalues() -> None:
    errors = []
    for momentum in (0.0, 0.5, 0.8, 0.9, 0.95):
        reference = stability_limit(1 / 16, 15 / 16, momentum)
        for share in (0.125, 0.25, 0.5, 1.0):
            for delay in (1.0, 2.0, 3.0, 4.0):
                exact = min(1.0, stability_limit(share, delay, momentum) / reference)
                errors.append(math.log(delay_rate(share, delay, momentum) / exact))
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.2
    assert max(map(abs, errors)) < 0.6


def test_equal_workers_keep_their_learning_rate() -> None:
    for workers in (2, 3, 8, 64):
        assert delay_rate(1 / workers, 1 - 1 / workers, 0.9) == 1.0


def test_fractional_rate_combines_share_and_delay() -> None:
    sgd = {"lr": 0.1, "momentum": 0.9}
    assert fractional_rate(sgd, None, 0.7) == 0.7
    assert fractional_rate(sgd, Fraction(1.0, 0.0, 0.0), 0.5) == 1.0
    assert fractional_rate(sgd, Fraction(0.25, 0.75, 0.75), 1.0) == 0.25
    assert fractional_rate(sgd, Fraction(0.25, 4.0, 1.0), 1.0) < 0.25 / 10
    adam = {"lr": 0.1, "betas": (0.9, 0.999)}
    assert fractional_rate(adam, Fraction(0.25, 4.0, 1.0), 1.0) < 0.25 / 10


# ---- measuring --------------------------------------------------------------------------------


def push(worker: int, base: int, share: float = 0.5) -> Push:
    return Push(worker, 0, 32, share, base)


def test_one_worker_takes_whole_steps() -> None:
    meter = StalenessMeter()
    for version in range(5):
        fraction = meter.on_update([push(0, version, 1.0)], 1.0)
        assert fraction.is_whole


def test_delay_is_counted_in_global_batches() -> None:
    meter = StalenessMeter()
    first = meter.on_update([push(0, 0)], 0.5)
    assert (first.share, first.delay) == (0.5, 0.0)
    assert meter.on_update([push(1, 0)], 0.5).delay == 0.5
    assert meter.on_update([push(0, 1)], 0.5).delay == 0.5
    assert meter.on_update([push(1, 1), push(0, 3)], 1.0).delay == pytest.approx(0.5)
    for version in range(4, 60):
        last = meter.on_update([push(0, version - 3)], 0.5)
    assert last.delay == 1.5
    assert last.lookahead == 1.0

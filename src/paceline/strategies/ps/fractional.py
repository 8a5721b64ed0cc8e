"""Optimizer steps worth a fraction of a global batch, for gradients that arrive one by one.

A torch optimizer applied to each worker's gradient decays its momentum once per push, `1 / s` times
as often as on global batches, where `s` is the gradient's share of the batch. Here the decay is
rescaled to `s`, and the step looks ahead along the momentum to where the weights will be when the
gradient, computed on older weights, takes effect. With momentum `mu` and look-ahead `k`:

    SGD    w -= lr s ((1 + k) g + (mu - k (1 - mu)) v)
           v  = (1 - s (1 - mu)) v + s g
    Adam   w -= lr s ((1 - b1) (1 + k) g + (b1 - k (1 - b1)) m^) / (sqrt(u) + eps)
           u  = s v2^ + (1 - s) m^^2
           m, v2 decay by b1^s and b2^s; m^ and v2^ are corrected for the bias of s steps

At `s = 1` and `k = mu` the first is torch's Nesterov momentum; at `k = 0`, its plain momentum. The
look-ahead is that of DANA (Hakimi et al., "Taming momentum in a distributed asynchronous
environment", 2019), with the mean of the workers' momentum buffers, so that it needs no additional
memory. The second moment of a share's gradient contains more noise than that of a whole batch; the
denominator of Adam removes the difference, with `m^` as an estimate of the mean gradient.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.sgd import sgd

from paceline.protocol.staleness import Fraction
from paceline.strategies.optimizer_traits import momentum_of
from paceline.strategies.ps.messages import Options
from paceline.strategies.ps.stability import delay_rate

CHUNK = 1 << 17
"""Elements per operation: weights, gradient and state of a chunk fit into a core's cache."""
MIN_ON_GRADIENT = 1e-3
"""Factor on the gradient, next to the buffer, below which the fused kernel would be inaccurate."""
BUFFER_SCALE = "momentum_scale"
"""Key in the state of a parameter: the factor by which its momentum buffer is scaled."""


def fractional_rate(options: Options, fraction: Fraction | None, rate: float) -> float:
    """Returns the factor on the learning rate of a parameter group for one update.

    `rate` is the factor of an update that is not corrected.
    """
    if fraction is None:
        return rate
    if fraction.is_whole:
        return 1.0
    return fraction.share * delay_rate(fraction.share, fraction.delay, momentum_of(options))


def has_fractional_step(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `fractional_step` supports the optimizer with its current options."""
    kind = type(optimizer)
    if kind not in _STEPS:
        return False
    return not any(
        group.get("maximize") or group.get("amsgrad") or group.get("dampening")
        for group in optimizer.param_groups
    )


@torch.no_grad()
def fractional_step(optimizer: torch.optim.Optimizer, fraction: Fraction) -> None:
    """Updates all parameters that have a gradient, like `optimizer.step()`; changes its state.

    The learning rates of the groups are those of this update: `fractional_rate` is applied.
    """
    step = _STEPS[type(optimizer)]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                step(parameter, group, optimizer.state[parameter], fraction)


def settle_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that of a torch optimizer again, to be read or used by another step."""
    for state in optimizer.state.values():
        scale = state.pop(BUFFER_SCALE, None)
        if scale is not None:
            state["momentum_buffer"].div_(scale)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same elements of all tensors, a chunk at a time."""
    flat = [tensor.view(-1) for tensor in tensors]
    if flat[0].numel() <= CHUNK:
        return iter([tuple(flat)])
    return zip(*(torch.split(tensor, CHUNK) for tensor in flat), strict=True)


def _sgd_step(
    parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any], fraction: Fraction
) -> None:
    """Uses torch's fused kernel, which reads and writes each element once.

    The kernel computes `b = M b + D g` and `w -= L (g + M b)`. For the factors of a fractional step
    to have that form, the buffer holds `b = c v`, with a scale `c` that changes from step to step.
    Steps of a whole batch or more without a look-ahead do not have it.
    """
    s, mu, rate, decay = fraction.share, group["momentum"], group["lr"], group["weight_decay"]
    gradient = parameter.grad
    assert gradient is not None
    if not mu:
        parameter.add_(gradient.add(parameter, alpha=decay) if decay else gradient, alpha=-rate)
        return
    buffer = state.get("momentum_buffer")
    if buffer is None:
        buffer = state["momentum_buffer"] = torch.zeros_like(parameter)
    k = max(fraction.lookahead, 1.0 if group["nesterov"] else 0.0) * mu
    decayed, on_buffer = 1 - s * (1 - mu), mu - k * (1 - mu)
    on_gradient = 1 + k - on_buffer * s / decayed
    before = state.pop(BUFFER_SCALE, 1.0)
    if on_gradient < MIN_ON_GRADIENT:
        g = gradient.add(parameter, alpha=decay) if decay else gradient
        v = buffer.div_(before)
        parameter.add_(g, alpha=-rate * (1 + k)).add_(v, alpha=-rate * on_buffer)
        v.mul_(decayed).add_(g, alpha=s)
        return
    scale = state[BUFFER_SCALE] = math.sqrt(on_buffer * before / on_gradient) / decayed
    sgd(
        [parameter],
        [gradient],
        [buffer],
        fused=True,
        weight_decay=decay,
        momentum=scale * decayed / before,
        lr=rate * on_gradient,
        dampening=1 - scale * s,
        nesterov=True,
        maximize=False,
    )


def _adam_step(
    parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any], fraction: Fraction
) -> None:
    s, (beta1, beta2), eps = fraction.share, group["betas"], group["eps"]
    rate, decay = group["lr"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    gradient = parameter.grad
    assert gradient is not None
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    before = float(state["step"])
    state["step"] += s
    kept1, kept2 = beta1**s, beta2**s
    old_bias = 1 - beta1**before
    bias1, bias2 = 1 - beta1 ** (before + s), 1 - beta2 ** (before + s)
    k = fraction.lookahead * beta1
    weight_g, weight_m = (1 - beta1) * (1 + k), beta1 - k * (1 - beta1)
    for w, g, m, v2 in _chunks(parameter, gradient, state["exp_avg"], state["exp_avg_sq"]):
        if decay and not decoupled:
            g = g.add(w, alpha=decay)
        # Before the first step the gradient is the only estimate of the mean gradient.
        if before:
            direction = g.mul(weight_g).add_(m, alpha=weight_m / old_bias)
        else:
            direction = g.clone()
        m.mul_(kept1).add_(g, alpha=1 - kept1)
        v2.mul_(kept2).addcmul_(g, g, value=1 - kept2)
        scale = v2.mul(min(s, 1.0) / bias2)
        if s < 1:
            scale.addcmul_(m, m, value=(1 - s) / bias1**2)
        if decay and decoupled:
            w.mul_(1 - rate * decay)
        w.addcdiv_(direction, scale.sqrt_().add_(eps), value=-rate)


_STEPS: dict[type[torch.optim.Optimizer], Callable[..., None]] = {
    torch.optim.SGD: _sgd_step,
    torch.optim.Adam: _adam_step,
    torch.optim.AdamW: _adam_step,
}

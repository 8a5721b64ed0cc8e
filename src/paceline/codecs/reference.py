"""The sum that workers with a codec arrive at, computed in one process.

What real exchanges are compared with, and what simulated ones use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.compressor import Compressor
from paceline.codecs.powersgd import PowerSgdCoder


def reference_sum(parts: Sequence[tuple[Compressor, Tensor]]) -> Tensor:
    """The sum of each worker's flat gradient after its compressor, in the order of the workers."""
    low_rank = parts[0][0].coder.reduction == "low_rank"
    return _sum_factored(parts) if low_rank else _sum_decoded(parts)


def _sum_decoded(given: Sequence[tuple[Compressor, Tensor]]) -> Tensor:
    total = torch.zeros_like(given[0][1])
    decoded = torch.empty_like(total)
    for compressor, flat in given:
        compressor.coder.decode(compressor.encode(flat), decoded)
        total += decoded
    return total


def _sum_factored(given: Sequence[tuple[Compressor, Tensor]]) -> Tensor:
    """Computes PowerSGD's two sums of low-rank factors from the parts of all workers."""
    firsts = []
    for compressor, flat in given:
        assert isinstance(compressor.coder, PowerSgdCoder)
        if compressor.feedback is not None:
            compressor.feedback.compensate(flat)
        firsts.append(compressor.coder.compute_p(flat))
    first = torch.stack(firsts).sum(0)
    chief = given[0][0].coder
    assert isinstance(chief, PowerSgdCoder)
    total = torch.zeros_like(given[0][1])
    if not chief.p_matrices(first).numel():
        total.copy_(first)
        return total
    chief.orthogonalize(first)
    answers = []
    for compressor, flat in given:
        assert isinstance(compressor.coder, PowerSgdCoder)
        answers.append(compressor.coder.compute_q(flat, first))
        if compressor.feedback is not None:
            compressor.coder.update_residual(flat, first, answers[-1], compressor.feedback.residual)
    second = torch.stack(answers).sum(0)
    for compressor, _ in given:
        assert isinstance(compressor.coder, PowerSgdCoder)
        compressor.coder.decompress(first, second, total)
    return total

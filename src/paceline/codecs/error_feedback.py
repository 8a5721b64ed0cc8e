"""Error feedback: the part that a message omits is added to the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.base import check_tensor


class ErrorFeedback:
    """The residual of one flat buffer: what its messages have omitted so far."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self.residual = torch.zeros(numel, dtype=dtype)

    def compensate(self, flat: Tensor) -> None:
        """Add to a gradient what the earlier messages lacked."""
        flat.add_(self.residual)

    def update(self, flat: Tensor, decoded: Tensor) -> None:
        """Keep the difference between what was meant and what the message says.

        `decoded` may be the residual itself, which is then overwritten.
        """
        torch.sub(flat, decoded, out=self.residual)

    def export(self) -> Tensor:
        return self.residual.clone()

    def load(self, residual: Tensor) -> None:
        """Take back an exported residual; raises StateError when it is of another buffer."""
        check_tensor(residual, self.residual, "the residual")
        self.residual.copy_(residual)

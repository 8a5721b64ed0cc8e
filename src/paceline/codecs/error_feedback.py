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
        """Adds the residual of earlier messages to a gradient."""
        flat.add_(self.residual)

    def update(self, flat: Tensor, decoded: Tensor) -> None:
        """Stores the difference between the gradient and the decoded message.

        `decoded` may be the residual itself, which is then overwritten.
        """
        torch.sub(flat, decoded, out=self.residual)

    def export(self) -> Tensor:
        return self.residual.clone()

    def load(self, residual: Tensor) -> None:
        """Restores an exported residual. Raises StateError if it belongs to another buffer."""
        check_tensor(residual, self.residual, "the residual")
        self.residual.copy_(residual)

"""Result of measuring the links between workers before training."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeProbe:
    """Seconds of messages and sums among all workers, measured before training."""

    message_s: float
    """Latency of a small message between two workers."""
    small_s: float
    """All-reduce of one value."""
    gradient_s: float
    """All-reduce of a whole gradient."""
    gradient_bytes: int

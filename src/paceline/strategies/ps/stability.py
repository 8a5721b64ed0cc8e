"""Learning rates at which delayed updates stay stable, relative to those without a delay.

On a quadratic loss, fractional updates (`strategies.ps.fractional`) of share `s`, whose gradients
are `d` global batches old, converge up to a learning rate that follows from the eigenvalues of a
linear recurrence. Synchronous training converges up to `2 (1 + mu) / L`, where `mu` is the momentum
and `L` the curvature. The formula here was fitted to limits computed for momenta from 0 to
0.98, shares from 1/16 to 1 and delays from 1 to 4; a test compares it with the eigenvalues.
"""

import math

SHARE_DELAY = 0.58
"""Delay, in shares, that the size of a step adds: an update takes effect all at once."""
MOMENTUM_EXPONENT = 0.48


def delay_rate(share: float, delay: float, momentum: float) -> float:
    """Returns the factor on the learning rate of an update with this share and delay.

    It is 1 as long as the limit is not below that of equal workers, whose delay is `1 - share`. The
    limit falls with the inverse of the delay without momentum, and about with its square at 0.9.
    The formula is within 16% of the computed limits (root mean square).
    """
    age = delay + SHARE_DELAY * share
    if age <= 1:
        return 1.0
    return float(age ** -(1 + MOMENTUM_EXPONENT * math.log(1 / (1 - min(momentum, 0.98)))))

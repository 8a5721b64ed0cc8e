"""Time that a run waits for candidates that are unsafe in its first steps.

Stale gradients and local steps do the most harm while the weights change fast, so a change to them
costs less accuracy the later it comes. Waiting costs the more the faster they are. In simulations
with real gradients and 94 updates, a change to `ps` after 11 of them ended 0.2 to 0.3 points of
accuracy below all-reduce, and after 23 of them 0.1; with 281 updates, 0.2 after 11, and 0.1 after
70.
"""

PATIENCE = 0.03
"""Fraction of a run that waiting may cost."""
MAX_WAIT = 0.25
"""Fraction of a run after which a change does no more harm than later."""
MIN_WAIT_BATCHES = 20
"""Twice the memory of a momentum of 0.9."""

LOCAL_STEPS_BATCHES = 200
"""Runs of at least this many global batches may start with local steps.

In simulations, local steps from the start cost 2 points of accuracy in a run of 31 batches, and 0.2
in one of 281.
"""


def is_safe_start(efficiency: float, waits: bool, batch: int, total: int | None) -> bool:
    """Returns whether a candidate may be used from the first step of a run of `total` samples.

    `waits` is True if its workers wait for each other, so that no gradient is stale.
    """
    is_long = total is not None and total >= LOCAL_STEPS_BATCHES * batch
    return waits and (efficiency >= 1.0 or is_long)


def wait_samples(lead: float, batch: int, total: int | None) -> float:
    """Returns the samples of a run before a candidate that is unsafe in its first steps.

    `lead` is the fraction by which its throughput is above that of the best safe one. A run of
    unknown length, without a `total`, waits for the fewest batches.
    """
    fraction = min(MAX_WAIT, PATIENCE / lead) if lead > 0 else MAX_WAIT
    return max(MIN_WAIT_BATCHES * batch, fraction * (total or 0))

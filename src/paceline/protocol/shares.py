"""Division of a batch among workers."""

from __future__ import annotations

from itertools import accumulate


def split_batch(count: int, workers: int, weights: tuple[int, ...] | None = None) -> list[int]:
    """Returns offsets 0 = o[0] <= ... <= o[workers] = count that split a batch into shares.

    Equal shares differ by at most one, the larger ones first; weighted shares are rounded by the
    largest remainder. Shares may be empty.
    """
    if weights is None:
        small, extra = divmod(count, workers)
        sizes = [small + (i < extra) for i in range(workers)]
    else:
        total = sum(weights)
        exact = [count * w / total for w in weights]
        sizes = [int(x) for x in exact]
        left = count - sum(sizes)
        by_remainder = sorted(range(workers), key=lambda i: (sizes[i] - exact[i], i))
        for i in by_remainder[:left]:
            sizes[i] += 1
    return list(accumulate(sizes, initial=0))

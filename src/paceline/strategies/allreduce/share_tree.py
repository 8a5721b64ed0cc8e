"""Fixed shares of a global batch, and the fixed binary tree along which they are summed.

Floating-point addition is not associative. With `allreduce(shares=S)` a batch is always divided
into the same S shares, and their gradients are always added in the same order: those of a subtree
first. Which worker computes a share, and how many workers there are, then changes no bit.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

from paceline.protocol.balance import split_batch

T = TypeVar("T")
Node = tuple[int, int]
"""A node of the tree: the sum of the shares [lo, hi)."""


def children(node: Node) -> tuple[Node, Node]:
    """Returns the operands of a node; the left one has the largest power of two of shares."""
    lo, hi = node
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


def worker_shares(shares: int, workers: int) -> list[int]:
    """Returns the offsets of the shares of each worker, which are consecutive."""
    return split_batch(shares, workers)


def cut_batch(count: int, shares: int, workers: int) -> list[int]:
    """Returns the offsets of the samples of each worker in a batch of `count`."""
    cuts = split_batch(count, shares)
    return [cuts[share] for share in worker_shares(shares, workers)]


def held_nodes(node: Node, first: int, last: int) -> Iterator[Node]:
    """Yields the largest nodes below `node` that contain only shares of [first, last)."""
    lo, hi = node
    if hi <= first or last <= lo:
        return
    if first <= lo and hi <= last:
        yield node
        return
    for child in children(node):
        yield from held_nodes(child, first, last)


def most_held_nodes(shares: int, workers: int) -> int:
    """Returns the largest number of sums that a worker contributes to an exchange."""
    cuts = worker_shares(shares, workers)
    return max(
        sum(1 for _ in held_nodes((0, shares), cuts[worker], cuts[worker + 1]))
        for worker in range(workers)
    )


def sum_tree(
    node: Node, value_of: Callable[[Node], T | None], is_known: Callable[[Node], bool],
    add: Callable[[T, T], T],
) -> T | None:  # fmt: skip
    """Returns the sum of a node from those of its known descendants; None if it has no samples."""
    if is_known(node):
        return value_of(node)
    left, right = (sum_tree(child, value_of, is_known, add) for child in children(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)

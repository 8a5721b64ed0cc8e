"""Randomness that is a function of its key: no state, no order, the same on every machine.

NumPy's generators draw in sequence and may change between releases. Here every value is the
splitmix64 hash of what it belongs to, so that any process can compute it for any row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROWS_KEY = 0x5041_4345  # Any constant does, but it must never change: splits depend on it.


def hash_rows(words: tuple[int, ...], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash for each row number, under a key of integers of any size and sign."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & _MASK)) + _GAMMA & _MASK)
    mixed = (rows.astype(np.uint64) ^ np.uint64(state)) + np.uint64(_GAMMA)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def split_holdout(count: int, *sizes: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Split the rows 0..count-1: the rest first, then parts of the given sizes.

    Which rows are held out depends on `count` and `sizes` alone, never on a run's seed; within a
    part they are in their original order. The caller sees to it that enough rows remain.
    """
    order = np.argsort(hash_rows((_ROWS_KEY,), np.arange(count)), kind="stable")
    parts = np.split(order, np.cumsum(sizes))
    return tuple(np.sort(part).astype(np.int64) for part in (parts[-1], *parts[:-1]))


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _MASK
    word = (word ^ (word >> 27)) * _SECOND & _MASK
    return word ^ (word >> 31)

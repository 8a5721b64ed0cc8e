"""Stateless randomness: every value is a function of its key, the same on every machine.

NumPy's generators are sequential and may change between releases. Here every value is a splitmix64
hash of its key, so any process can compute it for any row.
"""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROWS_KEY = 0x5041_4345  # An arbitrary constant that must never change: splits depend on it.


def hash_rows(key: tuple[int, ...], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Returns a 64-bit hash of each row index, keyed by integers of any size and sign."""
    state = np.zeros(1, np.uint64)
    for value in key:
        state = _mix(state ^ np.uint64(value & _MASK))
    return _mix(rows.astype(np.uint64) ^ state)


def split_holdout(count: int, *sizes: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Splits the rows 0..count-1 into the remaining rows, then parts of the given sizes.

    The parts depend only on `count` and `sizes`, never on a run's seed, and preserve the original
    order. The caller ensures that enough rows remain.
    """
    order = np.argsort(hash_rows((_ROWS_KEY,), np.arange(count)), kind="stable")
    parts = np.split(order, np.cumsum(sizes))
    return tuple(np.sort(part).astype(np.int64) for part in (parts[-1], *parts[:-1]))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(_GAMMA)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))

"""Time series in a bounded number of bins; pairs of bins are merged as a run grows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BINS = 512
FIRST_WIDTH_S = 1.0

Array = NDArray[np.float64]


class TimeBins:
    """One time grid for all series of a run.

    Every series is an array of (bin, column). Sums are spread over the bins that a window covers,
    peaks keep the maximum. A day in 512 bins has bins of about three minutes.
    """

    def __init__(self, most: int = MAX_BINS, width_s: float = FIRST_WIDTH_S) -> None:
        self.most = most
        self.width_s = width_s
        self.used = 0
        self.generation = 0
        """Number of merges; bins of an earlier generation are outdated."""
        self._sums: dict[Any, Array] = {}
        self._peaks: dict[Any, Array] = {}

    def add(self, key: Any, end_s: float, length_s: float, amounts: list[float]) -> None:
        """Spreads the amounts of a window that ends at `end_s` over the bins it covers."""
        self._make_room(end_s)
        table = self._table(self._sums, key, len(amounts))
        row = np.asarray(amounts, dtype=np.float64)
        begin = max(0.0, end_s - max(length_s, 1e-9))
        first, last = self._place(begin), self._place(end_s)
        whole = end_s - begin
        if first == last or whole <= 0:
            table[last] += row
        else:
            for place in range(first, last + 1):
                low = max(begin, place * self.width_s)
                high = min(end_s, (place + 1) * self.width_s)
                table[place] += row * (max(0.0, high - low) / whole)

    def set_max(self, key: Any, at_s: float, values: list[float]) -> None:
        """Keeps the maximum of each column in the bin."""
        self._make_room(at_s)
        table = self._table(self._peaks, key, len(values))
        place = self._place(at_s)
        np.maximum(table[place], values, out=table[place])

    def sums(self, key: Any, first: int = 0) -> Array | None:
        table = self._sums.get(key)
        return None if table is None else table[first : self.used]

    def peaks(self, key: Any, first: int = 0) -> Array | None:
        table = self._peaks.get(key)
        return None if table is None else table[first : self.used]

    def _place(self, at_s: float) -> int:
        return min(self.most - 1, max(0, int(at_s / self.width_s)))

    def _table(self, tables: dict[Any, Array], key: Any, columns: int) -> Array:
        if key not in tables:
            tables[key] = np.zeros((self.most, columns))
        return tables[key]

    def _make_room(self, at_s: float) -> None:
        while at_s >= self.most * self.width_s:
            for tables, combine in ((self._sums, np.add), (self._peaks, np.maximum)):
                for table in tables.values():
                    merged = combine(table[0::2], table[1::2])
                    table[: len(merged)], table[len(merged) :] = merged, 0.0
            self.width_s *= 2
            self.used = -(-self.used // 2)
            self.generation += 1
        self.used = max(self.used, self._place(at_s) + 1)


class DownsampledCurve:
    """Points in order of arrival; every second one is dropped when there are too many."""

    def __init__(self, most: int = 1200) -> None:
        self._most = most
        self._every = 1
        self._count = 0
        self.points: list[list[float | None]] = []
        self._last: list[float | None] | None = None

    def add(self, point: list[float | None]) -> None:
        self._last = point
        if self._count % self._every == 0:
            self.points.append(point)
            if len(self.points) > self._most:
                self.points = self.points[::2]
                self._every *= 2
        self._count += 1

    def list_points(self) -> list[list[float | None]]:
        """Returns the kept points and always the newest."""
        if self._last is None or (self.points and self.points[-1] is self._last):
            return list(self.points)
        return [*self.points, self._last]

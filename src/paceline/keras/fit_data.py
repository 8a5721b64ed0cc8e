"""What `fit` is given, as samples that can be leased by their position in an epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.keras.backend import import_keras
from paceline.worker.batch_loader import epoch_order

DIGEST_ROWS = 64
DEFAULT_BATCH = 32


class FitData(Protocol):
    """Samples of one epoch after another; `batch` is the global batch."""

    samples: int
    batch: int

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        """What stands at the positions [lo, hi) of an epoch, as (x, y, sample_weight)."""
        ...

    def digest(self) -> str:
        """Tells other data apart: every worker must have read the same."""
        ...


def make_fit_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    steps: int | None,
    shuffle: bool,
    seed: int,
    class_weight: dict[int, float] | None = None,
) -> FitData:
    """Raises UsageError, in fit()'s words, for what cannot be shared out."""
    keras = import_keras()
    if x is None:
        raise UsageError("fit() was called without x: give it the training data")
    if isinstance(x, torch.utils.data.DataLoader):
        return LoaderFitData(x, shuffle, seed)
    if isinstance(x, keras.utils.PyDataset):
        return BatchFitData(x, shuffle, seed)
    if not _is_structure_of_arrays(x):
        x, y, sample_weight, found = collect_epoch(x, steps)
        batch_size, steps = batch_size or found, None
    if steps is not None:
        raise UsageError(
            "steps_per_epoch with arrays is not carried over: an epoch is the whole array; "
            "leave it out, or pass a shorter array"
        )
    if class_weight is not None:
        sample_weight = _weigh(y, sample_weight, class_weight)
    return ArrayFitData(x, y, sample_weight, batch_size or DEFAULT_BATCH, shuffle, seed)


def _is_structure_of_arrays(x: Any) -> bool:
    parts = import_keras().tree.flatten(x)
    return bool(parts) and all(hasattr(p, "shape") and hasattr(p, "dtype") for p in parts)


def collect_epoch(x: Any, steps: int | None) -> tuple[Any, Any, Any, int]:
    """One epoch of a generator or a tf.data set as arrays, and the size of its first batch."""
    if not hasattr(x, "__iter__"):
        raise UsageError(
            f"fit() was given a {type(x).__name__}: arrays, a tf.data set, a PyDataset, "
            "a DataLoader or a generator of batches are needed"
        )
    if steps is None and _is_endless(x):
        raise UsageError("fit() was given endless data: say steps_per_epoch, or leave out repeat()")
    tree = import_keras().tree
    batches = []
    for number, batch in enumerate(x):
        if steps is not None and number >= steps:
            break
        batches.append(tree.map_structure(as_array, batch))
    if not batches:
        raise UsageError("fit() was given data without a single batch")
    first = tree.flatten(batches[0])[0]
    if first.ndim == 0:
        raise UsageError("fit() was given single samples: batch them, e.g. dataset.batch(32)")
    whole = tree.map_structure(lambda *parts: np.concatenate(parts), *batches)
    if not isinstance(whole, tuple | list):
        whole = (whole,)
    x, y, weight = (*whole, None, None)[:3]
    return x, y, weight, len(first)


def _is_endless(x: Any) -> bool:
    count = getattr(x, "cardinality", None)
    return count is not None and int(count()) == -1


class ArrayFitData:
    """Arrays, or dicts and lists of them, all of one length."""

    def __init__(self, x: Any, y: Any, weight: Any, batch: int, shuffle: bool, seed: int) -> None:
        tree = import_keras().tree
        self._tree = tree
        self._parts = [
            None if part is None else tree.map_structure(_standard, part) for part in (x, y, weight)
        ]
        arrays = [a for part in self._parts if part is not None for a in tree.flatten(part)]
        lengths = sorted({len(a) for a in arrays})
        if len(lengths) != 1:
            raise UsageError(f"fit() was given arrays of unequal lengths: {lengths}")
        self.samples, self.batch = lengths[0], batch
        if not self.samples:
            raise UsageError("fit() was given empty arrays")
        self._arrays = arrays
        self._order = EpochOrder(shuffle, seed, self.samples)

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        rows = self._order.rows(epoch, lo, hi)
        return tuple(
            None if part is None else self._tree.map_structure(lambda a: _tensor(a[rows]), part)
            for part in self._parts
        )

    def split(self, share: float) -> tuple[ArrayFitData, ArrayFitData]:
        """The last rows as validation, as Keras has it."""
        cut = int(self.samples * (1 - share))
        if not 0 < cut < self.samples:
            raise UsageError(f"validation_split {share} leaves nothing on one side")

        def part(lo: int, hi: int, shuffle: bool) -> ArrayFitData:
            x, y, weight = [
                None if p is None else self._tree.map_structure(lambda a: a[lo:hi], p)
                for p in self._parts
            ]
            return ArrayFitData(x, y, weight, self.batch, shuffle, self._order.seed)

        return part(0, cut, self._order.shuffle), part(cut, self.samples, False)

    def digest(self) -> str:
        rows = np.linspace(0, self.samples - 1, min(DIGEST_ROWS, self.samples)).astype(np.int64)
        return _digest(a[rows] for a in self._arrays)


class LoaderFitData:
    """A torch DataLoader: its dataset, batch size and collate function."""

    def __init__(self, loader: Any, shuffle: bool, seed: int) -> None:
        data = loader.dataset
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UsageError(
                "fit() needs a DataLoader over a map-style dataset: it is leased by index"
            )
        if not loader.batch_size:
            raise UsageError("fit() needs a DataLoader with a batch_size: it is the global batch")
        self._data, self._collate = data, loader.collate_fn
        self.samples, self.batch = len(data), int(loader.batch_size)
        # What the loader would have done decides; Keras ignores `shuffle` for loaders.
        shuffled = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        self._order = EpochOrder(shuffled, seed, self.samples)

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        rows = self._order.rows(epoch, lo, hi)
        return _three(self._collate([self._data[int(i)] for i in rows]))

    def digest(self) -> str:
        return ""


class BatchFitData:
    """A PyDataset: whole batches by number; each worker cuts its share out of the batch."""

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        if not data.num_batches:
            raise UsageError("fit() was given a PyDataset without a length: define __len__")
        self._data, self._tree = data, import_keras().tree
        self.batch = self._size(data[0])
        self._count = int(data.num_batches)
        self.samples = self.batch * (self._count - 1) + self._size(data[self._count - 1])
        self._order = EpochOrder(shuffle, seed, self._count)
        self._epoch = 0
        self._held: tuple[int, Any] = (-1, None)

    def _size(self, batch: Any) -> int:
        return len(self._tree.flatten(batch)[0])

    def _number(self, epoch: int, place: int) -> int:
        if self.samples % self.batch and place == self._count - 1:
            return place  # The short batch stays the last one.
        whole = self.samples // self.batch
        order = self._order.rows(epoch, 0, self._count)
        return int(order[order < whole][place])

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        while self._epoch < epoch:
            self._data.on_epoch_end()
            self._epoch += 1
        parts = []
        while lo < hi:
            place = lo // self.batch
            end = min(hi, (place + 1) * self.batch)
            number = self._number(epoch, place)
            if self._held[0] != number:
                self._held = (number, self._tree.map_structure(_tensor_of, self._data[number]))
            whole = self._held[1]
            expected = min(self.batch, self.samples - place * self.batch)
            if self._size(whole) != expected:
                raise UsageError(
                    f"batch {number} of the PyDataset has {self._size(whole)} samples, "
                    f"{expected} expected: all but the last must be of one size"
                )
            a, b = lo - place * self.batch, end - place * self.batch
            # Called at once, within this turn of the loop.
            parts.append(self._tree.map_structure(lambda t: t[a:b], whole))  # noqa: B023
            lo = end
        joined = parts[0]
        if len(parts) > 1:
            joined = self._tree.map_structure(lambda *ts: torch.cat(ts), *parts)
        return _three(joined)

    def digest(self) -> str:
        return ""


class EpochOrder:
    """Positions of an epoch to rows: seeded, or as they stand."""

    def __init__(self, shuffle: bool, seed: int, count: int) -> None:
        self.shuffle, self.seed = bool(shuffle), seed
        self._count = count
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(count, dtype=np.int64)

    def rows(self, epoch: int, lo: int, hi: int) -> NDArray[np.int64]:
        if self.shuffle and epoch != self._epoch:
            self._order = epoch_order(self._count, self.seed, epoch)
            self._epoch = epoch
        return self._order[lo:hi]


def _three(batch: Any) -> tuple[Any, Any, Any]:
    given = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(given) > 3:
        raise UsageError(
            f"a batch has {len(given)} parts: (x, y) or (x, y, sample_weight) are known"
        )
    return (*given, None, None)[:3]


def _standard(value: Any) -> Any:
    """NumPy arrays, floats in Keras's own precision."""
    array = as_array(value)
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(import_keras().config.floatx(), copy=False)
    return array


def as_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    numpy = getattr(value, "numpy", None)
    return numpy() if callable(numpy) else np.asarray(value)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype == np.uint16 or array.dtype == np.uint32:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def _tensor_of(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else _tensor(_standard(value))


def _weigh(y: Any, weight: Any, by_class: dict[int, float]) -> Any:
    if y is None or weight is not None:
        raise UsageError("class_weight needs y, and no sample_weight beside it")
    labels = as_array(y)
    if labels.ndim == 2 and labels.shape[1] > 1:
        labels = labels.argmax(1)
    labels = labels.reshape(-1).astype(np.int64)
    table = np.ones(int(labels.max()) + 1, dtype=np.float32)
    for number, value in by_class.items():
        if int(number) < len(table):
            table[int(number)] = value
    return table[labels]


def _digest(arrays: Iterator[Any]) -> str:
    summed = hashlib.sha256()
    for array in arrays:
        summed.update(str((array.shape, array.dtype)).encode())
        summed.update(np.ascontiguousarray(array).tobytes())
    return summed.hexdigest()[:16]

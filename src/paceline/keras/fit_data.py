"""Data passed to `fit`, as samples that are leased by their position in an epoch."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.keras.module import import_keras
from paceline.worker.batch_loader import EpochOrder

DIGEST_ROWS = 64
DEFAULT_BATCH = 32


class FitData(ABC):
    """Samples by epoch and position; `batch` is the global batch size."""

    samples: int
    batch: int

    @abstractmethod
    def take(self, epoch: int, lo: int, hi: int) -> Any:
        """Returns the samples at positions [lo, hi) of an epoch, as (x, y, sample_weight)."""

    def digest(self) -> str:
        """Returns a hash by which all workers check that they have the same data."""
        return ""


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
    """Converts the arguments of fit(). Raises UsageError for data that cannot be distributed."""
    keras = import_keras()
    if x is None:
        raise UsageError("fit() was called without x; pass the training data")
    if isinstance(x, torch.utils.data.DataLoader):
        return LoaderFitData(x, shuffle, seed)
    if isinstance(x, keras.utils.PyDataset):
        return BatchFitData(x, shuffle, seed)
    parts = keras.tree.flatten(x)
    if not parts or not all(hasattr(p, "shape") and hasattr(p, "dtype") for p in parts):
        x, y, sample_weight, found = collect_epoch(x, steps)
        batch_size, steps = batch_size or found, None
    if steps is not None:
        raise UsageError(
            "steps_per_epoch is not supported with arrays, where an epoch is the batch array; "
            "remove it, or pass a shorter array"
        )
    if class_weight is not None:
        sample_weight = _apply_class_weight(y, sample_weight, class_weight)
    batch = batch_size or DEFAULT_BATCH
    return ArrayFitData((x, y, sample_weight), batch=batch, shuffle=shuffle, seed=seed)


def collect_epoch(x: Any, steps: int | None) -> tuple[Any, Any, Any, int]:
    """Reads one epoch of a generator or tf.data dataset; returns arrays and the batch size."""
    if not hasattr(x, "__iter__"):
        raise UsageError(
            f"fit() does not support a {type(x).__name__}; use arrays, a tf.data dataset, "
            "a PyDataset, a DataLoader or a generator of batches"
        )
    cardinality = getattr(x, "cardinality", None)
    if steps is None and cardinality is not None and int(cardinality()) == -1:
        raise UsageError("fit() received infinite data; set steps_per_epoch, or remove repeat()")
    tree = import_keras().tree
    batches = [tree.map_structure(as_array, batch) for batch in itertools.islice(x, steps)]
    if not batches:
        raise UsageError("fit() received data without any batch")
    first = tree.flatten(batches[0])[0]
    if first.ndim == 0:
        raise UsageError(
            "fit() received single samples; batch them, for example with dataset.batch(32)"
        )
    joined = tree.map_structure(lambda *parts: np.concatenate(parts), *batches)
    return (*_three(joined), len(first))


class ArrayFitData(FitData):
    """Arrays, or dicts and lists of them, all of the same length."""

    def __init__(self, parts: tuple[Any, ...], *, batch: int, shuffle: bool, seed: int) -> None:
        self._tree = import_keras().tree
        self._parts = self._map(_standard, parts)
        self._arrays = [a for a in self._tree.flatten(self._parts) if a is not None]
        lengths = sorted({len(a) for a in self._arrays})
        if len(lengths) != 1:
            raise UsageError(f"fit() received arrays of unequal lengths: {lengths}")
        self.samples, self.batch = lengths[0], batch
        if not self.samples:
            raise UsageError("fit() received empty arrays")
        self._order = EpochOrder(self.samples, seed, shuffle=bool(shuffle))

    def _map(self, function: Callable[[Any], Any], parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if p is None else self._tree.map_structure(function, p) for p in parts)

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        rows = self._order.rows(epoch, lo, hi)
        return self._map(lambda array: _tensor(array[rows]), self._parts)

    def split(self, fraction: float) -> tuple[ArrayFitData, ArrayFitData]:
        """Splits off the last rows as validation data, as Keras does."""
        cut = int(self.samples * (1 - fraction))
        if not 0 < cut < self.samples:
            raise UsageError(f"validation_split {fraction} leaves one side empty")

        order = self._order
        first = self._map(lambda array: array[:cut], self._parts)
        last = self._map(lambda array: array[cut:], self._parts)
        return (
            ArrayFitData(first, batch=self.batch, shuffle=order.shuffle, seed=order.seed),
            ArrayFitData(last, batch=self.batch, shuffle=False, seed=order.seed),
        )

    def digest(self) -> str:
        rows = np.linspace(0, self.samples - 1, min(DIGEST_ROWS, self.samples)).astype(np.int64)
        summed = hashlib.sha256()
        for array in (each[rows] for each in self._arrays):
            summed.update(str((array.shape, array.dtype)).encode())
            summed.update(np.ascontiguousarray(array).tobytes())
        return summed.hexdigest()[:16]


class LoaderFitData(FitData):
    """A torch DataLoader: its dataset, batch size and collate function."""

    def __init__(self, loader: Any, shuffle: bool, seed: int) -> None:
        data = loader.dataset
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UsageError(
                "fit() requires a DataLoader over a map-style dataset, which is leased by index"
            )
        if not loader.batch_size:
            raise UsageError(
                "fit() requires a DataLoader with a batch_size, which is the global batch size"
            )
        self._data, self._collate = data, loader.collate_fn
        self.samples, self.batch = len(data), int(loader.batch_size)
        # The loader's own sampler decides; Keras ignores `shuffle` for loaders.
        shuffled = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        self._order = EpochOrder(self.samples, seed, shuffle=shuffled)

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        rows = self._order.rows(epoch, lo, hi)
        return _three(self._collate([self._data[int(i)] for i in rows]))


class BatchFitData(FitData):
    """A PyDataset: batches by index, of which each worker takes its share."""

    def __init__(self, data: Any, shuffle: bool, seed: int) -> None:
        if not data.num_batches:
            raise UsageError("fit() received a PyDataset without a length; define __len__")
        self._data, self._tree = data, import_keras().tree
        self.batch = self._size(data[0])
        before_last = int(data.num_batches) - 1
        self.samples = self.batch * before_last + self._size(data[before_last])
        # Without a short batch, which stays last.
        self._full = self.samples // self.batch
        self._order = EpochOrder(self._full, seed, shuffle=bool(shuffle))
        self._epoch = 0
        self._held: tuple[int, Any] = (-1, None)

    def _size(self, batch: Any) -> int:
        return len(self._tree.flatten(batch)[0])

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        while self._epoch < epoch:
            self._data.on_epoch_end()
            self._epoch += 1
        parts = []
        while lo < hi:
            position = lo // self.batch
            end = min(hi, (position + 1) * self.batch)
            number = position
            if position < self._full:
                number = int(self._order.rows(epoch, position, position + 1)[0])
            if self._held[0] != number:
                self._held = (number, self._tree.map_structure(_tensor_of, self._data[number]))
            batch = self._held[1]
            expected = min(self.batch, self.samples - position * self.batch)
            if self._size(batch) != expected:
                raise UsageError(
                    f"batch {number} of the PyDataset has {self._size(batch)} samples instead of "
                    f"{expected}; all but the last must have the same size"
                )
            a, b = lo - position * self.batch, end - position * self.batch
            # Called immediately, within this iteration.
            parts.append(self._tree.map_structure(lambda t: t[a:b], batch))  # noqa: B023
            lo = end
        joined = parts[0]
        if len(parts) > 1:
            joined = self._tree.map_structure(lambda *ts: torch.cat(ts), *parts)
        return _three(joined)


def _three(batch: Any) -> tuple[Any, Any, Any]:
    given = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if len(given) > 3:
        raise UsageError(
            f"a batch has {len(given)} parts; it must be (x, y) or (x, y, sample_weight)"
        )
    return (*given, None, None)[:3]


def _standard(value: Any) -> Any:
    """Converts to a NumPy array, with floats in Keras's default precision."""
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


def _apply_class_weight(y: Any, weight: Any, by_class: dict[int, float]) -> Any:
    if y is None or weight is not None:
        raise UsageError("class_weight requires y and cannot be combined with sample_weight")
    labels = as_array(y)
    if labels.ndim == 2 and labels.shape[1] > 1:
        labels = labels.argmax(1)
    labels = labels.reshape(-1).astype(np.int64)
    table = np.ones(int(labels.max()) + 1, dtype=np.float32)
    for number, value in by_class.items():
        if int(number) < len(table):
            table[int(number)] = value
    return table[labels]

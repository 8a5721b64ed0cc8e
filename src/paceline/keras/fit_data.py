"""Data passed to `fit`, as samples that are leased by their position in an epoch."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.keras.distribution import REPLICAS, DatasetCreator
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
    if isinstance(x, DatasetCreator):
        x = x.create()
    if hasattr(x, "element_spec") and hasattr(x, "as_numpy_iterator"):
        if class_weight is not None:
            raise UsageError("class_weight requires arrays; give the dataset sample weights")
        return StreamFitData(x, steps)
    parts = keras.tree.flatten(x)
    if not parts or not all(hasattr(p, "shape") and hasattr(p, "dtype") for p in parts):
        replicas = getattr(x, REPLICAS, 1)
        x, y, sample_weight, found = collect_epoch(x, steps)
        batch_size, steps = batch_size or found * replicas, None
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
    """Reads one epoch of a generator or of the stub's datasets; returns arrays and batch size."""
    if not hasattr(x, "__iter__"):
        raise UsageError(
            f"fit() does not support a {type(x).__name__}; use arrays, a tf.data dataset, "
            "a PyDataset, a DataLoader or a generator of batches"
        )
    _check_finite(x, steps)
    tree = import_keras().tree
    batches = [tree.map_structure(as_array, batch) for batch in itertools.islice(x, steps)]
    if not batches:
        raise UsageError("fit() received data without any batch")
    first = _count_rows(tree, batches[0])
    joined = tree.map_structure(lambda *parts: np.concatenate(parts), *batches)
    return (*_three(joined), first)


def _check_finite(x: Any, steps: int | None) -> None:
    cardinality = getattr(x, "cardinality", None)
    if steps is None and cardinality is not None and int(cardinality()) == -1:
        raise UsageError("fit() received infinite data; set steps_per_epoch, or remove repeat()")


def _count_rows(tree: Any, batch: Any) -> int:
    first = tree.flatten(batch)[0]
    if np.ndim(first) == 0:
        raise UsageError(
            "fit() received single samples; batch them, for example with dataset.batch(32)"
        )
    return len(first)


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


class StreamFitData(FitData):
    """A dataset of TensorFlow, read by every worker in the same order.

    Shuffling, augmentation and repetition are TensorFlow's, with equal seeds on all workers. Each
    worker reads the whole epoch, takes the samples that it leases, and keeps the epoch in memory.
    Without `steps`, every epoch is one new pass; otherwise epochs continue one pass, as in Keras.
    """

    def __init__(self, dataset: Any, steps: int | None) -> None:
        _check_finite(dataset, steps)
        self._tree = import_keras().tree
        options = type(dataset.options())()
        options.deterministic = True  # Equal on all workers, though parallel.
        self._dataset = dataset.with_options(options)
        self._continues = steps is not None
        self._iterator: Iterator[Any] = iter(())
        self._batches: list[Any] = []
        self._ends: list[int] = []
        """Number of samples up to the end of each batch."""
        self._epoch = -1
        self._begin(0)
        if not self._read():
            raise UsageError("fit() received data without any batch")
        first = self._ends[0]
        if steps is None:
            while self._read():
                pass
        self.batch = first * getattr(dataset, REPLICAS, 1)
        self.samples = self._ends[-1] if steps is None else steps * self.batch

    def _begin(self, epoch: int) -> None:
        if not self._continues or self._epoch < 0:
            self._iterator = self._dataset.as_numpy_iterator()
        self._batches, self._ends, self._epoch = [], [], epoch

    def _read(self) -> bool:
        batch = next(self._iterator, None)
        if batch is None:
            return False
        rows = _count_rows(self._tree, batch)
        self._batches.append(self._tree.map_structure(_standard, batch))
        self._ends.append(rows + (self._ends[-1] if self._ends else 0))
        return True

    def _read_to(self, position: int) -> None:
        while not self._ends or self._ends[-1] < position:
            if not self._read():
                self._iterator = self._dataset.as_numpy_iterator()
                if not self._read():
                    raise UsageError("the dataset has become empty; it must be readable again")

    def take(self, epoch: int, lo: int, hi: int) -> Any:
        while self._epoch != epoch:
            # A worker without leases in an epoch reads it too: the order depends on earlier passes.
            self._read_to(self.samples if self._continues else 1)
            self._begin(self._epoch + 1 if self._epoch < epoch else epoch)
        self._read_to(hi)
        parts = []
        while lo < hi:
            index = bisect.bisect_right(self._ends, lo)
            before = self._ends[index - 1] if index else 0
            end = min(hi, self._ends[index])
            a, b = lo - before, end - before
            # Called immediately, within this iteration.
            part = self._tree.map_structure(lambda array: array[a:b], self._batches[index])  # noqa: B023
            parts.append(part)
            lo = end
        join = self._tree.map_structure(lambda *arrays: _tensor(np.concatenate(arrays)), *parts)
        return _three(join)

    def digest(self) -> str:
        """Hashes targets only: TensorFlow's random operations in parallel maps may differ."""
        summed = hashlib.sha256()
        for batch in self._batches:
            x, y, _ = _three(batch)
            for array in self._tree.flatten(x if y is None else y):
                summed.update(str((array.shape, array.dtype)).encode() + array.tobytes())
        return summed.hexdigest()[:16]


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

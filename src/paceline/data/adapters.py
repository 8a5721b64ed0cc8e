"""Adapters for the user's own data: tensors, NumPy arrays or a map-style torch Dataset."""

from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.data.blocks import ColumnSelection
from paceline.data.dataset import FeatureOptions, MapDataset
from paceline.data.dataset_builder import build_dataset, build_from_source
from paceline.data.hub_datasets import HubDatasetSource, is_hub_dataset
from paceline.data.in_memory import Batch, Indices, check_dtype, check_lengths
from paceline.data.pipeline import DataPipeline
from paceline.errors import DataError, UsageError

Collate = Callable[[list[Any]], Any]

CHUNK = 1024
MAX_HELD_BYTES = 2 << 30
"""Limit for an IterableDataset, which every worker holds in memory."""


def as_dataset(obj: Any, *, dtype: str | None = None, collate: Collate | None = None) -> MapDataset:
    """Wraps the user's data in a `MapDataset`; returns one unchanged.

    Accepts a pipeline (`paceline.data.read`), a `datasets.Dataset` with the columns `label` and one
    image or other features, a pair (x, y) of tensors or NumPy arrays, a
    TensorDataset of two tensors, any object with `__len__` and `__getitem__` whose items are
    (features, label), an IterableDataset, which is read into memory at once, and a DataLoader of
    any of these. Batches are collated by `collate`, by the DataLoader's own function, or by torch's
    `default_collate`. Integer labels become int64. `dtype` ("float32", "float64") converts
    floating-point features and labels; by default they are unchanged. Raises UsageError for
    anything else and DataError for empty data or unequal lengths.
    """
    kind = check_dtype(dtype) if dtype is not None else None
    if isinstance(obj, DataPipeline):
        return build_dataset(obj, FeatureOptions(dtype=dtype or "float32")).train
    if is_hub_dataset(obj) and collate is None:
        source = HubDatasetSource(obj, ColumnSelection())
        options = FeatureOptions(dtype=dtype or "float32")
        return build_from_source(DataPipeline(urls=()), source, options).train
    if isinstance(obj, DataLoader):
        obj, collate = _open_loader(obj, collate)
    if isinstance(obj, TensorDataset) and len(obj.tensors) == 2 and collate is None:
        return TensorPairDataset(*obj.tensors, dtype=kind)
    if isinstance(obj, (tuple, list)) and len(obj) == 2 and all(map(_is_array, obj)):
        if collate is not None:
            raise UsageError(
                "collate requires a dataset of single rows; it does not apply to (x, y)"
            )
        return TensorPairDataset(*obj, dtype=kind)
    if isinstance(obj, IterableDataset):
        return _hold_rows(obj, collate, kind)
    # Datasets of other libraries may have a method `batch`, too; a MapDataset has no __getitem__.
    if callable(getattr(obj, "batch", None)) and not hasattr(obj, "__getitem__"):
        return cast(MapDataset, obj)
    if _is_array(obj) or not (hasattr(obj, "__len__") and hasattr(obj, "__getitem__")):
        raise UsageError(
            f"{type(obj).__name__} is not a supported dataset; use a pair (x, y) of tensors or "
            "arrays, a map-style Dataset, or a MapDataset"
        )
    return TorchDatasetAdapter(obj, collate=collate, dtype=kind)


def _open_loader(loader: DataLoader[Any], collate: Collate | None) -> tuple[Any, Collate | None]:
    """Returns a loader's dataset and collate function; its sampler and workers are not used."""
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "the DataLoader's dataset makes its own batches (batch_size=None), but rows are leased "
            "individually; set a batch_size"
        )
    given = loader.collate_fn if loader.collate_fn is not default_collate else None
    return loader.dataset, collate or given


def _hold_rows(dataset: Any, collate: Collate | None, dtype: torch.dtype | None) -> MapDataset:
    """Reads an IterableDataset into memory, because its rows cannot be indexed."""
    join = collate or default_collate
    parts: list[Batch] = []
    held = 0
    source = iter(dataset)
    while rows := list(islice(source, CHUNK)):
        parts.append(_check_pair(dataset, join(rows), len(rows)))
        held += sum(part.nbytes for part in parts[-1])
        if held > MAX_HELD_BYTES:
            raise UsageError(
                f"{type(dataset).__name__} is an IterableDataset of more than "
                f"{MAX_HELD_BYTES >> 20:,} MB, but rows are fetched by index; use a map-style "
                "Dataset, or convert it to Parquet"
            )
    if not parts:
        raise DataError(f"empty dataset: {type(dataset).__name__} has no rows")
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return TensorPairDataset(x, y, dtype=dtype)


class TensorPairDataset:
    """Pairs of rows of two tensors or arrays, copied only if they must be converted.

    Raises DataError if they are empty, differ in length or have a dtype unknown to torch.
    """

    def __init__(self, x: Any, y: Any, *, dtype: torch.dtype | None = None) -> None:
        x, y = _as_tensor(x, "x"), _as_tensor(y, "y")
        check_lengths(x, y)
        self._x, self._y = _convert(x, y, dtype)

    def __len__(self) -> int:
        return len(self._x)

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        rows = torch.from_numpy(indices)
        return self._x[rows], self._y[rows]


class TorchDatasetAdapter:
    """A map-style Dataset, fetched row by row (or with its `__getitems__`) and collated.

    Randomness inside the Dataset is not keyed by seed, epoch and row, so such a run cannot be
    reproduced exactly. Raises DataError if the Dataset is empty, or if a batch does not collate to
    a pair of tensors with one row per index.
    """

    def __init__(
        self, dataset: Any, *, collate: Collate | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if len(dataset) == 0:
            raise DataError(f"empty dataset: {type(dataset).__name__} has no rows")
        self._dataset = dataset
        self._collate = collate or default_collate
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Indices, *, epoch: int | None = None) -> Batch:
        numbers: list[int] = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            rows = self._dataset.__getitems__(numbers)
        else:
            rows = [self._dataset[number] for number in numbers]
        pair = _check_pair(self._dataset, self._collate(rows), len(numbers))
        return _convert(*pair, self._dtype)


def _check_pair(dataset: Any, pair: Any, count: int) -> Batch:
    name = f"a batch of {type(dataset).__name__}"
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in pair):
        raise DataError(f"{name} is not a pair of tensors (features, labels): {_name(pair)}")
    if any(part.ndim == 0 or len(part) != count for part in pair):
        raise DataError(f"{name} of {count} rows has the shapes {_name(pair)}")
    return pair[0], pair[1]


def _is_array(obj: Any) -> bool:
    return isinstance(obj, (torch.Tensor, np.ndarray))


def _as_tensor(array: Any, name: str) -> torch.Tensor:
    if isinstance(array, np.ndarray):
        try:
            # Copies only arrays that torch would reject or warn about.
            compatible = array.flags.writeable and min(array.strides, default=0) >= 0
            array = torch.from_numpy(array if compatible else array.copy())
        except TypeError as error:
            raise DataError(
                f"{name} is an array of {array.dtype}, which torch does not support"
            ) from error
    tensor = cast(torch.Tensor, array).detach()
    if tensor.ndim == 0:
        raise DataError(f"{name} is a scalar; expected one row per sample")
    return tensor


def _convert(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype | None) -> Batch:
    if dtype is not None and x.is_floating_point():
        x = x.to(dtype)
    if not y.is_floating_point():
        y = y.to(torch.int64)
    elif dtype is not None:
        y = y.to(dtype)
    return x, y


def _name(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_name(part) for part in value)})"
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__

"""Built-in datasets, and adapters for the user's own data.

Importing this package loads neither torch nor NumPy, because the command line uses its names and
`locate` before any process starts. `load`, `as_dataset` and the dataset classes import torch on
first use.

Datasets are searched in `DIR/<dataset>/` and in `DIR` itself, where DIR is the given directory,
`$PACELINE_DATA`, or `~/.cache/paceline/data`. Nothing is ever downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.catalog import check_name, dataset_names, kind
from paceline.data.dataset import DatasetSplits, FeatureOptions, MapDataset

if TYPE_CHECKING:
    from paceline.data.adapters import TensorPairDataset, TorchDatasetAdapter, as_dataset
    from paceline.data.in_memory import ArrayDataset, TextWindowDataset
    from paceline.data.pipeline import DataPipeline, read

__all__ = [
    "ArrayDataset",
    "DataPipeline",
    "DatasetSplits",
    "MapDataset",
    "TensorPairDataset",
    "TextWindowDataset",
    "TorchDatasetAdapter",
    "as_dataset",
    "check_name",
    "dataset_names",
    "kind",
    "load",
    "locate",
    "read",
]

_LAZY = {
    "ArrayDataset": "in_memory",
    "TextWindowDataset": "in_memory",
    "TorchDatasetAdapter": "adapters",
    "DataPipeline": "pipeline",
    "read": "pipeline",
    "TensorPairDataset": "adapters",
    "as_dataset": "adapters",
}


def locate(name: str, data_dir: Path | None = None) -> tuple[Path, ...]:
    """Checks quickly, without torch, that a dataset can be read; returns its files.

    Checks existence, size and first bytes only, so that a run fails before a process is started;
    `load` finds what only a full read shows (checksums, truncated gzip streams). Returns no file
    for `digits`, which is part of the package. Raises UsageError for an unknown name and DataError
    for a file that is missing or does not match its name.
    """
    from paceline.data import named_datasets

    return named_datasets.locate(check_name(name), data_dir)


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    dtype: str = "float32",
    augment: bool = False,
    seed: int = 0,
) -> DatasetSplits:
    """Loads a dataset and splits it into training, validation and test data.

    The split is the same for every `seed`, which only affects the augmentation of training images.
    `dtype` applies to features ("float32" or "float64"); labels and the characters of a text are
    int64. Raises UsageError for an unknown name or dtype, or if `augment` is set for a dataset
    without images, and DataError if a file is missing, damaged or empty.
    """
    from paceline.data import named_datasets

    options = FeatureOptions(dtype=dtype, augment=augment, seed=seed)
    return named_datasets.load(check_name(name), data_dir, options)


def __getattr__(attribute: str) -> Any:
    """Imports the parts that need torch on first use."""
    if attribute not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[attribute]}"), attribute)

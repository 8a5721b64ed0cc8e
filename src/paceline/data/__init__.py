"""The data sets Paceline trains on, and the tables that a user's own data is wrapped in.

Importing this package loads neither torch nor NumPy: the command line asks it for names and for
`locate` before any process is started. `load`, `as_table` and the table classes bring torch in
when they are first used.

Data sets are looked for in `DIR/<data set>/` and in `DIR` itself, where DIR is the folder given
or, without one, `$PACELINE_DATA`, or `~/.cache/paceline/data`. Nothing is ever downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.catalog import check_name, dataset_names, kind
from paceline.data.dataset import DatasetSplits, MapDataset

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
    """Check, cheaply and without torch, that a data set can be read; return its files.

    Looks at existence, size and first bytes only, so that a run is refused before a process is
    started; what only a full reading shows (checksums, a gzip stream cut off) is found by `load`.
    Returns no file for `digits`, which comes with scikit-learn. Raises UsageError for an unknown
    name and DataError, in one line, for a file that is missing or not what its name claims.
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
    """Read a data set completely and split it into training, validation and test tables.

    The split is the same for every `seed`: the seed only keys the augmentation of training
    images. `dtype` is that of the features, "float32" or "float64"; labels, and the characters
    of a text, are int64. Raises UsageError for an unknown name or dtype, or if `augment` is asked
    of a data set that is not of images, and DataError if a file is missing, damaged or empty.
    """
    from paceline.data import named_datasets

    return named_datasets.load(check_name(name), data_dir, dtype=dtype, augment=augment, seed=seed)


def __getattr__(attribute: str) -> Any:
    """Import the parts that need torch when they are first asked for."""
    if attribute not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[attribute]}"), attribute)

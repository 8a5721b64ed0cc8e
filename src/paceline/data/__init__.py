"""Built-in datasets, and adapters for the user's own data.

Importing this package loads neither torch nor NumPy, because the command line uses its names before
any process starts, and `locate` does not load torch. `load`, `as_dataset` and the dataset classes
import torch on first use.

Datasets are searched in `DIR/<dataset>/` and in `DIR` itself, where DIR is the given directory,
`$PACELINE_DATA`, or `~/.cache/paceline/data`. Only `paceline data get` downloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.catalog import check_name, dataset_names, kind
from paceline.data.dataset import DatasetSplits, MapDataset

if TYPE_CHECKING:
    from paceline.data.adapters import TensorPairDataset, TorchDatasetAdapter, as_dataset
    from paceline.data.in_memory import ArrayDataset, TextWindowDataset
    from paceline.data.named_datasets import load, locate
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
    **dict.fromkeys(("TensorPairDataset", "TorchDatasetAdapter", "as_dataset"), "adapters"),
    **dict.fromkeys(("ArrayDataset", "TextWindowDataset"), "in_memory"),
    **dict.fromkeys(("load", "locate"), "named_datasets"),
    **dict.fromkeys(("DataPipeline", "read"), "pipeline"),
}


def __getattr__(attribute: str) -> Any:
    """Imports the parts that need torch or NumPy on first use."""
    if attribute not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[attribute]}"), attribute)

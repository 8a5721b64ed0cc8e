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

from paceline.data.catalog import check_name, kind, names
from paceline.data.dataset import DataSet, Table

if TYPE_CHECKING:
    from paceline.data.pipeline import Pipeline, read
    from paceline.data.table import ArrayTable, WindowTable
    from paceline.data.wrapped import DatasetTable, TensorTable, as_table

__all__ = [
    "ArrayTable",
    "DataSet",
    "DatasetTable",
    "Pipeline",
    "Table",
    "TensorTable",
    "WindowTable",
    "as_table",
    "check_name",
    "kind",
    "load",
    "locate",
    "names",
    "read",
]

_LAZY = {
    "ArrayTable": "table",
    "WindowTable": "table",
    "DatasetTable": "wrapped",
    "Pipeline": "pipeline",
    "read": "pipeline",
    "TensorTable": "wrapped",
    "as_table": "wrapped",
}


def locate(name: str, data_dir: Path | None = None) -> tuple[Path, ...]:
    """Check, cheaply and without torch, that a data set can be read; return its files.

    Looks at existence, size and first bytes only, so that a run is refused before a process is
    started; what only a full reading shows (checksums, a gzip stream cut off) is found by `load`.
    Returns no file for `digits`, which comes with scikit-learn. Raises UsageError for an unknown
    name and DataError, in one line, for a file that is missing or not what its name claims.
    """
    from paceline.data import source

    return source.locate(check_name(name), data_dir)


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    dtype: str = "float32",
    augment: bool = False,
    seed: int = 0,
) -> DataSet:
    """Read a data set completely and split it into training, validation and test tables.

    The split is the same for every `seed`: the seed only keys the augmentation of training
    images. `dtype` is that of the features, "float32" or "float64"; labels, and the characters
    of a text, are int64. Raises UsageError for an unknown name or dtype, or if `augment` is asked
    of a data set that is not of images, and DataError if a file is missing, damaged or empty.
    """
    from paceline.data import source

    return source.load(check_name(name), data_dir, dtype=dtype, augment=augment, seed=seed)


def __getattr__(attribute: str) -> Any:
    """Import the parts that need torch when they are first asked for."""
    if attribute not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[attribute]}"), attribute)

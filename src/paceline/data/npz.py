"""NumPy archives (.npz) with features and labels, also of several splits, as Keras stores MNIST.

Arrays are found by their usual names (`x_train`, `train_images`, `x`, `images`, ...) or by those
given. An archive is read into memory at once. Pickled objects are never loaded.
"""

import io
import zipfile
import zlib
from collections.abc import Container

import numpy as np

from paceline.data.blocks import Array, BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile

BLOCK_BYTES = 4 << 20
FEATURES = ("x", "images", "image", "data", "features")
LABELS = ("y", "labels", "label", "target", "targets")


def list_parts(file: StoredFile, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the splits that the names of the arrays contain, such as `x_train` and `x_test`."""
    names = _open(file).keys()
    found = [part for part in known if _find(names, FEATURES, part, strict=True)]
    return tuple(found) if "train" in found else ()


def _open(file: StoredFile) -> dict[str, Array]:
    try:
        with np.load(io.BytesIO(file.read()), allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise file.error(f"is not a readable archive of arrays ({error})") from None


def _find(
    known: Container[str], names: tuple[str, ...], part: str, strict: bool = False
) -> str | None:
    candidates = [form for name in names for form in (f"{name}_{part}", f"{part}_{name}")]
    candidates += [] if strict else names
    return next((name for name in candidates if name in known), None)


class NpzSource(BlockSource):
    """Archives with one array of features and one of labels for each split."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._rows: dict[int, Rows] = {}
        self._find_blocks(self._find)

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        arrays, part = _open(file), file.part or "train"
        feature = self.selection.features[:1] or (_find(arrays, FEATURES, part) or "",)
        label = self.selection.label or _find(arrays, LABELS, part) or ""
        for name in (*feature, label):
            if name not in arrays:
                what = f"has no array {name!r} (it has: {', '.join(arrays)})"
                raise file.error(f"{what}; use --features, --label")
        x, y = arrays[feature[0]], arrays[label]
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = np.moveaxis(x, 3, 1)  # Channels last, as TensorFlow stores images.
        if len(x) != len(y):
            raise file.error(f"{len(x):,} rows in {feature[0]!r}, but {len(y):,} in {label!r}")
        self._rows[number] = x, y.reshape(len(y))
        step = max(1, BLOCK_BYTES * len(x) // max(1, x.nbytes))
        counts = ((first, min(step, len(x) - first)) for first in range(0, len(x), step))
        return [DataBlock(number, first, rows, rows * x[:1].nbytes) for first, rows in counts]

    def read(self, block: DataBlock) -> Rows:
        x, y = (array[block.offset : block.offset + block.rows] for array in self._rows[block.file])
        return self._shape_features(block, [x]), y

"""A folder for each class, with pictures in it: PNG, JPEG and what else Pillow reads.

Classes are the folders' names in order. All pictures must be of one size, or are brought to the
`shape` that is given; a shape of one channel makes them grey. Rows come in an order of their own,
by a hash of folder and name.
"""

from __future__ import annotations

import hashlib
import io

import numpy as np

from paceline.data.blocks import Array, ColumnSelection, DataBlock, Rows, bad_file, check_not_empty
from paceline.data.stores import StoredFile, read_bytes, require_extra
from paceline.errors import DataError

AT_ONCE = 128
"""Pictures read as one block."""


class ImageFolderSource:
    def __init__(self, files: tuple[StoredFile, ...], wanted: ColumnSelection) -> None:
        check_not_empty(list(files))
        # By class, a block would be of one class: they are mixed once, by their names alone.
        files = tuple(sorted(files, key=lambda file: (_hash(file), file.url)))
        require_extra("PIL.Image", "images", "reading pictures")
        folders = [file.url.rpartition("/")[0] for file in files]
        self._classes = sorted({folder.rpartition("/")[2] for folder in folders})
        if len(self._classes) < 2:
            raise DataError(
                f"{folders[0]}: all pictures are in one folder: put each class into its own, and "
                "name the folder above"
            )
        numbers = {name: number for number, name in enumerate(self._classes)}
        self._labels = np.array([numbers[folder.rpartition("/")[2]] for folder in folders])
        self._pictures = files
        self.wanted = wanted
        # A file is one picture, but a block is many: the first stands for them all.
        starts = range(0, len(files), AT_ONCE)
        self.files = tuple(files[start] for start in starts)
        self.blocks = tuple(
            DataBlock(
                number,
                start,
                min(AT_ONCE, len(files) - start),
                sum(file.size for file in files[start : start + AT_ONCE]),
            )
            for number, start in enumerate(starts)
        )
        self._shape = wanted.shape or _read_picture(files[0], None).shape

    def read(self, block: DataBlock) -> Rows:
        part = slice(block.offset, block.offset + block.rows)
        images = np.empty((block.rows, *self._shape), np.uint8)
        for row, file in enumerate(self._pictures[part]):
            image = _read_picture(file, self.wanted.shape)
            if image.shape != self._shape:
                raise bad_file(
                    file,
                    f"is of {_name(image.shape)}, but {self._pictures[0].url} of "
                    f"{_name(self._shape)}: give --shape to bring all to one size",
                )
            images[row] = image
        return images, self._labels[part]

    def count_classes(self) -> int | None:
        return len(self._classes)


def open_pictures(files: tuple[StoredFile, ...], wanted: ColumnSelection) -> ImageFolderSource:
    return ImageFolderSource(files, wanted)


def _hash(file: StoredFile) -> bytes:
    # Of the last two parts: the same pictures elsewhere come in the same order.
    tail = "/".join(file.url.split("/")[-2:])
    return hashlib.sha256(tail.encode()).digest()


def _name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _read_picture(file: StoredFile, shape: tuple[int, ...] | None) -> Array:
    """(C, H, W) bytes; grey stays grey unless three channels are asked for."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(read_bytes(file.url))) as picture:
            grey = shape[0] == 1 if shape else picture.mode in ("1", "L", "I", "F")
            converted = picture.convert("L" if grey else "RGB")
            if shape is not None and converted.size != (shape[2], shape[1]):
                converted = converted.resize((shape[2], shape[1]))
            pixels = np.asarray(converted)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise bad_file(file, f"is no picture that can be read ({error})") from None
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)

"""Image files in one directory per class: PNG, JPEG and other formats that Pillow reads.

Classes are the sorted directory names. All images must have the same size, or are resized to the
given `shape`; a shape with one channel converts them to gray. Rows are ordered by a hash of
directory and file name.
"""

import hashlib
import io

import numpy as np

from paceline.data.blocks import Array, BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.stores import StoredFile, require_extra
from paceline.errors import DataError

IMAGES_PER_BLOCK = 128


class ImageFolderSource(BlockSource):
    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._check_not_empty()
        # Sorted by class, a block would contain a single class; hashing the names mixes them.
        files = tuple(sorted(files, key=lambda file: (_hash(file), file.url)))
        require_extra("PIL.Image", "images", "reading images")
        folders = [file.url.split("/")[-2] for file in files]
        self._classes = sorted(set(folders))
        if len(self._classes) < 2:
            raise DataError(
                f"{files[0].url.rpartition('/')[0]}: all images are in one directory; create one "
                "directory per class and use their parent directory"
            )
        self._labels = np.searchsorted(self._classes, folders)
        self._images = files
        # A block consists of many files; the first one represents it.
        starts = range(0, len(files), IMAGES_PER_BLOCK)
        parts = [files[start : start + IMAGES_PER_BLOCK] for start in starts]
        self.files = tuple(part[0] for part in parts)
        self.blocks = tuple(
            DataBlock(number, start, len(part), sum(file.size for file in part))
            for number, (start, part) in enumerate(zip(starts, parts, strict=True))
        )
        self._shape = selection.shape or _read_image(files[0], None).shape

    def read(self, block: DataBlock) -> Rows:
        part = slice(block.offset, block.offset + block.rows)
        images = np.empty((block.rows, *self._shape), np.uint8)
        for row, file in enumerate(self._images[part]):
            image = _read_image(file, self.selection.shape)
            if image.shape != self._shape:
                raise file.error(
                    f"has the size {_name(image.shape)}, but {self._images[0].url} has "
                    f"{_name(self._shape)}; use --shape to resize all images"
                )
            images[row] = image
        return images, self._labels[part]

    def count_classes(self) -> int | None:
        return len(self._classes)


def _hash(file: StoredFile) -> bytes:
    # Hashes the last two parts, so that the order does not depend on the location.
    return hashlib.sha256("/".join(file.url.split("/")[-2:]).encode()).digest()


def _name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _read_image(file: StoredFile, shape: tuple[int, ...] | None) -> Array:
    """Returns (C, H, W) bytes; gray images stay gray unless three channels are requested."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(file.read())) as opened:
            gray = shape[0] == 1 if shape else opened.mode in ("1", "L", "I", "F")
            converted = opened.convert("L" if gray else "RGB")
            if shape is not None and converted.size != (shape[2], shape[1]):
                converted = converted.resize((shape[2], shape[1]))
            pixels = np.asarray(converted)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise file.error(f"is not a readable image ({error})") from None
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)

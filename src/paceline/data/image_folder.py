"""Image files in one directory per class: PNG, JPEG and other formats that Pillow reads.

Classes are the sorted directory names. All images must have the same size, or are resized to the
given `shape`; a shape with one channel converts them to gray. Rows are ordered by a hash of
directory and file name.
"""

import hashlib

import numpy as np

from paceline.data.blocks import BlockSource, ColumnSelection, DataBlock, RowError, Rows
from paceline.data.encoded_images import ImageDecoder
from paceline.data.stores import StoredFile
from paceline.errors import DataError

IMAGES_PER_BLOCK = 128


class ImageFolderSource(BlockSource):
    decodes_images = True
    reads_when_opened = False

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._check_not_empty()
        # Sorted by class, a block would contain a single class; hashing the names mixes them.
        files = tuple(sorted(files, key=lambda file: (_hash(file), file.url)))
        self._decoder = ImageDecoder(selection.shape)
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

    def read(self, block: DataBlock) -> Rows:
        part = slice(block.offset, block.offset + block.rows)
        files = self._images[part]
        try:
            images = self._decoder.decode([file.read() for file in files])
        except RowError as error:
            raise files[error.row or 0].error(f"contains {error}") from None
        return images, self._labels[part]

    def count_classes(self) -> int | None:
        return len(self._classes)


def _hash(file: StoredFile) -> bytes:
    # Hashes the last two parts, so that the order does not depend on the location.
    return hashlib.sha256("/".join(file.url.split("/")[-2:]).encode()).digest()

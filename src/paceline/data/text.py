"""Plain text at a URL, as windows of character codes; held in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.data.blocks import ColumnSelection, DataBlock, Rows, bad_file, check_not_empty
from paceline.data.stores import StoredFile, read_bytes

if TYPE_CHECKING:
    from paceline.data.dataset import MapDataset
    from paceline.data.dataset_builder import BuiltDataset

WINDOW = 64


class TextSource:
    """Text files. Builds the dataset itself, because rows are windows over all files joined."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        check_not_empty(list(files))
        self.files = files
        self.blocks: tuple[DataBlock, ...] = ()
        self._window = selection.shape[0] if selection.shape else WINDOW

    def read(self, block: DataBlock) -> Rows:
        raise AssertionError("text is not read by blocks")

    def count_classes(self) -> int | None:
        return None

    def as_opened(self, hold_out: bool) -> tuple[BuiltDataset, MapDataset | None]:
        from paceline.data.dataset_builder import BuiltDataset
        from paceline.data.in_memory import TextWindowDataset

        parts = []
        for file in self.files:
            try:
                text = read_bytes(file.url).decode("utf-8")
            except UnicodeDecodeError as error:
                raise bad_file(file, "is not UTF-8 text", f" (at byte {error.start:,})") from None
            parts.append(np.frombuffer(text.encode("utf-32-le"), np.uint32))
        vocabulary, inverse = np.unique(np.concatenate(parts), return_inverse=True)
        codes = inverse.astype(np.int32)
        cut = len(codes) * 9 // 10 if hold_out else len(codes)
        train = TextWindowDataset(codes[:cut], self._window)
        val = TextWindowDataset(codes[cut:], self._window) if hold_out else None
        return BuiltDataset(train, (self._window,), len(vocabulary), "text"), val


def open_text(files: tuple[StoredFile, ...], selection: ColumnSelection) -> TextSource:
    return TextSource(files, selection)

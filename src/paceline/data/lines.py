"""Plain text by URL, as windows of numbered characters; held in memory as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.data.blocks import Block, Rows, Wanted, check_not_empty, wrong
from paceline.data.places import File, read_bytes

if TYPE_CHECKING:
    from paceline.data.dataset import Table
    from paceline.data.opened import Opened

WINDOW = 64


class TextSource:
    """Rows are windows over all files joined, so that the table is made here."""

    def __init__(self, files: tuple[File, ...], wanted: Wanted) -> None:
        check_not_empty(list(files))
        self.files = files
        self.blocks: tuple[Block, ...] = ()
        self._window = wanted.shape[0] if wanted.shape else WINDOW

    def read(self, block: Block) -> Rows:
        raise AssertionError("a text is read as a whole")

    def count_classes(self) -> int | None:
        return None

    def as_opened(self, hold_out: bool) -> tuple[Opened, Table | None]:
        from paceline.data.opened import Opened
        from paceline.data.table import WindowTable

        parts = []
        for file in self.files:
            try:
                text = read_bytes(file.url).decode("utf-8")
            except UnicodeDecodeError as error:
                raise wrong(file, "is not UTF-8 text", f" (at byte {error.start:,})") from None
            parts.append(np.frombuffer(text.encode("utf-32-le"), np.uint32))
        vocabulary, inverse = np.unique(np.concatenate(parts), return_inverse=True)
        codes = inverse.astype(np.int32)
        cut = len(codes) * 9 // 10 if hold_out else len(codes)
        train = WindowTable(codes[:cut], self._window)
        val = WindowTable(codes[cut:], self._window) if hold_out else None
        return Opened(train, (self._window,), len(vocabulary), "text"), val


def open_text(files: tuple[File, ...], wanted: Wanted) -> TextSource:
    return TextSource(files, wanted)

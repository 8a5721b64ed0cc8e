"""Plain text as character codes, for models that predict the next character; held in memory."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.blocks import BlockSource, ColumnSelection, DataBlock, Rows
from paceline.data.catalog import DatasetFiles
from paceline.data.dataset import DatasetSplits
from paceline.data.stores import StoredFile

WINDOW = 64

Codes = npt.NDArray[np.int32]


def encode_characters(text: str) -> tuple[Codes, int]:
    """Numbers the characters by code point; returns their codes and the vocabulary size."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    vocabulary, codes = np.unique(points, return_inverse=True)
    return codes.astype(np.int32), len(vocabulary)


class TextSource(BlockSource):
    """Text files at a URL. Rows are windows over all files joined, so there are no blocks."""

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._check_not_empty()

    def read(self, block: DataBlock) -> Rows:
        raise AssertionError("text is not read by blocks")

    def derive_splits(self, hold_out: bool) -> DatasetSplits:
        from paceline.data.in_memory import TextWindowDataset

        texts = []
        for file in self.files:
            try:
                texts.append(file.read().decode("utf-8"))
            except UnicodeDecodeError as error:
                raise file.error("is not UTF-8 text", at=error.start) from None
        window = self.selection.shape[0] if self.selection.shape else WINDOW
        codes, classes = encode_characters("".join(texts))
        cut = len(codes) * 9 // 10 if hold_out else len(codes)
        train = TextWindowDataset(codes[:cut], window)
        val = TextWindowDataset(codes[cut:], window) if hold_out else None
        return DatasetSplits("", (window,), classes, "text", train, val, None)


def read(files: DatasetFiles, path: Path) -> tuple[tuple[Codes, Codes, Codes], int]:
    """Returns the first 90%, the next 5% and the last 5% of a text, and the vocabulary size.

    Raises DataError for a file that is not UTF-8, too short for one window per part, or has another
    MD5 than published.
    """
    content = files.read_checked(path)
    try:
        codes, classes = encode_characters(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise files.corrupt(path, f"is not UTF-8 text (at byte {error.start})") from error
    count = len(codes)
    first, second = count * 90 // 100, count * 95 // 100
    if min(second - first, count - second) < WINDOW + 1:
        raise files.corrupt(
            path, f"has only {count:,} characters; 5% of them must be at least {WINDOW + 1}"
        )
    return (codes[:first], codes[first:second], codes[second:]), classes

"""Plain text as numbered characters, for a model that predicts the next one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.dataset_files import DatasetFiles

WINDOW = 64

Codes = npt.NDArray[np.int32]


def locate(shelf: DatasetFiles) -> Path:
    """The file of the text; DataError if it is missing or not of the published size."""
    path = shelf.require("input.txt")
    shelf.check_size(path)
    return path


def read(shelf: DatasetFiles, path: Path) -> tuple[tuple[Codes, Codes, Codes], int]:
    """The first 90 %, the next 5 % and the last 5 % of a text, and how many characters it knows.

    Characters are numbered in the order of their code points, over the whole file. Raises
    DataError for a file that is not UTF-8, too short to give each part a window, or of another
    MD5 than published.
    """
    content = shelf.read_checked(path)
    try:
        points = np.frombuffer(content.decode("utf-8").encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise shelf.corrupt_file_error(
            path, f"is not UTF-8 text (at byte {error.start})"
        ) from error
    vocabulary, inverse = np.unique(points, return_inverse=True)
    codes: Codes = inverse.astype(np.int32)
    count = len(codes)
    first, second = count * 90 // 100, count * 95 // 100
    if min(second - first, count - second) < WINDOW + 1:
        raise shelf.corrupt_file_error(
            path,
            f"{count:,} characters are too few: 5 % of them must be at least {WINDOW + 1}",
        )
    return (codes[:first], codes[first:second], codes[second:]), len(vocabulary)

"""Plain text as character codes, for models that predict the next character."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.dataset_files import DatasetFiles

WINDOW = 64

Codes = npt.NDArray[np.int32]


def locate(files: DatasetFiles) -> Path:
    """Returns the text file. Raises DataError if it is missing or has the wrong size."""
    path = files.require("input.txt")
    files.check_size(path)
    return path


def read(files: DatasetFiles, path: Path) -> tuple[tuple[Codes, Codes, Codes], int]:
    """Returns the first 90%, the next 5% and the last 5% of a text, and the vocabulary size.

    Characters are numbered by code point, over the whole file. Raises DataError for a file that is
    not UTF-8, too short for one window per part, or has another MD5 than published.
    """
    content = files.read_checked(path)
    try:
        points = np.frombuffer(content.decode("utf-8").encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise files.corrupt_file_error(
            path, f"is not UTF-8 text (at byte {error.start})"
        ) from error
    vocabulary, inverse = np.unique(points, return_inverse=True)
    codes: Codes = inverse.astype(np.int32)
    count = len(codes)
    first, second = count * 90 // 100, count * 95 // 100
    if min(second - first, count - second) < WINDOW + 1:
        raise files.corrupt_file_error(
            path,
            f"has only {count:,} characters; 5% of them must be at least {WINDOW + 1}",
        )
    return (codes[:first], codes[first:second], codes[second:]), len(vocabulary)

"""The census table "Adult": 6 columns of numbers, 8 of categories, income above 50K or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.dataset_files import DatasetFiles

NUMBERS = (0, 2, 4, 10, 11, 12)
CATEGORIES = (1, 3, 5, 6, 7, 8, 9, 13)
LABELS = {"<=50K": 0, ">50K": 1}
CLASSES = 2

_COLUMNS = len(NUMBERS) + len(CATEGORIES) + 1


@dataclass(frozen=True)
class AdultRows:
    """Rows as they are in a file: numbers, categories as words, and labels."""

    numbers: npt.NDArray[np.float64]
    words: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int64]


def locate(shelf: DatasetFiles) -> tuple[Path, Path]:
    """The files of training and test rows; DataError if missing or not of the published size."""
    paths = shelf.require("adult.data"), shelf.require("adult.test")
    for path in paths:
        shelf.check_size(path)
    return paths


def read(shelf: DatasetFiles, path: Path) -> AdultRows:
    """The rows of a file, without empty lines and the line starting with "|" in adult.test.

    Raises DataError, with the line's number, for a row without 15 columns, a number that is none
    or an unknown label, and for a file without rows or of another MD5 than published.
    """
    content = shelf.read_checked(path).decode("utf-8", errors="replace")
    numbers, words, labels = [], [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.startswith("|"):
            continue
        where = f"{path}, line {number}"
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != _COLUMNS:
            raise shelf.corrupt_file_error(where, f"{len(fields)} columns, expected {_COLUMNS}")
        label = fields[-1].removesuffix(".")
        if label not in LABELS:
            raise shelf.corrupt_file_error(
                where, f"label {label!r}, expected {' or '.join(LABELS)}"
            )
        try:
            values = [float(fields[column]) for column in NUMBERS]
        except ValueError as error:
            raise shelf.corrupt_file_error(where, f"expected a number ({error})") from error
        if not all(map(math.isfinite, values)):
            raise shelf.corrupt_file_error(where, "expected finite numbers")
        numbers.append(values)
        words.append([fields[column] for column in CATEGORIES])
        labels.append(LABELS[label])
    if not labels:
        raise shelf.corrupt_file_error(path, "holds no rows")
    return AdultRows(np.array(numbers), np.array(words), np.array(labels, dtype=np.int64))


@dataclass(frozen=True)
class AdultEncoder:
    """Numbers standardised, categories one-hot, by what was seen in the rows it was fitted to.

    A missing value, `?`, is a category like others. A category not seen in fitting is all zeros.
    """

    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    vocabularies: tuple[npt.NDArray[np.str_], ...]

    @property
    def width(self) -> int:
        """The number of features of a row."""
        return len(self.mean) + sum(map(len, self.vocabularies))

    def encode(self, rows: AdultRows) -> npt.NDArray[np.float64]:
        """The features of rows: first the numbers, then a column for each known category."""
        features = np.zeros((len(rows.labels), self.width))
        start = len(self.mean)
        features[:, :start] = (rows.numbers - self.mean) / self.std
        for column, vocabulary in enumerate(self.vocabularies):
            words = rows.words[:, column]
            place = np.searchsorted(vocabulary, words).clip(max=len(vocabulary) - 1)
            known = np.flatnonzero(vocabulary[place] == words)
            features[known, start + place[known]] = 1.0
            start += len(vocabulary)
        return features


def fit_encoder(rows: AdultRows, chosen: npt.NDArray[np.int64]) -> AdultEncoder:
    """An encoder by the chosen rows alone; a column that never varies is only centred."""
    numbers, words = rows.numbers[chosen], rows.words[chosen]
    std = numbers.std(axis=0)
    return AdultEncoder(
        numbers.mean(axis=0),
        np.where(std > 0, std, 1.0),
        tuple(np.unique(words[:, column]) for column in range(words.shape[1])),
    )

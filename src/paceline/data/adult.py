"""The census dataset "Adult": 6 numeric and 8 categorical columns; label: income above 50K."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data.catalog import DatasetFiles

NUMBERS = (0, 2, 4, 10, 11, 12)
CATEGORIES = (1, 3, 5, 6, 7, 8, 9, 13)
LABELS = {"<=50K": 0, ">50K": 1}

_COLUMNS = len(NUMBERS) + len(CATEGORIES) + 1


@dataclass(frozen=True)
class AdultRows:
    """Rows as stored in a file: numbers, categories as strings, and labels."""

    numbers: npt.NDArray[np.float64]
    words: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int64]


def read(files: DatasetFiles, path: Path) -> AdultRows:
    """Returns the rows of a file, without empty lines and the "|" line of adult.test.

    Raises DataError with the line number for a row without 15 columns, an invalid number or an
    unknown label, and for a file without rows or with another MD5 than published.
    """
    content = files.read_checked(path).decode("utf-8", errors="replace")
    numbers, words, labels = [], [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.startswith("|"):
            continue
        where = f"{path}, line {number}"
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != _COLUMNS:
            raise files.corrupt(where, f"{len(fields)} columns, expected {_COLUMNS}")
        label = fields[-1].removesuffix(".")
        if label not in LABELS:
            raise files.corrupt(where, f"label {label!r}, expected {' or '.join(LABELS)}")
        try:
            values = [float(fields[column]) for column in NUMBERS]
        except ValueError as error:
            raise files.corrupt(where, f"expected a number ({error})") from error
        if not all(map(math.isfinite, values)):
            raise files.corrupt(where, "expected finite numbers")
        numbers.append(values)
        words.append([fields[column] for column in CATEGORIES])
        labels.append(LABELS[label])
    if not labels:
        raise files.corrupt(path, "contains no rows")
    return AdultRows(np.array(numbers), np.array(words), np.array(labels, dtype=np.int64))


class AdultEncoder:
    """Standardizes numbers and one-hot encodes categories, fitted to the chosen rows.

    A constant column is only centered. A missing value, `?`, is a separate category. Unknown
    categories are encoded as zeros.
    """

    def __init__(self, rows: AdultRows, chosen: npt.NDArray[np.int64]) -> None:
        numbers = rows.numbers[chosen]
        std = numbers.std(axis=0)
        self.mean, self.std = numbers.mean(axis=0), np.where(std > 0, std, 1.0)
        self.vocabularies = [np.unique(column) for column in rows.words[chosen].T]
        self.width = len(self.mean) + sum(map(len, self.vocabularies))

    def encode(self, rows: AdultRows) -> npt.NDArray[np.float64]:
        """Returns the features: the numbers, then one column per known category."""
        features = np.zeros((len(rows.labels), self.width))
        start = len(self.mean)
        features[:, :start] = (rows.numbers - self.mean) / self.std
        for words, vocabulary in zip(rows.words.T, self.vocabularies, strict=True):
            index = np.searchsorted(vocabulary, words).clip(max=len(vocabulary) - 1)
            known = np.flatnonzero(vocabulary[index] == words)
            features[known, start + index[known]] = 1.0
            start += len(vocabulary)
        return features

"""Handwritten digits, 1,797 grey images of 8x8, embedded in scikit-learn.

The rows of its file are read directly, because importing `sklearn.datasets` takes ten times as
long as reading them, in every process of a run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError

CLASSES = 10
VALIDATION, TEST = 200, 300


def locate() -> Path:
    """The folder of scikit-learn, which is not imported; raises DataError if it is not there."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits: scikit-learn, which holds this data set, is not installed")
    return Path(spec.origin).parent


def read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The images (1797, 1, 8, 8), pixels 0 to 16, and labels; raises DataError as `locate`."""
    path = locate() / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        return rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # A release that keeps the file elsewhere.

    bunch = load_digits()
    return bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)

"""Handwritten digits: 1,797 gray images of 8x8 pixels, shipped with scikit-learn.

The file is read directly, because importing `sklearn.datasets` takes ten times as long as reading
it, in every process of a run.
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
    """Returns the directory of scikit-learn without importing it. Raises DataError if missing."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits: scikit-learn, which contains this dataset, is not installed")
    return Path(spec.origin).parent


def read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns images (1797, 1, 8, 8), with pixels 0 to 16, and labels. Raises like `locate`."""
    path = locate() / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",", dtype=np.uint8)
        return rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # A release with another file location.

    bunch = load_digits()
    return bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)

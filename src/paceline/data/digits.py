"""Handwritten digits: 1,797 grayscale images of 8x8 pixels, bundled with the package.

`digits.npz` holds the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0), with the values and the order of
scikit-learn's `load_digits`. `digits.license.txt` is its notice.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError

VALIDATION, TEST = 200, 300
FILE = Path(__file__).with_name("digits.npz")


def locate() -> Path:
    """Returns the bundled file; raises DataError if the installation lacks it."""
    if not FILE.is_file():
        raise DataError(f"digits: {FILE} was not found; reinstall Paceline")
    return FILE


def read() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Returns images (1797, 1, 8, 8) with pixels from 0 to 16, and labels. Raises like `locate`."""
    with np.load(locate()) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)

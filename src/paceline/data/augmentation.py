"""Augmentation of training images, keyed by a hash of (seed, epoch, row index).

Color images are shifted by up to 4 pixels in each direction and flipped with probability 1/2. Gray
images are shifted by up to 2 pixels and never flipped, because a flipped digit or letter is another
symbol. Uncovered pixels are black, as in the usual "pad, then crop".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.dataset import FeatureOptions
from paceline.data.hashing import hash_rows
from paceline.errors import UsageError


@dataclass(frozen=True)
class Augmentation:
    """Shifts images by up to `pad` pixels, and flips them horizontally if `flip`."""

    pad: int
    flip: bool

    def apply(
        self,
        images: npt.NDArray[np.uint8],
        indices: npt.NDArray[np.int64],
        *,
        seed: int,
        epoch: int,
    ) -> npt.NDArray[np.uint8]:
        """Returns an augmented copy of images (N, C, H, W); the n-th is keyed by `indices[n]`."""
        count, channels, height, width = images.shape
        pad, span = self.pad, np.uint64(2 * self.pad + 1)
        bits = hash_rows((seed, epoch), indices)
        low, sixteen = np.uint64(0xFFFF), np.uint64(16)
        down = (((bits & low) * span) >> sixteen).astype(np.intp)
        right = ((((bits >> sixteen) & low) * span) >> sixteen).astype(np.intp)
        padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), np.uint8)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        cropped: npt.NDArray[np.uint8] = windows[np.arange(count), :, down, right]
        if self.flip:
            flipped = ((bits >> np.uint64(32)) & np.uint64(1)).astype(np.bool_)
            cropped[flipped] = cropped[flipped, :, :, ::-1]
        return cropped


COLOR = Augmentation(pad=4, flip=True)
GRAY = Augmentation(pad=2, flip=False)


def choose_augmentation(shape: tuple[int, ...], options: FeatureOptions) -> Augmentation | None:
    """Returns the augmentation of rows of this shape. Raises UsageError if they are not images."""
    if not options.augment:
        return None
    if len(shape) != 3:
        raise UsageError(f"augment: rows of shape {'x'.join(map(str, shape))} are not images")
    return COLOR if shape[0] == 3 else GRAY

"""Augmentation of training images, each by a hash of (seed, epoch, row index) alone.

Colour photographs are shifted by up to 4 pixels each way and mirrored half of the time. Grey
images are shifted by up to 2 pixels and never mirrored: a mirrored digit or letter is another
sign, or none. What a shift uncovers is black, as in the usual "pad, then crop".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.hashing import hash_rows


@dataclass(frozen=True)
class Augmentation:
    """How images are changed: shifted by up to `pad` pixels, and mirrored if `flip`."""

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
        """A changed copy of images (N, C, H, W), the n-th keyed by `indices[n]`."""
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
            mirrored = ((bits >> np.uint64(32)) & np.uint64(1)).astype(np.bool_)
            cropped[mirrored] = cropped[mirrored, :, :, ::-1]
        return cropped


COLOUR = Augmentation(pad=4, flip=True)
GREY = Augmentation(pad=2, flip=False)

"""Decodes PNG, JPEG and other encoded images to arrays of pixels, in parallel.

Used by every format that stores images as files: TFRecord, Parquet, Arrow, tar archives, and image
files themselves. Blocks are read ahead of use, and so are the images in them decoded.
"""

import io
import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from paceline.data.background import DaemonThreadPool, results_in_order
from paceline.data.blocks import Array, RowError
from paceline.data.stores import require_extra
from paceline.errors import UsageError

_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


def is_encoded(value: bytes) -> bool:
    """Returns whether bytes begin like a PNG, JPEG, GIF, WebP or BMP file; pixels rarely do."""
    if value.startswith(_MAGIC) or (value[:4] == b"RIFF" and value[8:12] == b"WEBP"):
        return True
    return value[:2] == b"BM" and value[2:6] == len(value).to_bytes(4, "little")


@cache
def _decode_threads() -> tuple[DaemonThreadPool, int]:
    # Pillow decodes without the interpreter lock; large images use all cores of the process.
    count = len(os.sched_getaffinity(0))
    return DaemonThreadPool(count, "paceline-decode"), count


class ImageDecoder:
    """Decodes images of one shape: the given one, to which all are resized, or that of the first.

    A color dataset converts its gray images to RGB. Raises UsageError without Pillow.
    """

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        require_extra("PIL.Image", "images", "decoding images")
        if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3)):
            text = "x".join(map(str, shape))
            raise UsageError(f"shape {text}: that of images must have the form 1x28x28 or 3x32x32")
        self.given = shape
        self.shape = shape

    def decode(self, values: Sequence[bytes | None] | Array) -> Array:
        """Returns (n, C, H, W) bytes. Raises RowError for an image that is unusable."""
        if self.shape is None and len(values):
            self.shape = self._decode(0, values[0]).shape
        images = np.empty((len(values), *(self.shape or ())), np.uint8)

        def fill(rows: range) -> None:
            for row in rows:
                images[row] = self._decode(row, values[row])

        # One task per thread and block: tasks of single small images cost more than they gain.
        pool, threads = _decode_threads()
        parts = [range(first, len(values), threads) for first in range(threads)]
        tasks = (pool.submit(partial(fill, part)) for part in parts)
        for _ in results_in_order(tasks, threads):
            pass
        return images

    def _decode(self, row: int, value: bytes | None) -> Array:
        from PIL import Image

        if value is None:
            raise RowError("no image (null)", row)
        try:
            with Image.open(io.BytesIO(value)) as opened:
                pixels = self._convert(opened)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            what = "a damaged image" if is_encoded(value) else "a value that is not an image"
            raise RowError(f"{what} ({_reason(error, value)})", row) from None
        image = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)
        if self.shape is not None and image.shape != self.shape:
            found, others = ("x".join(map(str, shape)) for shape in (image.shape, self.shape))
            raise RowError(
                f"an image of {found}, others have {others}; use --shape to resize all images", row
            )
        return image

    def _convert(self, opened: Any) -> Array:
        if opened.mode[0] in "IF":
            raise ValueError(f"pixels of more than 8 bits, mode {opened.mode}, are not supported")
        if self.shape is not None and (self.given is not None or self.shape[0] == 3):
            gray = self.shape[0] == 1
        else:
            gray = opened.mode in ("1", "L", "LA")
        mode = "L" if gray else "RGB"
        converted = opened if opened.mode == mode else opened.convert(mode)
        if self.given is not None and converted.size != (self.given[2], self.given[1]):
            converted = converted.resize((self.given[2], self.given[1]))
        return np.asarray(converted)


def _reason(error: Exception, value: bytes) -> str:
    # Pillow's own text contains the address of a buffer, which differs in every process.
    if "cannot identify" in str(error):
        return f"{len(value):,} bytes that begin with {value[:4].hex() or 'nothing'}"
    return str(error)

"""Tar archives in the format of WebDataset: the files of a sample are adjacent and share a name.

`0001.png` and `0001.cls` are one sample. The features are an image, by its suffix; the label is a
number in text (`cls`), or `label` of a `json` file. Archives are read in blocks of whole samples.
"""

import io
import json
import tarfile
from collections.abc import Iterator

import numpy as np

from paceline.data.arrow_sources import CachedRangeFile
from paceline.data.blocks import BlockSource, ColumnSelection, DataBlock, RowError, Rows
from paceline.data.encoded_images import ImageDecoder
from paceline.data.stores import StoredFile

BLOCK_BYTES = 4 << 20
READ_BYTES = 32 << 20
IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "gif")
LABELS = ("cls", "json")

Member = tuple[str, str, int, int, int]
"""Sample, suffix, and offsets of the header, the contents and the end of the contents."""


class WebDatasetSource(BlockSource):
    """Tar archives; opening them scans their headers."""

    decodes_images = True

    def __init__(self, files: tuple[StoredFile, ...], selection: ColumnSelection) -> None:
        super().__init__(files, selection)
        self._decoder = ImageDecoder(selection.shape)
        self._find_blocks(self._find, "sample")

    def _find(self, file: StoredFile, number: int) -> list[DataBlock]:
        buffered = io.BufferedReader(CachedRangeFile(file, 0, b""), READ_BYTES)
        blocks: list[DataBlock] = []
        begin = end = rows = 0
        sample: str | None = None
        for name, _, header, _, stop in _members(file, buffered):
            if name != sample and rows and header - begin >= BLOCK_BYTES:
                blocks.append(DataBlock(number, begin, rows, end - begin))
                begin, rows = header, 0
            rows += name != sample
            sample = name
            end = -(-stop // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if file.size < end + 2 * tarfile.BLOCKSIZE:
            raise file.error("is truncated: two empty blocks at its end are missing")
        return [*blocks, DataBlock(number, begin, rows, end - begin)] if rows else blocks

    def read(self, block: DataBlock) -> Rows:
        file = self.files[block.file]
        content = file.read(block.offset, block.offset + block.size)
        samples: dict[str, dict[str, bytes]] = {}
        for name, suffix, _, start, stop in _members(file, io.BytesIO(content)):
            samples.setdefault(name, {})[suffix] = content[start:stop]
        wanted = self.selection.features or IMAGES
        images: list[bytes | None] = []
        labels = np.empty(len(samples), np.int64)
        for row, (name, parts) in enumerate(samples.items()):
            images.append(next((parts[suffix] for suffix in wanted if suffix in parts), None))
            labels[row] = self._label(file, name, parts)
        try:
            return self._decoder.decode(images), labels
        except RowError as error:
            name = list(samples)[error.row or 0]
            raise file.error(f"contains {error}", f", sample {name}") from None

    def _label(self, file: StoredFile, name: str, parts: dict[str, bytes]) -> int:
        suffix = self.selection.label or next((s for s in LABELS if s in parts), LABELS[0])
        try:
            text = parts[suffix]
            return int(json.loads(text)["label"]) if suffix == "json" else int(text)
        except (KeyError, TypeError, ValueError):
            what = f"has no label: {suffix} is missing, or is not a number"
            raise file.error(f"{what}; use --label", f", sample {name}") from None


def _members(file: StoredFile, stream: io.BufferedIOBase) -> Iterator[Member]:
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                if member.isfile():
                    folder, _, last = member.name.rpartition("/")
                    name, _, suffix = last.lower().partition(".")
                    start = member.offset_data
                    yield (
                        f"{folder}/{name}" if folder else name,
                        suffix.lower(),
                        member.offset,
                        start,
                        start + member.size,
                    )
    except tarfile.TarError as error:
        raise file.error(f"is truncated, or not a tar archive ({error})") from None

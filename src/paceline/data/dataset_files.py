"""Directories that are searched for a dataset, and checks of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.data import catalog
from paceline.errors import DataError


@dataclass(frozen=True)
class DatasetFiles:
    """A dataset, its base directory and the directories that may contain its files."""

    entry: catalog.DatasetInfo
    base: Path
    folders: tuple[Path, ...]

    def find(self, *names: str) -> Path | None:
        """Returns the first of these files that exists; directories take precedence over names."""
        for folder in self.folders:
            for name in names:
                if (folder / name).is_file():
                    return folder / name
        return None

    def require(self, *names: str) -> Path:
        """Like `find`, but raises DataError if none exists, or for another size than published."""
        path = self.find(*names)
        if path is None:
            raise self.missing(names[0])
        self.check_size(path)
        return path

    def missing(self, name: str) -> DataError:
        """Returns the error for a file that is in none of the directories."""
        searched = ", ".join(str(folder) for folder in self.folders)
        if not self.base.is_dir():
            searched += f"; {self.base} is not a folder"
        return DataError(
            f"{self.entry.name}: file {name} not found (looked in {searched}); "
            f"published at {self.entry.homepage}"
        )

    def corrupt(self, where: Path | str, what: str) -> DataError:
        """Returns the error for a file with invalid contents."""
        # Error text of a library, quoted in `what`, may have several lines.
        return DataError(f"{self.entry.name}: {where}: {' '.join(what.split())}")

    def check_size(self, path: Path) -> int:
        """Returns the size of a file. Raises DataError if it is empty or not the published size."""
        with self._reading(path):
            size = path.stat().st_size
        self._compare_size(path, path.name, size)
        return size

    def read_head(self, path: Path, count: int) -> bytes:
        """Returns the first bytes of a file. Raises DataError if it cannot be read."""
        with self._reading(path), path.open("rb") as stream:
            return stream.read(count)

    def read_checked(self, path: Path) -> bytes:
        """Reads a file and checks its size and MD5 against the published ones, if known."""
        self.check_size(path)
        with self._reading(path):
            content = path.read_bytes()
        self.check_content(path, path.name, content)
        return content

    def check_content(self, where: Path | str, name: str, content: bytes) -> None:
        """Raises DataError if `content` is not that of the published file `name`."""
        published = self._compare_size(where, name, len(content))
        if published is not None and published.md5 is not None:
            found = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if found != published.md5:
                raise self._unpublished(where, f"MD5 is {found}, expected {published.md5}")

    def _compare_size(
        self, where: Path | str, name: str, size: int
    ) -> catalog.PublishedFile | None:
        if size == 0:
            raise self.corrupt(where, "is empty")
        published = catalog.PUBLISHED.get((self.entry.name, name))
        if published is not None and size != published.size:
            raise self._unpublished(where, f"has {size:,} bytes, expected {published.size:,}")
        return published

    def _unpublished(self, where: Path | str, what: str) -> DataError:
        remedy = f"download it again from {self.entry.homepage}"
        return self.corrupt(where, f"{what}: not the published file; {remedy}")

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.corrupt(path, f"cannot be read ({error.strerror})") from error


def find_dataset_files(name: str, data_dir: Path | None) -> DatasetFiles:
    """Returns the directories to search: those with the dataset's name in the base, then the base.

    The base is `data_dir`, `$PACELINE_DATA`, or `~/.cache/paceline/data`. Never fails: a missing
    directory is reported with the first missing file.
    """
    base = Path(
        data_dir or os.environ.get("PACELINE_DATA") or os.path.expanduser("~/.cache/paceline/data")
    )
    try:
        named = [child for child in base.iterdir() if _same_name(child.name, name)]
    except OSError:
        named = []
    folders = sorted(child for child in named if child.is_dir()) or [base / name]
    return DatasetFiles(catalog.ENTRIES[name], base, (*folders, base))


def _same_name(one: str, other: str) -> bool:
    return catalog.normalize_name(one) == catalog.normalize_name(other)

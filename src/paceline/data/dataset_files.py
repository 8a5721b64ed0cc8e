"""Directories that are searched for a dataset, and checks of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
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
        """Like `find`, but raises a DataError that names the first file if none exists."""
        path = self.find(*names)
        if path is None:
            raise self.missing_file_error(names[0])
        return path

    def missing_file_error(self, name: str) -> DataError:
        """Returns the error for a file that is in none of the directories."""
        searched = ", ".join(str(folder) for folder in self.folders)
        if not self.base.is_dir():
            searched += f"; {self.base} is not a folder"
        return DataError(
            f"{self.entry.name}: file {name} not found (looked in {searched}); "
            f"published at {self.entry.homepage}"
        )

    def corrupt_file_error(self, where: Path | str, what: str) -> DataError:
        """Returns the error for a file with invalid contents."""
        # Error text of a library, quoted in `what`, may have several lines.
        return DataError(f"{self.entry.name}: {where}: {' '.join(what.split())}")

    def published(self, name: str) -> catalog.PublishedFile | None:
        """Returns size and checksum of the published file of this name, if there is one."""
        return catalog.PUBLISHED.get((self.entry.name, name))

    def check_size(self, path: Path) -> int:
        """Returns the size of a file. Raises DataError if it is empty or not the published size."""
        try:
            size = path.stat().st_size
        except OSError as error:
            raise self.corrupt_file_error(path, f"cannot be read ({error.strerror})") from error
        self._compare_size(path, path.name, size)
        return size

    def read_head(self, path: Path, count: int) -> bytes:
        """Returns the first bytes of a file. Raises DataError if it cannot be read."""
        try:
            with path.open("rb") as stream:
                return stream.read(count)
        except OSError as error:
            raise self.corrupt_file_error(path, f"cannot be read ({error.strerror})") from error

    def read_checked(self, path: Path) -> bytes:
        """Reads a file and checks its size and MD5 against the published ones, if known."""
        self.check_size(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self.corrupt_file_error(path, f"cannot be read ({error.strerror})") from error
        self.check_content(path, path.name, content)
        return content

    def check_content(self, where: Path | str, name: str, content: bytes) -> None:
        """Raises DataError if `content` is not that of the published file `name`."""
        self._compare_size(where, name, len(content))
        published = self.published(name)
        if published is None or published.md5 is None:
            return
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != published.md5:
            raise self.corrupt_file_error(
                where,
                f"MD5 is {found}, expected {published.md5}: not the published file; "
                f"download it again from {self.entry.homepage}",
            )

    def _compare_size(self, where: Path | str, name: str, size: int) -> None:
        if size == 0:
            raise self.corrupt_file_error(where, "is empty")
        published = self.published(name)
        if published is not None and size != published.size:
            raise self.corrupt_file_error(
                where,
                f"has {size:,} bytes, expected {published.size:,}: not the published file; "
                f"download it again from {self.entry.homepage}",
            )


def find_dataset_files(name: str, data_dir: Path | None) -> DatasetFiles:
    """Returns the directories to search: those with the dataset's name in the base, then the base.

    The base is `data_dir`, `$PACELINE_DATA`, or `~/.cache/paceline/data`. Never fails: a missing
    directory is reported with the first missing file.
    """
    base = Path(data_dir) if data_dir is not None else _default_base()
    named = sorted(_subfolders_named(base, name)) or [base / name]
    return DatasetFiles(catalog.ENTRIES[name], base, (*named, base))


def _default_base() -> Path:
    folder = os.environ.get("PACELINE_DATA")
    return Path(folder) if folder else Path(os.path.expanduser("~/.cache/paceline/data"))


def _subfolders_named(base: Path, name: str) -> Iterator[Path]:
    try:
        for child in base.iterdir():
            if (
                catalog.normalize_name(child.name) == catalog.normalize_name(name)
                and child.is_dir()
            ):
                yield child
    except OSError:
        return

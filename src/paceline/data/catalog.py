"""Built-in datasets: names, publishers, directories, and sizes and checksums of published files.

A file with the name of a published file must be identical to it. Its size is checked before a run
starts and its MD5 when it is read. A subset needs a name that marks it as such
(`train-images-first7011-idx3-ubyte.gz`, see `idx`), so that it is never mistaken for the complete
file; the dataset then carries a note. Recompressed archives (`cifar-10-binary.tar.xz`) are
identified by the files inside them.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.data.dataset import Kind, PixelScale
from paceline.errors import DataError, UsageError, suggest_name


@dataclass(frozen=True)
class DatasetInfo:
    """Canonical name of a dataset, the kind of its rows, and where it is published."""

    name: str
    kind: Kind
    homepage: str


@dataclass(frozen=True)
class PublishedFile:
    """Size in bytes and MD5 of a published file; None if the checksum is unknown."""

    size: int
    md5: str | None


ENTRIES: dict[str, DatasetInfo] = {
    entry.name: entry
    for entry in (
        DatasetInfo("digits", "image", "archive.ics.uci.edu/dataset/80 (part of the package)"),
        DatasetInfo("mnist", "image", "yann.lecun.com/exdb/mnist"),
        DatasetInfo("fashion-mnist", "image", "github.com/zalandoresearch/fashion-mnist"),
        DatasetInfo("kmnist", "image", "codh.rois.ac.jp/kmnist"),
        DatasetInfo("cifar10", "image", "www.cs.toronto.edu/~kriz/cifar.html"),
        DatasetInfo("adult", "table", "archive.ics.uci.edu/dataset/2/adult"),
        DatasetInfo(
            "tinyshakespeare", "text", "github.com/karpathy/char-rnn (data/tinyshakespeare)"
        ),
    )
}

# Mean and standard deviation of the training pixels per channel, as commonly published. Digits has
# no published values: its pixels are only scaled to 0..1.
PIXELS: dict[str, PixelScale] = {
    "digits": (16.0, (0.0,), (1.0,)),
    "mnist": (255.0, (0.1307,), (0.3081,)),
    "fashion-mnist": (255.0, (0.2860,), (0.3530,)),
    "kmnist": (255.0, (0.1918,), (0.3483,)),
    "cifar10": (255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}

# Dataset, file, bytes and MD5. Those of unpacked IDX files (no .gz) are of the contents of the
# published archives. CIFAR's archive has no MD5: those of its six files are more specific.
_PUBLISHED = """
mnist           train-images-idx3-ubyte.gz   9912422 f68b3c2dcbeaaa9fbdd348bbdeb94873
mnist           train-labels-idx1-ubyte.gz     28881 d53e105ee54ea40749a09fcbcd1e9432
mnist           t10k-images-idx3-ubyte.gz    1648877 9fb629c4189551a2d022fa330f9573f3
mnist           t10k-labels-idx1-ubyte.gz       4542 ec29112dd5afa0611ce80d1b7f02629c
mnist           train-images-idx3-ubyte     47040016 6bbc9ace898e44ae57da46a324031adb
mnist           train-labels-idx1-ubyte        60008 a25bea736e30d166cdddb491f175f624
mnist           t10k-images-idx3-ubyte       7840016 2646ac647ad5339dbf082846283269ea
mnist           t10k-labels-idx1-ubyte         10008 27ae3e4e09519cfbb04c329615203637
fashion-mnist   train-images-idx3-ubyte.gz  26421880 8d4fb7e6c68d591d4c3dfef9ec88bf0d
fashion-mnist   train-labels-idx1-ubyte.gz     29515 25c81989df183df01b3e8a0aad5dffbe
fashion-mnist   t10k-images-idx3-ubyte.gz    4422102 bef4ecab320f06d8554ea6380940ec79
fashion-mnist   t10k-labels-idx1-ubyte.gz       5148 bb300cfdad3c16e7a12a480ee83cd310
fashion-mnist   train-images-idx3-ubyte     47040016 f4a8712d7a061bf5bd6d2ca38dc4d50a
fashion-mnist   train-labels-idx1-ubyte        60008 9018921c3c673c538a1fc5bad174d6f9
fashion-mnist   t10k-images-idx3-ubyte       7840016 8181f5470baa50b63fa0f6fddb340f0a
fashion-mnist   t10k-labels-idx1-ubyte         10008 15d484375f8d13e6eb1aabb0c3f46965
kmnist          train-images-idx3-ubyte.gz  18165135 bdb82020997e1d708af4cf47b453dcf7
kmnist          train-labels-idx1-ubyte.gz     29497 e144d726b3acfaa3e44228e80efcd344
kmnist          t10k-images-idx3-ubyte.gz    3041136 5c965bf0a639b31b8f53240b1b52f4d7
kmnist          t10k-labels-idx1-ubyte.gz       5120 7320c461ea6c1c855c0b718fb2a4b134
kmnist          train-images-idx3-ubyte     47040016 -
kmnist          train-labels-idx1-ubyte        60008 949e75301f8813e0dc5800dcc320fc52
kmnist          t10k-images-idx3-ubyte       7840016 bf305b8cd328700fbc17f5acbc2856d2
kmnist          t10k-labels-idx1-ubyte         10008 9f55f451c0988b028eccdf7d5cc265ab
cifar10         cifar-10-binary.tar.gz     170052171 -
cifar10         data_batch_1.bin            30730000 5dd7e06a14cb22eb9f671a540d1b7c25
cifar10         data_batch_2.bin            30730000 5ea93a67294ea407fff1d09f752e9692
cifar10         data_batch_3.bin            30730000 942cd6a4bcdd0dd3c604fbe906cb4421
cifar10         data_batch_4.bin            30730000 ae636b3ba5c66a11e91e8cb52e771fcb
cifar10         data_batch_5.bin            30730000 53f37980c15c3d472c316c40844f3f0d
cifar10         test_batch.bin              30730000 803d5f7f4d78ea53de84dbe85f74fb6d
adult           adult.data                   3974305 5d7c39d7b8804f071cdd1f2a7c460872
adult           adult.test                   2003153 35238206dfdf7f1fe215bbb874adecdc
tinyshakespeare input.txt                    1115394 6fb458f1232090904fb40fe944165e91
"""
PUBLISHED = {
    (data_set, file): PublishedFile(int(size), None if md5 == "-" else md5)
    for data_set, file, size, md5 in map(str.split, _PUBLISHED.strip().splitlines())
}


def dataset_names() -> tuple[str, ...]:
    """Returns the canonical names of all datasets, sorted."""
    return tuple(sorted(ENTRIES))


def normalize_name(name: str) -> str:
    """Removes case, hyphens, underscores and spaces: `CIFAR-10` and `cifar10` are equal."""
    return re.sub(r"[-_\s]", "", name.lower())


def check_name(name: str) -> str:
    """Returns the canonical name of a dataset. Raises UsageError if it is unknown."""
    for known in ENTRIES:
        if normalize_name(known) == normalize_name(name):
            return known
    raise UsageError(f"unknown dataset {name!r}; {suggest_name(name, ENTRIES)}")


def kind(name: str) -> Kind:
    """Returns "image", "table" or "text". Raises UsageError for an unknown name."""
    return ENTRIES[check_name(name)].kind


@dataclass(frozen=True)
class DatasetFiles:
    """A dataset, its base directory and the directories that may contain its files."""

    entry: DatasetInfo
    base: Path
    folders: tuple[Path, ...]

    def find(self, *names: str) -> Path | None:
        """Returns the first of these files that exists; directories take precedence over names."""
        paths = (folder / name for folder in self.folders for name in names)
        return next((path for path in paths if path.is_file()), None)

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
            f"published at {self.entry.homepage}; run `paceline data get {self.entry.name}`"
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
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        self.check_digest(where, name, len(content), digest)

    def check_digest(self, where: Path | str, name: str, size: int, md5: str) -> None:
        """Raises DataError if size and MD5 are not those of the published file `name`."""
        published = self._compare_size(where, name, size)
        if published is not None and published.md5 not in (None, md5):
            raise self._unpublished(where, f"MD5 is {md5}, expected {published.md5}")

    def _compare_size(self, where: Path | str, name: str, size: int) -> PublishedFile | None:
        if size == 0:
            raise self.corrupt(where, "is empty")
        published = PUBLISHED.get((self.entry.name, name))
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
    folders: list[Path] = []
    with suppress(OSError):
        named = (c for c in base.iterdir() if normalize_name(c.name) == normalize_name(name))
        folders = sorted(child for child in named if child.is_dir())
    return DatasetFiles(ENTRIES[name], base, (*(folders or [base / name]), base))

"""`paceline data get` and `paceline data list`, against a local HTTP server."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import resource
import shutil
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from paceline.cli.main import run as run_main
from paceline.data import catalog, download

ROWS = {"train": 30, "t10k": 12}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """Serves small IDX files, which the table of published files contains instead of MNIST's."""
    folder = tmp_path / "served"
    folder.mkdir()
    published = dict(catalog.PUBLISHED)
    for part, count in ROWS.items():
        pixels = np.zeros((count, 28, 28), np.uint8)
        contents = {
            f"{part}-images-idx3-ubyte.gz": struct.pack(">4I", 2051, count, 28, 28)
            + pixels.tobytes(),
            f"{part}-labels-idx1-ubyte.gz": struct.pack(">2I", 2049, count)
            + bytes(n % 10 for n in range(count)),
        }
        for name, content in contents.items():
            packed = gzip.compress(content, mtime=0)
            (folder / name).write_bytes(packed)
            md5 = hashlib.md5(packed, usedforsecurity=False).hexdigest()
            published["mnist", name] = catalog.PublishedFile(len(packed), md5)
    for module in (catalog, download):
        monkeypatch.setattr(module, "PUBLISHED", published)
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", folder
        listening.shutdown()
        thread.join(10)


def state_of(name: str, data_dir: Path) -> tuple[str, str]:
    (found,) = [each for each in download.list_datasets(data_dir) if each.name == name]
    return found.state, found.note


def test_get_downloads_verifies_and_skips(
    server: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    data = tmp_path / "data"
    assert state_of("mnist", data)[0] == "missing"
    get = ["data", "get", "MNIST", "--from", url, "--data-dir", str(data)]
    assert run_main(get) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.endswith(": downloaded and verified") for line in lines)
    assert state_of("mnist", data) == ("complete", "")
    (data / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    assert state_of("mnist", data)[0] == "damaged"
    assert run_main(get) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(": already present") for line in lines) == 3
    (data / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    state, note = state_of("mnist", data)
    assert state == "partial"
    assert "t10k-labels-idx1-ubyte.gz not found" in note
    assert not list((data / "mnist").glob("*.partial"))
    assert run_main(["data", "list", "--data-dir", str(data)]) == 0
    shown = capsys.readouterr().out
    assert "partial" in shown
    assert "bundled" in shown


def test_a_directory_serves_as_well(server: tuple[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    get = ["data", "get", "mnist", "--from", str(server[1]), "--data-dir", str(data)]
    assert run_main(get) == 0
    assert state_of("mnist", data)[0] == "complete"


@pytest.mark.parametrize("damage", ["other", "short", "absent"])
def test_a_wrong_file_is_never_kept(
    server: tuple[str, Path], tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = server
    served = folder / "train-images-idx3-ubyte.gz"
    content = served.read_bytes()
    if damage == "absent":
        served.unlink()
    else:
        served.write_bytes(content[:-1] + b"x" if damage == "other" else content[:-1])
    data = tmp_path / "data"
    assert run_main(["data", "get", "mnist", "--from", url, "--data-dir", str(data)]) != 0
    expected = {"other": "MD5 is", "short": "bytes, expected", "absent": "answered 404"}[damage]
    assert f"{url}/train-images-idx3-ubyte.gz: " in (error := capsys.readouterr().err)
    assert expected in error
    assert list((data / "mnist").iterdir()) == []


class RangeHandler(QuietHandler):
    """Sends parts on request, and drops the first `drops` connections for images in the middle."""

    drops = 0
    asked: ClassVar[list[str | None]]
    supports_ranges = True

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        kind, wanted = type(self), self.headers.get("Range")
        start = 0
        if "train-images" in self.path:
            kind.asked.append(wanted)
        if wanted is not None and kind.supports_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content)
        if "train-images" in self.path and kind.drops > 0:
            kind.drops -= 1
            stop = start + (len(content) - start) // 2
        self.wfile.write(content[start:stop])


@pytest.fixture
def ranges(server: tuple[str, Path]) -> Iterator[tuple[str, type[RangeHandler]]]:
    class Handler(RangeHandler):
        asked: ClassVar[list[str | None]] = []

    handler = partial(Handler, directory=str(server[1]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", Handler
        listening.shutdown()
        thread.join(10)


def get_from(url: str, data: Path) -> int:
    return run_main(["data", "get", "mnist", "--from", url, "--data-dir", str(data)])


IMAGES = "train-images-idx3-ubyte.gz"


@pytest.mark.parametrize("supported", [True, False], ids=["ranges", "no ranges"])
def test_a_dropped_connection_is_continued(
    ranges: tuple[str, type[RangeHandler]], tmp_path: Path, supported: bool
) -> None:
    url, handler = ranges
    handler.drops, handler.supports_ranges = 2, supported
    size = catalog.PUBLISHED["mnist", IMAGES].size
    assert get_from(url, tmp_path / "data") == 0
    first = size // 2
    second = first + (size - first) // 2 if supported else first
    assert handler.asked == [None, f"bytes={first}-", f"bytes={second}-"]
    assert state_of("mnist", tmp_path / "data") == ("complete", "")


def test_the_next_command_continues_an_interrupted_download(
    ranges: tuple[str, type[RangeHandler]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = ranges
    data, size = tmp_path / "data", catalog.PUBLISHED["mnist", IMAGES].size
    handler.drops = 3
    assert get_from(url, data) == 2
    error = capsys.readouterr().err
    assert "the connection ended after" in error
    assert "run the command again to continue" in error
    (left,) = (data / "mnist").glob(".*.partial")
    kept = left.stat().st_size
    assert 0 < kept < size
    assert state_of("mnist", data)[0] == "missing"
    assert get_from(url, data) == 0
    assert handler.asked[3:] == [f"bytes={kept}-"]
    assert not left.exists()


@pytest.mark.parametrize("length", [7, 10**6])
def test_what_another_file_left_is_not_kept(
    ranges: tuple[str, type[RangeHandler]], tmp_path: Path, length: int
) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    (folder / f".{IMAGES}.partial").write_bytes(b"x" * length)
    assert get_from(ranges[0], tmp_path / "data") == 0
    assert state_of("mnist", tmp_path / "data") == ("complete", "")


def test_a_full_disk_is_named_before_and_during_the_download(
    server: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: free)
        assert get_from(server[0], tmp_path / "data") == 2
    error = capsys.readouterr().err
    assert "but only 10 are free; choose another directory with --data-dir" in error
    assert len(error.splitlines()) == 1
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a disk that fills up: a write fails, for Python ignores SIGXFSZ.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        assert get_from(server[0], tmp_path / "data") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert "cannot be written (File too large); choose another directory" in error
    assert get_from(server[0], tmp_path / "data") == 0


def test_two_downloads_of_one_file_do_not_mix(
    server: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    with (folder / f".{IMAGES}.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert get_from(server[0], tmp_path / "data") == 2
    assert "another process is downloading it" in capsys.readouterr().err


def test_nothing_to_download_and_every_other_dataset_has_a_source() -> None:
    assert run_main(["data", "get", "digits"]) == 2
    assert set(download.SOURCES) == set(catalog.ENTRIES) - {"digits"}
    for name in download.SOURCES:
        assert all((name, file) in catalog.PUBLISHED for file in download.published_files(name))

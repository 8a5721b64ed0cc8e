"""`paceline data get` and `paceline data list`, against a local HTTP server."""

from __future__ import annotations

import gzip
import hashlib
import struct
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def test_nothing_to_download_and_every_other_dataset_has_a_source() -> None:
    assert run_main(["data", "get", "digits"]) == 2
    assert set(download.SOURCES) == set(catalog.ENTRIES) - {"digits"}
    for name in download.SOURCES:
        assert all((name, file) in catalog.PUBLISHED for file in download.published_files(name))

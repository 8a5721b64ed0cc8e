"""MNIST as the real tensorflow_datasets package writes it trains with its directory alone.

The published builder runs in a separate environment, which this module creates unless
PACELINE_TFDS_PYTHON names one. It reads the published files instead of downloading them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import object_stores
from conftest import RunCli, read_result
from object_stores import NotHere, Store
from paceline.data import stores
from paceline.data.named_datasets import locate
from paceline.errors import DataError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
ENVIRONMENT_S, WRITE_S = 900, 600


@pytest.fixture(scope="module")
def published() -> Path:
    """Returns the directory of MNIST's published files."""
    folder = os.environ.get("PACELINE_TEST_DATA")
    try:
        return locate("mnist", Path(folder) if folder else None)[0].parent
    except DataError as error:
        pytest.skip(f"MNIST as TensorFlow Datasets writes it is not tested: {error}")


@pytest.fixture(scope="module")
def tfds_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Python that has tensorflow-datasets and TensorFlow."""
    given = os.environ.get("PACELINE_TFDS_PYTHON")
    if given is not None:
        return Path(given)
    folder = tmp_path_factory.mktemp("tfds") / "environment"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=ENVIRONMENT_S)
    packages = ["tensorflow-cpu", "tensorflow-datasets", "importlib_resources"]
    install = ["-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    command = [folder / "bin" / "python", *install, *packages]
    subprocess.run(command, check=True, timeout=ENVIRONMENT_S)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def written(published: Path, tfds_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns DATA_DIR/mnist, as `tfds.load("mnist", data_dir=DATA_DIR)` leaves it."""
    folder = tmp_path_factory.mktemp("written")
    script = ROOT / "tests" / "scripts" / "write_tfds_mnist.py"
    subprocess.run([tfds_python, script, published, folder], check=True, timeout=WRITE_S)
    return folder / "mnist"


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    try:
        with object_stores.run_hdfs(tmp_path / "hdfs") as store:
            for name, value in store.environment.items():
                monkeypatch.setenv(name, value)
            stores._open_store.cache_clear()
            yield store
    except NotHere as error:
        pytest.skip(f"data on HDFS is not tested: {error}")
    finally:
        stores._open_store.cache_clear()


def check_run(run_cli: RunCli, url: str, out: Path) -> None:
    done = run_cli("train", "--data", url, "--out", out, timeout=600)
    assert done.code == 0, done.stderr
    found = read_result(out)
    assert (found["status"], found["samples"]) == ("done", 10 * 54_000)
    assert found["test_acc"] > 0.95


def test_it_trains_from_disk_with_its_directory_alone(
    written: Path, run_process: RunCli, tmp_path: Path
) -> None:
    info = json.loads((written / "3.0.1" / "dataset_info.json").read_text())
    assert info["name"] == "mnist"
    check_run(run_process, str(written), tmp_path / "run")


def test_it_trains_from_hdfs_with_its_url_alone(
    written: Path, hdfs: Store, run_process: RunCli, tmp_path: Path
) -> None:
    for file in sorted((written / "3.0.1").iterdir()):
        stores.write_bytes(f"{hdfs.url}/sets/mnist/3.0.1/{file.name}", file.read_bytes())
    check_run(run_process, f"{hdfs.url}/sets/mnist", tmp_path / "run")

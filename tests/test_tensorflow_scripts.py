"""Scripts written for TensorFlow: without it under the stub, and with it next to the real thing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import RunCli, read_result
from paceline.data import digits
from paceline.worker.script import find_package, make_tf_config

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras is not installed (pip install 'paceline[keras]')")

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "scripts"
RUN_S = 240.0
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
PEER = ROOT / ".peers" / "tensorflow" / "bin" / "python"
without = pytest.mark.skipif(HAS_TENSORFLOW, reason="TensorFlow is installed: no stub is used")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arrays that examples/scripts/write_data.py writes, without the files of TensorFlow."""
    folder = tmp_path_factory.mktemp("data")
    images, labels = digits.read()
    images = (images[:, 0] * (255 / 16)).astype("uint8")
    np.savez(
        folder / "digits.npz",
        x_train=images[:1400],
        y_train=labels[:1400],
        x_test=images[1400:],
        y_test=labels[1400:],
    )
    return folder


def accuracies(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"\] accuracy ([0-9.]+)", text)]


@without
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "strategy", "batch"),
    [
        ("cluster_coordinator", "ps", 64),
        pytest.param("mirrored", "allreduce", 64, marks=pytest.mark.slow),
        pytest.param("manual_tf_config", "ps", 64, marks=pytest.mark.slow),
        pytest.param("datasets_from_function", "allreduce", 64, marks=pytest.mark.slow),
        pytest.param("central_storage", "ps(sync=bsp)", 64, marks=pytest.mark.slow),
        pytest.param("unseeded_split", "allreduce", 64, marks=pytest.mark.slow),
    ],
)
def test_scripts_over_arrays_need_no_tensorflow(
    run_cli: RunCli, tmp_path: Path, data: Path, script: str, strategy: str, batch: int
) -> None:
    out = tmp_path / "run"
    finished = run_cli(
        *("launch", SCRIPTS / f"{script}.py", "--strategy", strategy, "--workers", 2),
        *("--out", out, "--", data, 0),
        timeout=RUN_S,
    )
    assert finished.code == 0, finished.stderr
    assert f"fit: global batch {batch} on 2 workers, about {batch // 2} per worker" in (
        finished.stderr
    )
    first, second = accuracies(finished.stderr)
    assert first == second > 0.8
    assert read_result(out)["status"] == "done"


def run_script(script: Path, *args: object, python: str = sys.executable) -> str:
    """Runs a script as a worker does, up to an error; returns its output and the message."""
    code = (
        "import sys\n"
        "from paceline.errors import UsageError\n"
        "from paceline.worker.script import run_script\n"
        "try:\n"
        "    run_script(sys.argv[1], sys.argv[2:], 2)\n"
        "except UsageError as error:\n"
        "    print('error', error)\n"
    )
    command = [python, "-c", code, script, *args]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=RUN_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@without
@pytest.mark.parametrize(
    ("script", "line", "message"),
    [
        ("tfds_one_machine", "import tensorflow_datasets as tfds", "tensorflow_datasets is not"),
        ("records_by_file", '"image": tf.io.FixedLenFeature([], tf.string),', "tf.io is not"),
    ],
)
def test_errors_name_the_line_that_needs_the_extra(
    data: Path, script: str, line: str, message: str
) -> None:
    path = SCRIPTS / f"{script}.py"
    number = [text.strip() for text in path.read_text().splitlines()].index(line) + 1
    error = run_script(path, data, 0)
    assert error.startswith(f"error {path.name}:{number}: `{line}`: {message}")
    assert "pip install 'paceline[tensorflow]'" in error


def test_tpus_are_not_supported() -> None:
    error = run_script(SCRIPTS / "tpu.py")
    assert error.startswith("error tpu.py:5: `resolver = tf.distribute.cluster_resolver.TPU")
    assert "TPUs are not supported; use tf.distribute.MultiWorkerMirroredStrategy()" in error


def test_unsupported_parts_are_reported_by_line(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import tensorflow as tf\n"
        "strategy = tf.distribute.get_strategy()\n"
        "try:\n"
        "    tf.distribute.TPUStrategy()\n"
        "except ValueError:\n"
        "    print('no TPU')\n"
        "def step():\n"
        "    strategy.run(print)\n"
        "step()\n"
    )
    first, error = run_script(script).splitlines()
    assert first == "no TPU"
    assert error.startswith("error loop.py:8: `strategy.run(print)`: strategy.run() of a custom")
    assert "use model.compile() and model.fit()" in error


def test_packages_are_found_by_file() -> None:
    folder = "/envs/tensorflow/lib/python3.11/site-packages"
    assert find_package(f"{folder}/keras/src/trainer.py") == "keras"
    assert find_package("/projects/tensorflow/train.py") == ""


def test_unseeded_generators_agree(tmp_path: Path) -> None:
    script = tmp_path / "draw.py"
    script.write_text(
        "import random\nimport numpy as np\nimport torch\n"
        "draw = np.random.default_rng\n"
        "print(random.random(), np.random.rand(), torch.rand(1).item())\n"
        "print(draw().random(), draw().random(), draw(3).random())\n"
    )
    drawn = run_script(script)
    assert drawn == run_script(script)
    values = drawn.split()
    assert values[-3] != values[-2]
    assert float(values[-1]) == np.random.default_rng(3).random()


def test_tf_config_counts_the_workers() -> None:
    assert make_tf_config(3).count("localhost:") == 3


def find_tensorflow() -> str:
    """Returns an interpreter with TensorFlow and this package."""
    if HAS_TENSORFLOW:
        return sys.executable
    if not PEER.exists():
        pytest.skip("TensorFlow is not installed: run `make peers`")
    return str(PEER)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_operations_of_tensorflow_in_layers_are_reported(tmp_path: Path) -> None:
    script = tmp_path / "layer.py"
    script.write_text(
        "import numpy as np\n"
        "import tensorflow as tf\n"
        "model = tf.keras.Sequential([tf.keras.layers.Dense(3, activation=tf.nn.relu)])\n"
        "model.compile(loss='mse')\n"
        "model.fit(np.ones((8, 2)), np.ones((8, 3)))\n"
    )
    error = run_script(script, python=find_tensorflow()).splitlines()[-1]
    assert error.startswith("error layer.py:5: `model.fit(np.ones((8, 2)), np.ones((8, 3)))`: ")
    assert "an operation of TensorFlow was applied to a tensor of torch" in error
    assert error.endswith("use keras.ops in layers, losses and metrics")


def run_bench(rows: Path, *args: str) -> list[float]:
    """Runs bench/scripts.py with one seed; returns the accuracies of its rows."""
    command = [find_tensorflow(), "bench/scripts.py", "--out", str(rows), "--seeds", "1"]
    done = subprocess.run(
        [*command, *args],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r'"accuracy": ([0-9.]+)', rows.read_text())]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scripts_train_as_with_tensorflow_alone(tmp_path: Path) -> None:
    """One script with TFRecord files, PNG images and steps; bench/scripts.py runs all of them."""
    found = run_bench(tmp_path / "rows.jsonl", "--only", "records_by_file", "tfds_one_machine")
    assert len(found) == 8
    for script in (found[:4], found[4:]):
        reference, *ours = script
        # Seeds of the same script differ by up to 0.02.
        assert ours == pytest.approx([reference] * 3, abs=0.04)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("network namespaces")
def test_scripts_train_on_three_machines(tmp_path: Path, lab_missing: str | None) -> None:
    if lab_missing is not None:
        pytest.skip(f"three machines cannot be made here: {lab_missing}")
    found = run_bench(tmp_path / "rows.jsonl", "--ssh", "--only", "records_by_file")
    assert found == pytest.approx([0.91] * 3, abs=0.04)

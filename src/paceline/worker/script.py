"""Runs a user's script in a worker, with equal seeds on all workers and errors by its lines."""

from __future__ import annotations

import itertools
import json
import linecache
import os
import random
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.worker.import_hooks import install_import_hook

SEED = 0
"""Seed of all generators when a script starts, so that unseeded scripts agree on all workers."""
EXTRA = "pip install 'paceline[tensorflow]'"
PACKAGE = Path(__file__).resolve().parents[1]
TRACED = "in user code:"
"""Begins the message of an error in a function that TensorFlow traces; its lines follow."""
TRACED_LINE = re.compile(r'File "([^"]+)", line (\d+), in ')
NEED_EXTRA = ("tensorflow_datasets", "tensorflow_io", "tf_keras")


def run_script(script: str, args: Sequence[str], workers: int) -> None:
    """Runs the script as `__main__`. Raises UsageError with its line if it cannot run here."""
    install_import_hook()
    seed_generators()
    os.environ["TF_CONFIG"] = make_tf_config(workers)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise UsageError(f"{script} exited with {ended.code!r}") from None
    except Exception as error:
        reason = explain(error)
        if reason is None:
            raise
        raise UsageError(f"{find_line(error, Path(script))}{reason}") from error


def seed_generators() -> None:
    """Seeds generators whose unseeded use would make the data of the workers differ."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    make, count = np.random.default_rng, itertools.count()

    def default_rng(seed: Any = None) -> np.random.Generator:
        return make((SEED, next(count)) if seed is None else seed)

    np.random.default_rng = default_rng


def make_tf_config(workers: int) -> str:
    """Returns a TF_CONFIG for scripts that count workers by it, equal on all of them.

    Every process has the same task, because all of them run the whole script. Nothing connects to
    the addresses.
    """
    hosts = [f"localhost:{port}" for port in range(1, workers + 1)]
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 0}})


def explain(error: Exception) -> str | None:
    """Returns the reason and the remedy of an error that is due to running under Paceline."""
    if isinstance(error, UsageError):
        text = str(error)
        return text.rpartition("UsageError: ")[2].strip() if text.startswith(TRACED) else text
    if isinstance(error, ModuleNotFoundError) and error.name in NEED_EXTRA:
        return f"{error.name} is not installed; {EXTRA}, in which tf.keras is Keras 3 on torch"
    if type(error).__name__ == "TBNotInstalledError":
        return "TensorBoard is not installed; pip install 'paceline[tensorboard]'"
    packages = [find_package(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    inside_keras = packages[packages.index("keras") :] if "keras" in packages else []
    own = type(error).__module__.startswith("tensorflow")  # For example, a file that is missing.
    if not own and "tensorflow" in inside_keras:
        return (
            f"an operation of TensorFlow was applied to a tensor of torch ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); use keras.ops in layers, losses and metrics"
        )
    return None


def find_package(file: str) -> str:
    """Returns the name of the installed package that a file belongs to; empty for other files."""
    _, installed, inside = file.rpartition(f"{os.sep}site-packages{os.sep}")
    return inside.partition(os.sep)[0] if installed else ""


def find_line(error: BaseException, script: Path) -> str:
    """Returns "train.py:12: `source line`: " for the innermost line of the user's own code."""
    folder = script.resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno or 0) for frame in frames]
    if str(error).startswith(TRACED):
        places += [(file, int(line)) for file, line in TRACED_LINE.findall(str(error))]
    for file, line in reversed(places):
        path = Path(file).resolve()
        library = path.is_relative_to(PACKAGE) or "site-packages" in path.parts
        if path.is_relative_to(folder) and not library and line:
            source = linecache.getline(str(path), line).strip()
            return f"{path.relative_to(folder)}:{line}: `{source}`: "
    return ""

"""A job on its way to executors and into saved models: files of text and weights, never pickles.

A folder holds `job.json` (fields, and how to find model and loss), the source file that defines
them, or a Keras model in Keras's own format; `job.py` makes a job file of it. The same files,
with the trained weights beside them, are what a fitted model consists of.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.job import Job, build_job
from paceline.plugins import load_module

JOB = "job.json"
SOURCE = "source_of_{}.py"
KERAS_MODEL = "untrained.keras"
JOB_FILE = '''"""Made by PacelineEstimator: the job as it travels to executors."""

from pathlib import Path

from paceline.spark.job_archive import read_job


def job():
    return read_job(Path(__file__).parent)
'''


@dataclass(frozen=True)
class JobArchive:
    """Files by name."""

    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        """Into a folder; the path of its job file."""
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        (folder / "job.py").write_text(JOB_FILE, encoding="utf-8")
        return folder / "job.py"


def pack_job(model: Any, loss: Any, fields: dict[str, Any]) -> JobArchive:
    """Raises UsageError for what cannot be found again in another process."""
    files: dict[str, bytes] = {}
    facts = {
        "model": _refer("model", model, files),
        "loss": None if loss is None else _refer("loss", loss, files),
        "fields": fields,
    }
    files[JOB] = json.dumps(facts, indent=2).encode()
    return JobArchive(files)


def _refer(what: str, thing: Any, files: dict[str, bytes]) -> dict[str, str]:
    if isinstance(thing, str) and ".py:" in thing:
        path, _, name = thing.rpartition(":")
        return _take_source(what, Path(path), name, files)
    if isinstance(thing, str):
        return {"kind": "name", "name": thing}
    if _is_keras(thing):
        from paceline.keras.module import write_keras

        files[KERAS_MODEL] = write_keras(thing)
        return {"kind": "keras", "file": KERAS_MODEL}
    if callable(thing) and hasattr(thing, "__qualname__") and not _is_module(thing):
        return _take_source(what, _find_source(what, thing), thing.__qualname__, files)
    raise UsageError(
        f"{what} is a {type(thing).__name__}: executors build it themselves, so pass a name, "
        "a function or class that builds it, 'file.py:function', or a compiled Keras model"
    )


def _is_keras(thing: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(thing, keras.Model)


def _is_module(thing: Any) -> bool:
    import torch

    return isinstance(thing, torch.nn.Module)


def _find_source(what: str, thing: Callable[..., Any]) -> Path:
    name = thing.__qualname__
    try:
        path = Path(inspect.getsourcefile(thing) or "")
    except TypeError:
        path = Path()
    if "<" in name or "." in name or not path.is_file():
        raise UsageError(
            f"{what} {name} cannot be found in a file: define it at the top level of a .py file"
        )
    return path


def _take_source(what: str, path: Path, name: str, files: dict[str, bytes]) -> dict[str, str]:
    if not path.is_file():
        raise UsageError(f"{what}: file {path} does not exist")
    kept = SOURCE.format(what)
    files[kept] = path.read_bytes()
    return {"kind": "file", "file": kept, "function": name}


def read_job(folder: Path) -> Job:
    """The job that was packed; called in every worker."""
    facts = json.loads((folder / JOB).read_text(encoding="utf-8"))
    fields = dict(facts["fields"])
    model = _find(folder, "model", facts["model"])
    loss = None if facts["loss"] is None else _find(folder, "loss", facts["loss"])
    if facts["model"]["kind"] == "keras":
        fields = {**_keras_fields(model, fields["batch"]), **fields}
        loss = fields.pop("loss")
        model = _as_module(model)
    return build_job(**fields, model=model, loss=loss)


def _find(folder: Path, what: str, reference: dict[str, str]) -> Any:
    kind = reference["kind"]
    if kind == "name" and what == "loss":
        import torch

        found = getattr(torch.nn.functional, reference["name"], None)
        if found is None:
            raise UsageError(f"loss {reference['name']!r} is no function of torch.nn.functional")
        return found
    if kind == "name":
        return reference["name"]
    if kind == "keras":
        from paceline.keras.module import read_keras

        return read_keras((folder / reference["file"]).read_bytes())
    module = load_module(folder / reference["file"], f"paceline_{what}")
    found = getattr(module, reference["function"], None)
    if found is None:
        raise UsageError(f"{what}: {reference['file']} has no {reference['function']}")
    return found


def _as_module(model: Any) -> Any:
    from paceline.keras.module import KerasModule

    return KerasModule(model)


def _keras_fields(model: Any, batch: int) -> dict[str, Any]:
    """What the model was compiled with; what the estimator says wins."""
    from paceline.keras.backend import import_keras
    from paceline.keras.jobs import KerasLoss, check_model
    from paceline.keras.optimizer_conversion import KerasSchedule, schedule_of, translate

    keras = import_keras()
    check_model(keras, model)
    translated = translate(model.optimizer)
    lr = float(model.optimizer.learning_rate)
    schedule = schedule_of(model.optimizer)
    found: dict[str, Any] = {
        "loss": KerasLoss(keras, model.loss),
        "optimizer": str(translated.spec),
        "lr": lr,
        "clip": translated.clip,
    }
    if schedule is not None:
        found["schedule"] = KerasSchedule(schedule, batch, lr)
    return found


def build_trained(
    files: dict[str, bytes], folder: Path, shape: tuple[int, ...], classes: int | None
) -> Any:
    """The trained torch module of a fitted model, for predictions."""
    import torch
    from safetensors.torch import load_model

    from paceline import models

    for name, data in files.items():
        (folder / name).write_bytes(data)
    job = read_job(folder)
    if isinstance(job.model, str):
        assert classes is not None
        module = models.build(job.model, input_shape=shape, classes=classes)
    else:
        module = job.model if isinstance(job.model, torch.nn.Module) else job.model()
    module = module.to(getattr(torch, job.dtype))
    load_model(module, str(folder / "model.safetensors"))
    return module.eval()

"""Builds a Job from a compiled Keras model, and loads the Keras model of a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError
from paceline.job import Job, build_job
from paceline.keras.fit_data import as_array
from paceline.keras.module import KerasModule, import_keras
from paceline.keras.optimizers import step_at, translate
from paceline.telemetry.run_folder import KERAS


def job(
    model: Any,
    x: Any,
    y: Any,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    validation_data: Any = None,
    validation_split: float = 0.0,
    test_data: Any = None,
    **fields: Any,
) -> Job:
    """Builds a Job that trains like `model.fit(x, y, ...)`, for any strategy.

    The model must be compiled, with one input and one output; its optimizer, learning-rate
    schedule, loss and regularization are kept. `validation_data` and `test_data` are pairs
    (x, y); `fields` are further fields of a Job (seed, until, checkpoint_every, ...). Raises
    UsageError for features that a Job does not support; a script with `model.fit` supports more.
    """
    compiled = compiled_fields(model, batch_size)
    if "schedule" in fields:
        compiled.pop("schedule", None)
    prepare = compiled["loss"].prepare
    train = prepare(x, y)
    if validation_split and validation_data is None:
        if not 0 < validation_split < 1:
            raise UsageError(f"validation_split {validation_split}: must be between 0 and 1")
        # The last rows, as in Keras.
        cut = int(len(train[0]) * (1 - validation_split))
        if not 0 < cut < len(train[0]):
            raise UsageError(f"validation_split {validation_split} leaves one side empty")
        validation_data = train[0][cut:], train[1][cut:]
        train = train[0][:cut], train[1][:cut]
    elif validation_data is not None:
        validation_data = prepare(*_pair(validation_data, "validation_data"))
    if test_data is not None:
        test_data = prepare(*_pair(test_data, "test_data"))
    if not model.built:
        model.build((None, *train[0].shape[1:]))
    if not model.trainable_variables:
        raise UsageError("the Keras model has no trainable weights: nothing to train")
    data = (train, validation_data, test_data)
    model = KerasModule(model)
    return build_job(model=model, data=data, batch=batch_size, epochs=epochs, **compiled, **fields)


def load(folder: str | Path) -> Any:
    """Returns the trained Keras model of a finished run, compiled as before."""
    path = Path(folder) / KERAS
    if not path.exists():
        raise UsageError(f"{folder} has no {KERAS}; use the folder of a finished Keras run")
    return import_keras().models.load_model(str(path))


def compiled_fields(model: Any, batch: int) -> dict[str, Any]:
    """Returns the job fields that a model was compiled with. Raises UsageError."""
    keras = import_keras()
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"{type(model).__name__} is not a Keras model; pass a compiled keras.Model"
        )
    if not model.compiled or model.optimizer is None:
        raise UsageError("the Keras model is not compiled; call model.compile(...) first")
    spec, clip = translate(model.optimizer)
    lr = float(model.optimizer.learning_rate)
    fields = {"loss": KerasLoss(keras, model.loss), "optimizer": str(spec), "lr": lr, "clip": clip}
    schedule = getattr(model.optimizer, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        fields["schedule"] = KerasSchedule(schedule, batch, lr)
    return fields


def _pair(given: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise UsageError(
            f"{what} must be a pair (x, y); use a script with model.fit for sample weights"
        )
    return given[0], given[1]


class KerasLoss:
    """A Keras loss as a function of (output, target); pickled as its configuration.

    One-hot targets of categorical_crossentropy are stored as class indices, so that correct
    predictions can be counted, and converted back for the loss.
    """

    def __init__(self, keras: Any, loss: Any) -> None:
        if isinstance(loss, dict | list | tuple):
            raise UsageError("the model has several losses; use a script with model.fit instead")
        built = keras.losses.get(loss)
        if built is None:
            raise UsageError("the model was compiled without a loss; set one in compile()")
        self.name = getattr(built, "name", None) or getattr(built, "__name__", "loss")
        self._sparse = self.name == "sparse_categorical_crossentropy"
        self._one_hot = self.name == "categorical_crossentropy"
        self._classes = 0
        self._text = json.dumps(keras.saving.serialize_keras_object(built))
        self._loss: Any = built
        self.__qualname__ = f"keras {self.name}"

    def prepare(self, x: Any, y: Any) -> tuple[Any, Any]:
        if isinstance(x, dict | list | tuple) or isinstance(y, dict | list | tuple):
            raise UsageError(
                "a job requires one input array and one target array; "
                "use a script with model.fit for several inputs or outputs"
            )
        x, y = as_array(x), as_array(y)
        if (self._sparse or self._one_hot) and y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if self._one_hot and y.ndim == 2:
            self._classes = y.shape[1]
            is_one_hot = np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
            if not is_one_hot:
                raise UsageError(
                    "targets of categorical_crossentropy must be one-hot; use kl_divergence instead"
                )
            y = y.argmax(1)
        if self._sparse or self._one_hot:
            y = y.astype(np.int64)
        elif not np.issubdtype(y.dtype, np.floating):
            y = y.astype(np.float32)
        return x, y

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self._loss is None:
            self._loss = import_keras().losses.deserialize(json.loads(self._text))
        if self._one_hot:
            classes = self._classes or output.shape[-1]
            target = torch.nn.functional.one_hot(target, classes).to(output.dtype)
        elif target.dim() == output.dim() - 1 and not self._sparse:
            target = target.unsqueeze(-1)
        value: torch.Tensor = self._loss(target, output)
        return value.mean() if value.dim() else value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loss": None}


class KerasSchedule:
    """A Keras learning-rate schedule for a job; its step counts global batches.

    Pickled as JSON: the schedule's class and configuration.
    """

    def __init__(self, schedule: Any, batch: int, base: float) -> None:
        self._text = json.dumps(import_keras().saving.serialize_keras_object(schedule))
        self._batch = batch
        self._base = base
        self._schedule: Any = None

    def __str__(self) -> str:
        return f"keras {json.loads(self._text)['class_name']}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_schedule": None}

    def factor(self, samples: int, *, per_epoch: int, total: int) -> float:
        if self._schedule is None:
            saving = import_keras().saving
            self._schedule = saving.deserialize_keras_object(json.loads(self._text))
        step = step_at(samples // per_epoch, samples % per_epoch, per_epoch, self._batch)
        return float(self._schedule(step)) / self._base

    def drops(self, *, per_epoch: int, total: int) -> list[float]:
        return []

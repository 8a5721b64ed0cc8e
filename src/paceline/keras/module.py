"""Imports Keras with its torch backend, and wraps a Keras model as a torch module.

Keras stores every variable as a torch parameter, including the moving statistics of
BatchNormalization and the state of random generators. Here trainable variables are parameters,
other floating-point variables are buffers (averaged over the workers at a quiesce, as in torch),
and generators stay local to each worker. All share storage with the Keras model, so nothing is
copied.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.telemetry.run_folder import KERAS

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """Imports keras with the torch backend. Raises UsageError if that is not possible."""
    os.environ[BACKEND] = "torch"
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise UsageError(
            "Keras is not installed; run pip install 'paceline[keras]' (Keras 3, torch backend)"
        ) from None
    check_backend(keras)
    return keras


def check_backend(keras: Any) -> None:
    if int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"Keras {keras.__version__} only supports TensorFlow; install Keras 3 "
            "(pip install 'paceline[keras]')"
        )
    name = keras.config.backend()
    if name != "torch":
        raise UsageError(
            f"Keras was imported with its {name} backend; "
            f"set {BACKEND}=torch before the first import of keras"
        )


class KerasModule(torch.nn.Module):
    """A Keras model as a torch module.

    Parameters are named by the index and name of the variable ("0/kernel"), because Keras numbers
    layers differently in every process.
    """

    keras_model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        # Bypasses torch's __setattr__, which would register the Keras model as a submodule.
        self.__dict__["keras_model"] = model
        self.__qualname__ = f"keras {model.name}"
        local = {id(g.state) for g in seed_generators(model)}
        trained = {id(v) for v in model.trainable_variables}
        for index, variable in enumerate(model.variables):
            name = f"{index}/{variable.name.replace('.', '_')}"
            if id(variable) in trained:
                self.register_parameter(name, variable.value)
            elif id(variable) not in local:
                self.register_buffer(name, variable.value.detach())

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.keras_model(inputs, training=self.training)

    def train(self, mode: bool = True) -> KerasModule:
        super().train(mode)
        self.keras_model.train(mode)
        return self

    def regularization(self) -> torch.Tensor:
        """Returns the layer penalties (kernel_regularizer, add_loss) of the last forward pass."""
        losses: list[torch.Tensor] = self.keras_model.losses
        return torch.cat([loss.reshape(1) for loss in losses]).sum() if losses else torch.zeros(())

    def save_extra_files(self, folder: Path) -> None:
        """Saves the architecture in Keras's own format, next to `model.safetensors`."""
        _save(self.keras_model, folder / KERAS)

    def set_worker(self, rank: int) -> None:
        """Changes the seeds, so that dropout masks differ between workers."""
        for generator in seed_generators(self.keras_model):
            state = generator.state.value
            with torch.no_grad():
                state[0] = (int(state[0]) + rank * 1_000_003) % (2**31 - 1)

    def __reduce__(self) -> Any:
        """Pickles or copies the model in the .keras format: JSON configuration and weights."""
        return read_module, (write_keras(self.keras_model),)


def _save(model: Any, path: Path) -> None:
    # Not model.save(), which all workers would have to call in a script with a patched fit().
    from keras.src.saving import saving_lib

    saving_lib.save_model(model, str(path))


def write_keras(model: Any) -> bytes:
    """Returns the bytes of a .keras file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KERAS
        try:
            _save(model, path)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UsageError(
                f"the Keras model cannot be saved ({error}); define get_config() for custom layers "
                "and register them with keras.saving.register_keras_serializable()"
            ) from None
        return path.read_bytes()


def read_keras(data: bytes) -> Any:
    keras = import_keras()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KERAS
        path.write_bytes(data)
        return keras.models.load_model(str(path))


def read_module(data: bytes) -> KerasModule:
    return KerasModule(read_keras(data))


def seed_generators(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    found = (g for layer in layers for g in getattr(layer, "_seed_generators", ()))
    return list({id(generator): generator for generator in found}.values())

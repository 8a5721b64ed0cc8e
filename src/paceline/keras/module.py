"""A Keras model as the torch module that strategies work with.

Keras keeps every variable as a torch parameter, also the moving statistics of BatchNormalization
and the state of random generators. Here trained variables are parameters, other floating-point
ones are buffers (averaged over the workers at a quiesce, as torch's are), and generators stay
each worker's own. All share their storage with the Keras model, so nothing is ever copied back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.keras.backend import import_keras
from paceline.telemetry.run_folder import KERAS


class KerasModule(torch.nn.Module):
    """Names are the variable's place and name ("0/kernel"): Keras numbers layers anew in every
    process, and a run must find its weights again in another one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        # In a tuple, so that torch does not take the Keras model for a part of this one.
        self._held = (model,)
        self.__qualname__ = f"keras {model.name}"
        own = {id(g.state) for g in seed_generators(model)}
        trained = {id(v) for v in model.trainable_variables}
        for index, variable in enumerate(model.variables):
            name = f"{index}/{variable.name.replace('.', '_')}"
            if id(variable) in trained:
                self.register_parameter(name, variable.value)
            elif id(variable) not in own:
                self.register_buffer(name, variable.value.detach())

    @property
    def keras_model(self) -> Any:
        return self._held[0]

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.keras_model(inputs, training=self.training)

    def train(self, mode: bool = True) -> KerasModule:
        super().train(mode)
        self.keras_model.train(mode)
        return self

    def regularization(self) -> torch.Tensor:
        """Penalties of layers (kernel_regularizer, add_loss) in the last forward pass."""
        losses: list[torch.Tensor] = self.keras_model.losses
        return (
            torch.stack([loss.reshape(()) for loss in losses]).sum() if losses else torch.zeros(())
        )

    def save_beside(self, folder: Path) -> None:
        """What `model.safetensors` does not tell: the architecture, in Keras's own format."""
        _save(self.keras_model, folder / KERAS)

    def set_worker(self, rank: int) -> None:
        """Dropout of other workers draws other masks."""
        for generator in seed_generators(self.keras_model):
            state = generator.state.value
            with torch.no_grad():
                state[0] = (int(state[0]) + rank * 1_000_003) % (2**31 - 1)

    def __reduce__(self) -> Any:
        """In the .keras format: configuration as JSON and weights, no pickled code."""
        return read_module, (write_keras(self.keras_model),)

    def __deepcopy__(self, memo: Any) -> KerasModule:
        return read_module(write_keras(self.keras_model))


def _save(model: Any, path: Path) -> None:
    # Not model.save(): in a script that is taken over, all workers would have to call that.
    from keras.src.saving import saving_lib

    saving_lib.save_model(model, str(path))


def write_keras(model: Any) -> bytes:
    """The bytes of a .keras file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / KERAS
        try:
            _save(model, path)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UsageError(
                f"the Keras model cannot be saved ({error}): give your own layers get_config() "
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
    found = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            found[id(generator)] = generator
    return list(found.values())

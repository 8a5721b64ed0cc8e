"""Keras with its torch backend, or one line that says how to get it."""

from __future__ import annotations

import importlib
import os
from typing import Any

from paceline.errors import UsageError

BACKEND = "KERAS_BACKEND"


def import_keras() -> Any:
    """The keras package on torch; raises UsageError where that cannot be."""
    os.environ[BACKEND] = "torch"
    try:
        keras = importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise UsageError(
            "Keras is not installed: pip install 'paceline[keras]' (Keras 3, its torch backend)"
        ) from None
    check_backend(keras)
    return keras


def check_backend(keras: Any) -> None:
    if int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"Keras {keras.__version__} runs on TensorFlow alone: Keras 3 is needed "
            "(pip install 'paceline[keras]')"
        )
    name = keras.config.backend()
    if name != "torch":
        raise UsageError(
            f"Keras was imported with its {name} backend: "
            f"set {BACKEND}=torch before the first import of keras"
        )

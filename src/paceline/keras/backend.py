"""Imports Keras with its torch backend, or raises an error with the command that installs it."""

from __future__ import annotations

import importlib
import os
from typing import Any

from paceline.errors import UsageError

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

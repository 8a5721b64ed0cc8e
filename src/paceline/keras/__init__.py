"""Keras 3 with the torch backend: compiled models as jobs, and scripts that call `model.fit`.

Cheap to import: servers only need `paceline.keras.optimizers`, and importing Keras takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.keras.jobs import job, load

__all__ = ["job", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.keras' has no attribute {name!r}")
    from paceline.keras import jobs

    return getattr(jobs, name)

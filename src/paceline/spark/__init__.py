"""Spark integration: workers in barrier tasks on executors, and a pyspark.ml estimator."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.spark.engine import SparkEngine, run
    from paceline.spark.estimator import PacelineEstimator
    from paceline.spark.model import PacelineModel

_WHERE = {
    "PacelineEstimator": "estimator",
    "PacelineModel": "model",
    "SparkEngine": "engine",
    "run": "engine",
}
__all__ = ["PacelineEstimator", "PacelineModel", "SparkEngine", "run"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'paceline.spark' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"paceline.spark.{_WHERE[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pyspark", "pandas", "pyarrow"):
            raise
        from paceline.errors import UsageError

        raise UsageError(
            f"{error.name} is not installed; run pip install 'paceline[spark]'"
        ) from None
    return getattr(module, name)

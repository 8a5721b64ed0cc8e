"""Paceline trains one neural network on many unequal machines, at the pace those machines allow."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.codecs.registry import CodecRecord, register_codec
    from paceline.job import Job
    from paceline.launch.compare_runs import compare
    from paceline.launch.run import train
    from paceline.strategies.allreduce.spec import AllReduce
    from paceline.strategies.ps.spec import ParameterServer
    from paceline.strategies.registry import StrategyRecord, register_strategy
    from paceline.strategies.single.spec import Single
    from paceline.strategies.switch.spec import Switch
    from paceline.trained_model import load
    from paceline.worker.custom_loop import log, prepare, rank

__version__ = "0.1.0"

# Names are imported on first use, so that `import paceline` and `paceline --help` stay instant.
_WHERE = {
    "AllReduce": "paceline.strategies.allreduce.spec",
    "CodecRecord": "paceline.codecs.registry",
    "Job": "paceline.job",
    "ParameterServer": "paceline.strategies.ps.spec",
    "Single": "paceline.strategies.single.spec",
    "StrategyRecord": "paceline.strategies.registry",
    "Switch": "paceline.strategies.switch.spec",
    "compare": "paceline.launch.compare_runs",
    "load": "paceline.trained_model",
    "log": "paceline.worker.custom_loop",
    "prepare": "paceline.worker.custom_loop",
    "rank": "paceline.worker.custom_loop",
    "register_codec": "paceline.codecs.registry",
    "register_strategy": "paceline.strategies.registry",
    "train": "paceline.launch.run",
}

__all__ = [
    "AllReduce",
    "CodecRecord",
    "Job",
    "ParameterServer",
    "Single",
    "StrategyRecord",
    "Switch",
    "compare",
    "load",
    "log",
    "prepare",
    "rank",
    "register_codec",
    "register_strategy",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value

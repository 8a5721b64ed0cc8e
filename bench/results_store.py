"""Writes results to dated files in bench/results, with the machine and the versions."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

from paceline.launch.run import versions
from paceline.launch.run_options import usable_cores

RESULTS = Path(__file__).parent / "results"


def dated(name: str) -> Path:
    """Returns the file of today's results of that name."""
    return RESULTS / f"{time.strftime('%Y-%m-%d')}-{name}.json"


def keep(name: str, body: dict[str, Any]) -> Path:
    """Writes the results and prints the path."""
    path = dated(name)
    machine = {"cores": usable_cores(), "processor": platform.processor() or platform.machine()}
    noted = {"machine": machine, "versions": versions(), **body}
    path.write_text(json.dumps(noted, indent=1) + "\n")
    print(f"written: bench/results/{path.name}")
    return path

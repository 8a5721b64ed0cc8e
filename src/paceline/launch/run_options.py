"""Options of a run that concern neither the job nor the strategy, and their defaults here."""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.launcher import Launcher
from paceline.launch.settings import ORPHAN_GRACE_S, RunSettings
from paceline.specs.slowdown import InjectedSlowdown
from paceline.telemetry.run_folder import OnEvent, ignore_notice


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunSettings):
    """Run settings together with what only a program can give: folders, launcher, callbacks."""

    out: Path
    workers: int = 2
    slowdowns: tuple[InjectedSlowdown, ...] = ()
    faults: tuple[str, ...] = ()
    """Faults to inject, as text; see `specs.fault`."""
    from_checkpoint: Path | None = None
    """Checkpoint of another run of the same job to start from; its elapsed time is included."""
    keep_checkpoints: int = 2
    predicted: Mapping[str, object] | None = None
    """`step_s`, `seconds` and `seconds_interval` as planned, to compare with the measurement."""
    launcher: Launcher = field(default_factory=LocalLauncher)
    """Starts the processes; by default as child processes of this one."""
    recall: bool = True
    """Use what earlier runs of the same job next to `out` measured; not within a comparison."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels in reports: `task`, the comparison that the run belongs to, and `arm`, its name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the command that started the run, recorded in run.json."""
    on_event: OnEvent = ignore_notice

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.workers}")
        if self.min_workers is not None and self.min_workers > self.workers:
            raise UsageError(
                f"--min-workers {self.min_workers} is larger than --workers {self.workers}; "
                "use at most the number of workers"
            )

    @property
    def grace_s(self) -> float:
        """Time that workers wait for another supervisor if this one is lost."""
        if self.orphan_grace_s is not None:
            return self.orphan_grace_s
        # Other runs are not continued at once: their processes must not outlive a terminal.
        is_wanted = self.min_workers is not None or any("coordinator" in f for f in self.faults)
        return ORPHAN_GRACE_S if is_wanted else 0.0

    @property
    def threads_each(self) -> int:
        """0 where other machines' cores decide."""
        if self.threads is not None:
            return self.threads
        return max(1, usable_cores() // self.workers) if self.launcher.supports_live_objects else 0


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def new_run_name(label: str) -> str:
    word = "".join(c if c.isalnum() else "-" for c in label).strip("-")[:40]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{word}-{secrets.token_hex(2)}"

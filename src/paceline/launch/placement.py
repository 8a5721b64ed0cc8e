"""Place of a run: its launcher and its workers, chosen for one strategy and job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.job import Job, JobRef
from paceline.launch.launcher import Launcher
from paceline.launch.run import Run
from paceline.specs.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The chosen place of a run."""

    launcher: Launcher
    workers: int
    strategy: Strategy
    """The requested one, or the one that the planner chose."""
    job: Job | JobRef
    predicted: Mapping[str, object] | None = None
    """Expectation of the planner, as in `RunOptions`."""
    run: Run | None = None
    """Carries the run out, for example in a simulation; None for processes."""
    after: Callable[[Mapping[str, Any]], None] = lambda result: None
    """Receives the result of a single run."""

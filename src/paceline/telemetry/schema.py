"""Types of the JSON files of a run, run.json and result.json, and checks of their values.

Both files are contracts. They are read from folders of other versions and from interrupted runs,
so every key may be missing, and readers check the types of the values they use.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

Phases = dict[str, dict[str, float]]
"""Seconds by process and time category."""


class RunConfig(TypedDict, total=False):
    """run.json: the configuration of a run, its versions and the machine that started it."""

    format: int
    strategy: str
    engine: str | None
    workers: int
    servers: int
    threads: int | None
    pin: bool
    timeout_s: float
    troubles: Sequence[Mapping[str, object]]
    predicted: Mapping[str, object] | None
    job: Mapping[str, Any]
    settings: Mapping[str, Any]
    labels: Mapping[str, str]
    directory: str
    started: str
    versions: Mapping[str, object]
    machine: Mapping[str, object]
    notes: Sequence[str]
    """Caveats on the data; absent until it has been read."""
    virtual: bool
    depth: str
    pool: Mapping[str, object]


class RunResult(TypedDict, total=False):
    """result.json: the outcome of a run. Metrics that were not measured are None."""

    status: str
    error: str | None
    strategy: str
    model: str | None
    data: str | None
    workers: int
    servers: int
    seed: int | None
    batch: int | None
    epochs: int
    samples: int
    updates: int
    seconds: float | None
    samples_per_s: float | None
    train_loss: float | None
    train_acc: float | None
    val_loss: float | None
    val_acc: float | None
    test_loss: float | None
    test_acc: float | None
    stages: Mapping[str, float | None]
    history: list[Mapping[str, Any]]
    switches: list[Mapping[str, Any]]
    decisions: list[Mapping[str, Any]]
    views: list[Mapping[str, Any]]
    """Changes of the workers that take part."""
    staleness: Mapping[str, Any]
    """`mean`, `max` and `histogram` over all gradients, in updates."""
    lag: dict[str, int]
    phases: Phases
    step_phases: dict[str, Phases]
    resources: dict[str, dict[str, float]]
    """Usage of each process over the whole run; see `ResourceTotals`."""
    bytes_by_role: dict[str, dict[str, int]]
    verdicts: list[Mapping[str, Any]]
    input: dict[str, object]
    bytes_sent: int
    parameter_bytes: int | None
    collectives: dict[str, str | None] | None
    parts: dict[str, object]
    bytes_before_codec: int
    peak_rss_bytes: int | None
    predicted: Mapping[str, object] | None
    notes: Sequence[str]
    """Caveats on the data."""
    virtual: bool
    labels: Mapping[str, str]
    versions: Mapping[str, object]
    dir: str
    """Added by readers: the folder of the run."""


def as_finite(value: object) -> float | None:
    """Returns the number; None for anything missing, not a number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_mapping(value: object) -> Mapping[str, Any]:
    """Returns the JSON object; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}

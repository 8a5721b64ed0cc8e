"""The pool: an inventory of machines, their capabilities and costs, in YAML or JSON.

`plan`, `doctor`, `launch` and `twin` share this format. Unknown keys and invalid values, such as a
speed of zero, raise an error that names the line. Passwords are not allowed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.errors import UsageError, suggest_name

FORMAT: Final = 1
LOCAL = "localhost"
"""The local machine, which is reached without SSH."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class SlowPeriod(_Strict):
    """Period of a simulated run in which a machine or link is `factor` times slower."""

    from_s: float = Field(default=0.0, ge=0)
    to_s: float = Field(default=float("inf"), gt=0)
    factor: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_order(self) -> SlowPeriod:
        if self.from_s >= self.to_s:
            raise ValueError(f"from_s {self.from_s:g} must be less than to_s {self.to_s:g}")
        return self


def slowness_at(periods: tuple[SlowPeriod, ...], now: float) -> float:
    """Returns the product of the factors of all periods that contain this time."""
    return math.prod(p.factor for p in periods if p.from_s <= now < p.to_s)


class DownPeriod(_Strict):
    """Period of a simulated run in which a machine does not exist."""

    from_s: float = Field(ge=0, allow_inf_nan=False)
    to_s: float = Field(default=float("inf"), gt=0)

    @model_validator(mode="after")
    def _check_order(self) -> DownPeriod:
        if self.from_s >= self.to_s:
            raise ValueError(f"from_s {self.from_s:g} must be less than to_s {self.to_s:g}")
        return self


class Link(_Strict):
    """Network link of a machine, the same in both directions."""

    mbit_s: float = Field(default=1000.0, gt=0)
    latency_ms: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    slow: tuple[SlowPeriod, ...] = ()
    """Periods in which it has a fraction of its bandwidth, in simulations."""

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_s * 1e6 / 8

    def slowness(self, now: float) -> float:
        """Returns the factor by which sending takes longer at this time."""
        return slowness_at(self.slow, now)

    @property
    def latency_s(self) -> float:
        return self.latency_ms / 1e3


class Jitter(_Strict):
    """Variation of the step time. `cv` is the standard deviation divided by the mean."""

    shape: Literal["lognormal", "uniform", "exponential"] = "lognormal"
    cv: float = Field(default=0.05, ge=0, le=2)

    @model_validator(mode="after")
    def _check_shape(self) -> Jitter:
        limit = {"lognormal": 2.0, "uniform": 0.57, "exponential": 1.0}[self.shape]
        if self.cv > limit:
            raise ValueError(f"cv {self.cv:g} must be at most {limit:g} for {self.shape}")
        return self


class StepCost(_Strict):
    """Time of one training step of a model on this machine: fixed_s + samples x per_sample_s."""

    fixed_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    per_sample_s: float = Field(gt=0, allow_inf_nan=False)
    update_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Optimizer time per step, or the time of one update on a server."""
    gradient_mb: float | None = Field(default=None, gt=0)
    """Size of a gradient, if these values represent another model than the job's."""

    def step_s(self, samples: float) -> float:
        return self.fixed_s + samples * self.per_sample_s if samples else 0.0


class Watts(_Strict):
    idle: float = Field(ge=0, allow_inf_nan=False)
    busy: float = Field(ge=0, allow_inf_nan=False)


class Gpu(_Strict):
    count: int = Field(default=1, ge=1)
    model: str | None = None
    memory_gb: float | None = Field(default=None, gt=0)
    gflops: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Measured rate of one GPU; estimated from the model if it is missing."""


def workers_by_default(gpus: Sequence[Gpu]) -> int:
    return max(1, sum(g.count for g in gpus))


class Host(_Strict):
    """One machine. Only `host` is required; measured values take precedence over estimates."""

    host: str = Field(min_length=1)
    user: str | None = None
    port: int = Field(default=22, ge=1, le=65535)
    key: str | None = None
    """Path of a private key, or the name of a key in the SSH agent; never its contents."""
    python: str | None = Field(default=None, min_length=1)
    """Python interpreter, for example ~/train/.venv/bin/python. Default: python3."""
    cores: int = Field(default=1, ge=1)
    memory_gb: float | None = Field(default=None, gt=0)
    gpus: tuple[Gpu, ...] = ()
    watts: Watts | None = None
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    energy_efficient: bool = False
    labels: tuple[str, ...] = ()
    workers: int = Field(default_factory=lambda fields: workers_by_default(fields["gpus"]), ge=1)
    """Number of worker processes to start on this machine. Default: one per GPU, else one."""
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Relative speed: a machine with 2 computes twice as fast as one with 1."""
    gflops: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Sustained training rate, for models without an entry in `measured`."""
    startup_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds until a worker on this machine can train: imports, data, model."""
    measured: dict[str, StepCost] = Field(default_factory=dict)
    """Step costs by model name; `any` applies to all models without an entry."""
    link: Link | None = None
    jitter: Jitter | None = None
    slow: tuple[SlowPeriod, ...] = ()
    fails_at_s: float | None = Field(default=None, ge=0)
    down: tuple[DownPeriod, ...] = ()
    """Failures in simulated runs: the machine is gone at `from_s`, and returns at `to_s`."""

    @field_validator("host", "user")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        # Names become arguments of the ssh commands that users are shown.
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(
                "only letters, digits, dots, colons, dashes and underscores are allowed"
            )
        return name

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def gpu_count(self) -> int:
        return sum(g.count for g in self.gpus)


class Pool(_Strict):
    """Machines and their shared settings."""

    format: Literal[1] = 1
    name: str | None = None
    note: str | None = None
    hosts: tuple[Host, ...] = Field(min_length=1)
    link: Link = Field(default_factory=Link)
    """Default link of machines without their own."""
    jitter: Jitter = Field(default_factory=Jitter)
    collective: Literal["auto", "ring", "tree", "butterfly", "hierarchical"] = "auto"
    """All-reduce of strategies that do not choose one; `auto` is the cheapest."""
    collective_gb_s: float = Field(default=1.0, gt=0)
    """Rate at which a process sends, receives and adds in a collective, excluding the network."""
    hop_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Latency that a process adds to each hop of a collective, mostly wake-up time."""
    transfer_gb_s: float = Field(default=2.0, gt=0)
    """Rate at which a process sends to or receives from a server, excluding the network."""
    apply_gb_s: float = Field(default=2.0, gt=0)
    """Rate at which a server applies gradients, for models without a measured update."""
    control_ms: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Time that the coordinator needs per report."""
    regroup_s: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Time that the workers of a new view need to connect, excluding the transfer of the state."""
    mtbf_s: float | None = Field(default=None, gt=0)
    """Mean time between two failures of a machine in simulated runs, exponentially distributed."""
    repair_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """Time until a machine that has failed returns, in simulated runs."""

    @model_validator(mode="after")
    def _check_names(self) -> Pool:
        counts = Counter(h.host for h in self.hosts)
        duplicates = sorted(n for n, count in counts.items() if count > 1 and n != "localhost")
        if duplicates:
            raise ValueError(f"host {duplicates[0]!r} is listed twice; set workers: 2 instead")
        return self

    @property
    def slots(self) -> list[Host]:
        """Returns the machine of each worker, in order."""
        return [host for host in self.hosts for _ in range(host.workers)]

    def link_of(self, host: Host) -> Link:
        return host.link or self.link

    def jitter_of(self, host: Host) -> Jitter:
        return host.jitter or self.jitter

    def to_plain(self) -> dict[str, object]:
        """Returns the non-default values as JSON-compatible data; infinity becomes "inf"."""
        plain: dict[str, object] = _spell(self._dump())
        return plain

    def _dump(self) -> dict[str, Any]:
        plain = self.model_dump(mode="json", exclude_defaults=True)
        for host, each in zip(plain["hosts"], self.hosts, strict=True):
            if each.workers == workers_by_default(each.gpus):
                host.pop("workers", None)
        return plain

    def to_yaml(self) -> str:
        plain = self._dump()
        for host in plain["hosts"]:
            for gpu in host.get("gpus", ()):
                gpu.setdefault("count", 1)  # "{}" would be hard to read
        text: str = yaml.safe_dump({"format": FORMAT, **plain}, sort_keys=False)
        return text


def _spell(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _spell(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_spell(v) for v in value]
    return "inf" if value == float("inf") else value


def equal_machines(count: int) -> Pool:
    """Returns N machines with four cores and default speed, link and jitter (`--cluster N`)."""
    if count < 1:
        raise UsageError(f"--cluster {count}: at least one machine is required")
    return Pool(
        name=f"{count} equal machines",
        hosts=tuple(Host(host=f"m{i}", cores=4) for i in range(count)),
    )


def read_pool(path: Path) -> Pool:
    """Reads a pool file. Raises UsageError with the line, the key, its value and the rule."""
    from paceline.cluster.pool_file import load_pool  # imports this module

    return load_pool(path).pool


SELECTIONS: dict[str, tuple[Callable[[Host], bool], str]] = {
    "all": (lambda host: True, "exists"),
    "gpu": (lambda host: host.gpu_count > 0, "has a GPU"),
    "cpu": (lambda host: host.gpu_count == 0, "has no GPU"),
    "energy": (lambda host: host.energy_efficient, "is marked energy_efficient"),
}
ALIASES = {"gpus": "gpu", "cpus": "cpu"}
PLANNED = "auto"
"""Handled by the planner, which needs the job; not a selection."""


def select_hosts(pool: Pool, texts: Sequence[str]) -> tuple[Host, ...]:
    """Returns the selected machines in the pool's order. Raises UsageError if there are none.

    `texts` contains every --select option; only one may be given: the name of a selection, or
    names of machines, separated by commas.
    """
    requested = list(dict.fromkeys(ALIASES.get(word, word) for word in texts)) or ["all"]
    names = [host.host for host in pool.hosts]
    for word in requested:
        if word in SELECTIONS or (word == PLANNED and len(requested) > 1):
            continue
        if not any(name in names for name in split_names(word)):
            raise UsageError(f"unknown --select {word!r}; {suggest_name(word, SELECTIONS)}")
    if len(requested) > 1:
        selects = " and --select ".join(requested)
        raise UsageError(
            f"--select {selects} cannot be combined: a run uses one selection; remove one of them"
        )
    if requested[0] not in SELECTIONS:
        return find_hosts(pool, requested, "--select")
    is_selected, rule = SELECTIONS[requested[0]]
    chosen = tuple(host for host in pool.hosts if is_selected(host))
    if not chosen:
        others = [word for word, (fits, _) in SELECTIONS.items() if any(map(fits, pool.hosts))]
        raise UsageError(
            f"--select {requested[0]}: no machine in the pool {rule}; "
            f"selections that match some of its {len(pool.hosts)} machines: {', '.join(others)}"
        )
    return chosen


def find_hosts(pool: Pool, texts: Sequence[str], option: str) -> tuple[Host, ...]:
    """Returns the named machines in the pool's order; names are separated by commas."""
    wanted = [name for word in texts for name in split_names(word)]
    known = [host.host for host in pool.hosts]
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"{option} {name} is not in the pool; known machines: {', '.join(known)}"
            )
    return tuple(host for host in pool.hosts if host.host in wanted)


def split_names(word: str) -> list[str]:
    return [name.strip() for name in word.split(",") if name.strip()]

"""The pool: which machines there are, what they can do and what they cost; YAML or JSON.

One format for `plan`, `doctor`, `launch` and `twin`. A key that is unknown, a speed of zero or a
negative bandwidth is refused with the line's place in the file. Passwords have no place in it.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.errors import UsageError

FORMAT: Final = 1
LOCAL = "localhost"
"""The machine that one sits at: reached without SSH."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)


class Link(_Strict):
    """A machine's way to the others, the same in both directions."""

    mbit_s: float = Field(default=1000.0, gt=0)
    latency_ms: float = Field(default=0.1, ge=0, allow_inf_nan=False)

    @property
    def bytes_per_s(self) -> float:
        return self.mbit_s * 1e6 / 8

    @property
    def latency_s(self) -> float:
        return self.latency_ms / 1e3


class Jitter(_Strict):
    """How much a step's time varies: `cv` is its standard deviation over its mean."""

    shape: Literal["lognormal", "uniform", "exponential"] = "lognormal"
    cv: float = Field(default=0.05, ge=0, le=2)

    @model_validator(mode="after")
    def _check_shape(self) -> Jitter:
        most = {"lognormal": 2.0, "uniform": 0.57, "exponential": 1.0}[self.shape]
        if self.cv > most:
            raise ValueError(f"cv {self.cv:g} is more than {self.shape} can have: at most {most:g}")
        return self


class SlowPeriod(_Strict):
    """From one second of the run to another a machine computes `factor` times slower."""

    from_s: float = Field(default=0.0, ge=0)
    to_s: float = Field(default=float("inf"), gt=0)
    factor: float = Field(gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_order(self) -> SlowPeriod:
        if self.from_s >= self.to_s:
            raise ValueError(f"from_s {self.from_s:g} must lie before to_s {self.to_s:g}")
        return self


class StepCost(_Strict):
    """Seconds of one training step of a model on this machine: fixed_s + samples x per_sample_s."""

    fixed_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    per_sample_s: float = Field(gt=0, allow_inf_nan=False)
    update_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The optimizer's part of a step, or one update on a server."""
    gradient_mb: float | None = Field(default=None, gt=0)
    """What is exchanged, where these figures stand for another model than the job's."""


class Watts(_Strict):
    idle: float = Field(ge=0, allow_inf_nan=False)
    busy: float = Field(ge=0, allow_inf_nan=False)


class Gpu(_Strict):
    count: int = Field(default=1, ge=1)
    model: str | None = None
    memory_gb: float | None = Field(default=None, gt=0)


class Host(_Strict):
    """One machine. Only `host` must be said; what is measured replaces what is guessed."""

    host: str = Field(min_length=1)
    user: str | None = None
    port: int = Field(default=22, ge=1, le=65535)
    key: str | None = None
    """Path of a private key, or the name of one the SSH agent holds; never its contents."""
    python: str | None = Field(default=None, min_length=1)
    """The interpreter to use there, such as ~/train/.venv/bin/python; python3 where not said."""
    cores: int = Field(default=1, ge=1)
    memory_gb: float | None = Field(default=None, gt=0)
    gpus: tuple[Gpu, ...] = ()
    watts: Watts | None = None
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    energy_efficient: bool = False
    labels: tuple[str, ...] = ()
    workers: int = Field(default=1, ge=1)
    """Worker processes to place here."""
    speed: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Beside the other machines: 2 computes twice as fast as 1."""
    gflops: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Sustained in training, for models that were not measured here."""
    measured: dict[str, StepCost] = Field(default_factory=dict)
    """By the model's name; `any` stands for all models that are not named."""
    link: Link | None = None
    jitter: Jitter | None = None
    slow: tuple[SlowPeriod, ...] = ()
    fails_at_s: float | None = Field(default=None, ge=0)

    @field_validator("host", "user")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        # They become arguments of ssh in the commands that people are given to copy.
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError("letters, digits, dots, colons, dashes and underscores are allowed")
        return name

    @property
    def is_local(self) -> bool:
        return self.host == LOCAL

    @property
    def gpu_count(self) -> int:
        return sum(g.count for g in self.gpus)


class Pool(_Strict):
    """Machines, and what they have in common."""

    format: Literal[1] = 1
    name: str | None = None
    note: str | None = None
    hosts: tuple[Host, ...] = Field(min_length=1)
    link: Link = Field(default_factory=Link)
    """Where a machine does not say its own."""
    jitter: Jitter = Field(default_factory=Jitter)
    collective: Literal["ring", "tree", "auto"] = "auto"
    collective_gb_s: float = Field(default=1.0, gt=0)
    """How fast a process sends, receives and adds inside a collective, networks apart."""
    hop_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What a process adds to the latency of each hop of a collective: waking up, mostly."""
    transfer_gb_s: float = Field(default=2.0, gt=0)
    """How fast a process sends to a server, or receives from one, networks apart."""
    apply_gb_s: float = Field(default=2.0, gt=0)
    """Gradients that a server turns into updates, where a model's update was not measured."""
    control_ms: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """What the coordinator takes for one report."""

    @model_validator(mode="after")
    def _check_names(self) -> Pool:
        counts = Counter(h.host for h in self.hosts)
        twice = sorted(n for n, count in counts.items() if count > 1 and n != "localhost")
        if twice:
            raise ValueError(f"host {twice[0]!r} is there twice: give it workers: 2 instead")
        return self

    @property
    def slots(self) -> list[Host]:
        """The machine of each worker, in order."""
        return [host for host in self.hosts for _ in range(host.workers)]

    def link_of(self, host: Host) -> Link:
        return host.link or self.link

    def jitter_of(self, host: Host) -> Jitter:
        return host.jitter or self.jitter

    def to_plain(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON can hold it: it knows no infinity."""
        plain: dict[str, Any] = _spell(self.model_dump(mode="json", exclude_defaults=True))
        return plain

    def to_yaml(self) -> str:
        plain = self.model_dump(mode="json", exclude_defaults=True)
        for host in plain["hosts"]:
            for gpu in host.get("gpus", ()):
                gpu.setdefault("count", 1)  # said, because "{}" would say nothing to people
        text: str = yaml.safe_dump({"format": FORMAT, **plain}, sort_keys=False)
        return text


def _spell(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _spell(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_spell(v) for v in value]
    return "inf" if value == float("inf") else value


def equal_machines(count: int) -> Pool:
    """`--cluster N`: N machines of four cores, the stated defaults of speed, link and jitter."""
    if count < 1:
        raise UsageError(f"--cluster {count}: at least one machine is needed")
    return Pool(
        name=f"{count} equal machines",
        hosts=tuple(Host(host=f"m{i}", cores=4) for i in range(count)),
    )


def read_pool(path: Path) -> Pool:
    """Read a pool file; raises UsageError that names the line, the key, its value and the rule."""
    from paceline.cluster.pool_file import load_pool  # which needs this module

    return load_pool(path).pool

"""A job: what to train. Torch-free, so that commands can read and check one instantly.

A job of names (`Job(model="mlp-128", data="digits")`) travels as JSON. A job file (`job.py` with
a function `job()`, or YAML) travels by reference: path, function and hash. A job that holds live
objects goes only to processes that this one starts itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.errors import PacelineError, UsageError
from paceline.plugins import hash_file, load_module, locate_error
from paceline.specs.expression import parse_expression
from paceline.specs.optimizer import parse_optimizer
from paceline.specs.optimizer_base import OptimizerSpec
from paceline.specs.point import RunPoint, read_point
from paceline.specs.schedule import Schedule, parse_schedule
from paceline.specs.stop_condition import StopCondition, parse_stop_condition

if TYPE_CHECKING:
    from paceline.data.pipeline import DataPipeline

FOR_URLS = (
    "features",
    "label",
    "val_data",
    "format",
    "shape",
    "classes",
    "fill",
    "skip_empty",
    "shard",
    "shuffle",
    "cache",
    "prefetch",
    "memory",
)
"""Fields that say how data by URL is read."""

DEFAULT_LR = {"sgd": 0.1, "adagrad": 0.01, "adadelta": 1.0}
"""Where no learning rate is given; 0.001 for all others."""


class Job(BaseModel):
    """What to train. Strings are names or expressions; `model` and `data` may be live objects.

    model: a name, a torch module, or a function without arguments that builds one (seeded).
    data: a name, a URL, or (train, val, test) of pipelines (`paceline.data.read`), tables, torch
        datasets, DataLoaders or (inputs, targets) pairs, or a function without arguments that
        gives them; val and test may be None.
    features ... memory: how data by URL is read, see docs/data.md.
    loss: a function of (output, target) that gives the mean loss; cross-entropy by default.
    schedule: an expression, or an object with the methods `factor` and `drops` of one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    model: Any = "mlp-128"
    data: Any = "digits"
    data_dir: Path | None = None
    features: str | None = None
    label: str | None = None
    val_data: str | None = None
    format: str | None = None
    shape: str | None = None
    classes: int | None = Field(default=None, ge=2)
    fill: float | None = None
    skip_empty: bool = False
    shard: Literal["auto", "file", "row_group", "sample", "off"] = "auto"
    shuffle: int = Field(default=50_000, ge=0)
    cache: Literal["auto", "memory", "disk", "none"] = "auto"
    prefetch: int | None = Field(default=None, ge=0)
    memory: int = Field(default=512, ge=16)
    loss: Callable[..., Any] | None = None
    optimizer: str = "sgd(momentum=0.9)"
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    schedule: Any = "constant"
    clip: float | None = Field(default=None, gt=0)
    batch: int = Field(default=128, ge=1)
    epochs: int = Field(default=10, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**31)
    augment: bool = False
    dtype: Literal["float32", "float64"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    channels_last: bool = False
    compile: bool = False
    recompute: bool = False
    until: str | None = None
    patience: int | None = Field(default=None, ge=1)
    checkpoint_every: str = "epoch(1)"

    @field_validator("model", "data")
    @classmethod
    def _check_present(cls, value: Any) -> Any:
        if value is None or value == "":
            raise ValueError("it is empty: name one")
        return value

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, value: Any) -> Any:
        if isinstance(value, str) or callable(getattr(value, "factor", None)):
            return value
        raise ValueError("write an expression such as 'cosine(warmup=5%)'")

    def check(self) -> None:
        """Read every expression and name now; raises UsageError before anything is started."""
        _ = self.optimizer_spec, self.schedule_spec, self.until_spec, self.checkpoint_point
        if isinstance(self.model, str):
            from paceline import models

            models.find(self.model)
        if isinstance(self.data, str):
            from paceline import data
            from paceline.data.stores import is_url_or_path

            if is_url_or_path(self.data):
                from paceline.data.discovery import check_source

                for pipeline in self.pipelines():
                    if pipeline is not None:
                        check_source(pipeline)
                return
            data.locate(self.data, self.data_dir)
        for name in FOR_URLS:
            if getattr(self, name) != Job.model_fields[name].default:
                raise UsageError(
                    f"{name} is for data by URL, and data is {display_name(self.data)!r}: "
                    "leave it out"
                )

    def pipelines(self) -> tuple[DataPipeline, DataPipeline | None]:
        """How training and validation data by URL are read; raises UsageError."""
        from paceline.data.pipeline import parse_shape, read

        def make(url: str) -> DataPipeline:
            pipeline = read(
                url,
                features=self.features or (),
                label=self.label,
                format=self.format,
                shape=parse_shape(self.shape) if self.shape else None,
                classes=self.classes,
                fill=self.fill,
                skip_empty=self.skip_empty,
            )
            return (
                pipeline.shuffle(self.shuffle)
                .cache(self.cache)
                .prefetch(self.prefetch)
                .shard(self.shard)
                .memory(self.memory)
            )

        return make(self.data), make(self.val_data) if self.val_data else None

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        return parse_optimizer(self.optimizer)

    @property
    def schedule_spec(self) -> Schedule:
        if isinstance(self.schedule, str):
            return parse_schedule(self.schedule)
        live: Schedule = self.schedule
        return live

    @property
    def until_spec(self) -> StopCondition | None:
        return parse_stop_condition(self.until) if self.until else None

    @property
    def checkpoint_point(self) -> RunPoint | None:
        """Every so many epochs or samples; None for never."""
        if self.checkpoint_every == "never":
            return None
        point = read_point(parse_expression(self.checkpoint_every))
        if point.fraction is not None:
            raise UsageError(
                f"checkpoint_every {self.checkpoint_every!r}: "
                "write epoch(1), samples(50000) or never"
            )
        return point

    @property
    def base_lr(self) -> float:
        return self.lr if self.lr is not None else DEFAULT_LR.get(self.optimizer_spec.name, 0.001)

    @property
    def is_plain(self) -> bool:
        """Made of names only, so that it can be written as JSON."""
        named = (self.model, self.data, self.schedule)
        return all(isinstance(value, str) for value in named) and self.loss is None

    def describe(self) -> dict[str, Any]:
        """JSON-able facts for the run folder; live objects are named, not stored."""
        facts = {name: getattr(self, name) for name in type(self).model_fields}
        for name in ("model", "data", "loss"):
            facts[name] = display_name(facts[name])
        facts["schedule"] = str(self.schedule)
        facts["data_dir"] = str(self.data_dir) if self.data_dir else None
        return facts


def display_name(thing: Any) -> str | None:
    if thing is None or isinstance(thing, str):
        return thing
    return getattr(thing, "__qualname__", None) or type(thing).__name__


def build_job(**fields: Any) -> Job:
    """A checked Job, with the first mistake told in one line."""
    try:
        return Job(**fields)
    except ValidationError as error:
        raise UsageError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "job"
    if first["type"] == "extra_forbidden":
        from paceline.errors import suggest_name

        return f"a job has no {name!r}: {suggest_name(name, Job.model_fields)}"
    return f"{name} is {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


class JobRef(BaseModel):
    """Where a job comes from, and how a process on any machine gets the same one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path | None = None
    function: str = "job"
    hash: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
    """The whole job where there is no file, else what the command line changes of it."""

    def resolve(self) -> Job:
        """The job; raises UsageError when the file is missing, broken or has changed."""
        if self.file is None:
            return build_job(**self.fields)
        # Relative where a project was copied: to the folder that the process was started in.
        file = self.file.absolute()
        if self.hash is not None and hash_file(file) != self.hash:
            raise UsageError(f"{file} has changed since the run was started: start it anew")
        job = _read_job_file(file, self.function)
        if not self.fields:
            return job
        return build_job(**{**{n: getattr(job, n) for n in Job.model_fields}, **self.fields})


def refer_to_job(file: Path | None, fields: dict[str, Any]) -> JobRef:
    """A reference to a job file (`path.py`, `path.py:function`, YAML), or to named fields."""
    if file is None:
        return JobRef(fields=fields)
    text, function = str(file), "job"
    if not Path(text).exists() and ":" in text:
        text, function = text.rsplit(":", 1)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"job file {path} does not exist: name a .py or .yaml file")
    return JobRef(file=path.resolve(), function=function, hash=hash_file(path), fields=fields)


def _read_job_file(path: Path, function: str) -> Job:
    if path.suffix in (".yaml", ".yml", ".json"):
        return build_job(**_read_fields(path))
    if path.suffix != ".py":
        raise UsageError(f"job file {path}: a .py, .yaml or .json file is needed")
    module = load_module(path, "paceline_job")
    build = getattr(module, function, None)
    if not callable(build):
        raise UsageError(f"job file {path} has no function {function}(): define one")
    try:
        job = build()
    except PacelineError:
        raise
    except ValidationError as error:
        raise UsageError(f"{function}() in {path}: {_explain(error)}") from error
    except Exception as error:
        raise UsageError(locate_error(error, path)) from error
    if not isinstance(job, Job):
        raise UsageError(f"{function}() in {path} gave {type(job).__name__}: return a paceline.Job")
    return job


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        if path.suffix == ".json":
            value = json.loads(path.read_text(encoding="utf-8"))
        else:
            import yaml

            try:
                value = yaml.safe_load(path.read_text(encoding="utf-8"))
            except yaml.YAMLError as error:
                raise UsageError(
                    f"job file {path} is not YAML: {error}".replace("\n", " ")
                ) from None
    except ValueError as error:
        raise UsageError(f"job file {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"job file {path}: a mapping such as 'model: mlp-128' is needed")
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"job file {path}: key {key!r} is not the name of a field")
    return value

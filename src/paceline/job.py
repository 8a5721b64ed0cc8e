"""`Job`: what to train. Torch-free, so that commands can read and check a job instantly.

A job of names (`Job(model="mlp-128", data="digits")`) travels as JSON. A job file (a Python file
that defines `job()`, or YAML) travels by reference: path, function and hash. A job with live
objects is sent only to child processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from paceline.errors import PacelineError, UsageError, suggest_name
from paceline.options import DATA_FILES, TRAINING, Option, explain
from paceline.plugins import hash_file, load_module, locate_error
from paceline.specs.expression import parse_expression
from paceline.specs.optimizer import OptimizerSpec, parse_optimizer
from paceline.specs.point import RunPoint, read_point
from paceline.specs.schedule import Schedule, parse_schedule
from paceline.specs.stop_condition import StopCondition, parse_stop_condition

if TYPE_CHECKING:
    from paceline.data.dataset import Validation
    from paceline.data.pipeline import DataPipeline

DEFAULT_LR = {"sgd": 0.1, "adagrad": 0.01, "adadelta": 1.0}
"""Learning rate by optimizer, if none is given; 0.001 for all others."""


def _from_files(metavar: str | None = None, default: str | None = None) -> Option:
    """Returns the option of a field that applies only to data that is a path or URL."""
    return Option(group=DATA_FILES, metavar=metavar, default=default)


class Job(BaseModel):
    """Model, data and training settings. Text fields are names or expressions.

    model: a name, a torch module, or a function without arguments that builds one (seeded).
    data: a name, a path, a URL, or (train, val, test) of pipelines (`paceline.data.read`), tables,
        torch datasets, DataLoaders or (inputs, targets) pairs, or a function without arguments
        that returns them; val and test may be None.
    loss: a function of (output, target) that returns the mean loss; cross-entropy by default.
    schedule: an expression, or an object with the methods `factor` and `drops` of one.

    The string below a field is its help text on the command line.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    option_group: ClassVar[str] = TRAINING
    option_negatives: ClassVar[bool] = True  # Options can switch off what a job file switches on.

    model: Annotated[Any, Option(metavar="NAME")] = "mlp-128"
    """Model name."""
    data: Annotated[Any, Option(metavar="NAME|URL")] = "digits"
    """Dataset name, path or URL."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files of named datasets, as DIR/<dataset>/<files>."""
    features: Annotated[str | None, _from_files("COLUMNS")] = None
    """Feature columns, comma-separated."""
    label: Annotated[str | None, _from_files("COLUMN")] = None
    """Label column."""
    val_data: Annotated[str | None, _from_files("URL", "a tenth of the training data")] = None
    """Validation data."""
    validation: Annotated[
        str | None,
        Option(
            metavar="ROWS",
            default="the dataset's validation rows, or a tenth of its training rows",
        ),
    ] = None
    """Validation rows: none, test (the test set), or a fraction or number of training rows."""
    scaling: Annotated[
        Literal["standard", "unit", "none"] | None,
        Option(default="standard for named datasets, unit for other pixels"),
    ] = None
    """Scaling of pixels: standard (mean 0, deviation 1 over the training set), unit (0 to 1) or
    none (0 to 255)."""
    limit: Annotated[int | None, Option(metavar="ROWS", default="all rows")] = Field(
        default=None, ge=10
    )
    """Use at most this many rows of each part of a named dataset, for quick trials."""
    row_by_row: bool = False
    """Fetch and stack single rows of a batch, as from a generator, to compare the cost of input."""
    format: Annotated[str | None, _from_files(default="by file suffix")] = None
    """File format, for example parquet, tfrecord or csv."""
    shape: Annotated[str | None, _from_files("SHAPE")] = None
    """Shape of one row of features, for example 1x28x28."""
    classes: Annotated[int | None, _from_files(default="counted")] = Field(default=None, ge=2)
    """Number of classes."""
    fill: Annotated[float | None, _from_files(default="nulls are an error")] = None
    """Value to substitute for nulls."""
    skip_empty: Annotated[bool, _from_files()] = False
    """Skip files without rows."""
    shard: Annotated[Literal["auto", "file", "row_group", "sample", "off"], _from_files("UNIT")] = (
        "auto"
    )
    """Unit assigned to workers: file, row_group, sample or auto; off: each reads all data."""
    shuffle: Annotated[int, _from_files("ROWS")] = Field(default=50_000, ge=0)
    """Shuffle buffer size in rows; 0 disables shuffling."""
    cache: Annotated[Literal["auto", "memory", "disk", "none"], _from_files()] = "auto"
    """Cache for decoded data between epochs."""
    prefetch: Annotated[int | None, _from_files(default="tuned while training")] = Field(
        default=None, ge=0
    )
    """Number of batches to prepare in advance."""
    memory: Annotated[int, _from_files("MB")] = Field(default=512, ge=16)
    """Memory per worker for data, in MB."""
    loss: Annotated[Callable[..., Any] | None, Option(hidden=True)] = None
    optimizer: Annotated[str, Option(metavar="EXPR")] = "sgd(momentum=0.9)"
    """Optimizer, for example 'adamw(weight_decay=0.05)'."""
    lr: Annotated[float | None, Option(default="depends on the optimizer")] = Field(
        default=None, gt=0, allow_inf_nan=False
    )
    """Learning rate for the global batch."""
    schedule: Annotated[Any, Option(metavar="EXPR")] = "constant"
    """Learning rate schedule, for example 'milestones(80, 130)' or 'cosine(warmup=5%)'."""
    clip: float | None = Field(default=None, gt=0)
    """Clip the gradient to this norm."""
    batch: int = Field(default=128, ge=1)
    """Global batch size, split across all workers."""
    adapt_batch: Annotated[int | None, Option(metavar="MAX", default="constant batch")] = Field(
        default=None, ge=2
    )
    """Let the global batch grow to MAX by the gradient noise scale; the learning rate follows."""
    micro_batch: Annotated[int | None, Option(default="a worker's whole share")] = Field(
        default=None, ge=1
    )
    """Samples per forward pass; the gradients of a larger share are accumulated."""
    epochs: int = Field(default=10, ge=1)
    """Number of epochs."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the initial weights, the sample order and the augmentation."""
    augment: bool = False
    """Augment training images with random flips and padded crops."""
    dtype: Literal["float32", "float64"] = "float32"
    """Data type of the model and its inputs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    channels_last: bool = False
    """Store images with channels last, which often makes convolutions faster."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, then faster."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    until: Annotated[str | None, Option(metavar="CONDITION")] = None
    """Stop when a condition is met, for example "val_acc>=0.97"."""
    patience: Annotated[int | None, Option(metavar="EPOCHS")] = Field(default=None, ge=1)
    """Stop after this many epochs without improvement in val_loss."""
    checkpoint_every: Annotated[str, Option(metavar="INTERVAL")] = "epoch(1)"
    """Checkpoint interval: epoch(1), samples(50000) or never."""

    @field_validator("model", "data")
    @classmethod
    def _check_present(cls, value: Any) -> Any:
        if value is None or value == "":
            raise ValueError("must not be empty")
        return value

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, value: Any) -> Any:
        if isinstance(value, str) or callable(getattr(value, "factor", None)):
            return value
        raise ValueError("must be an expression, for example 'cosine(warmup=5%)'")

    def check(self) -> None:
        """Parses every expression and looks up every name; raises UsageError."""
        _ = self.optimizer_spec, self.schedule_spec, self.until_spec, self.checkpoint_point
        if isinstance(self.model, str):
            from paceline import models

            models.find(self.model)
        validation = self.validation_spec
        if validation is not None and self.val_data is not None:
            raise UsageError("--validation and --val-data cannot be combined; remove one of them")
        for option in ("limit", "row_by_row"):
            if getattr(self, option) and not self.has_named_data:
                raise UsageError(
                    f"{option} applies only to named datasets, and data is "
                    f"{display_name(self.data)!r}; remove {option}"
                )
        if isinstance(self.data, str):
            from paceline import data
            from paceline.data.stores import is_url_or_path

            if is_url_or_path(self.data):
                from paceline.data.pipeline import check_source

                for pipeline in self.pipelines():
                    if pipeline is not None:
                        check_source(pipeline)
                return
            data.locate(self.data, self.data_dir)
        for name, field in Job.model_fields.items():
            if not any(isinstance(o, Option) and o.group == DATA_FILES for o in field.metadata):
                continue
            value = getattr(self, name)
            # Every worker can train on all rows of any dataset, and prefetch its batches.
            applies = name == "prefetch" or (name, value) == ("shard", "off")
            if value != field.default and not applies:
                raise UsageError(
                    f"{name} applies only to data that is a path or URL, and data is "
                    f"{display_name(self.data)!r}; remove {name}"
                )

    @property
    def has_named_data(self) -> bool:
        from paceline.data.stores import is_url_or_path

        return isinstance(self.data, str) and not is_url_or_path(self.data)

    def pipelines(self) -> tuple[DataPipeline, DataPipeline | None]:
        """Returns the pipelines that read training and validation files; raises UsageError."""
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
            ordered = pipeline.shuffle(self.shuffle).shard(self.shard)
            return ordered.cache(self.cache).prefetch(self.prefetch).memory(self.memory)

        return make(self.data), make(self.val_data) if self.val_data else None

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        return parse_optimizer(self.optimizer)

    @property
    def validation_spec(self) -> Validation | None:
        from paceline.data.dataset import parse_validation

        return parse_validation(self.validation) if self.validation else None

    @property
    def schedule_spec(self) -> Schedule:
        given: str | Schedule = self.schedule
        return parse_schedule(given) if isinstance(given, str) else given

    @property
    def until_spec(self) -> StopCondition | None:
        return parse_stop_condition(self.until) if self.until else None

    @property
    def checkpoint_point(self) -> RunPoint | None:
        """Checkpoint interval in epochs or samples; None for never."""
        if self.checkpoint_every == "never":
            return None
        point = read_point(parse_expression(self.checkpoint_every))
        if point.fraction is not None:
            raise UsageError(
                f"checkpoint_every {self.checkpoint_every!r} is not an interval; "
                "use epoch(1), samples(50000) or never"
            )
        return point

    @property
    def base_lr(self) -> float:
        return self.lr if self.lr is not None else DEFAULT_LR.get(self.optimizer_spec.name, 0.001)

    @property
    def is_plain(self) -> bool:
        """True if the job contains only names and can be written as JSON."""
        named = (self.model, self.data, self.schedule)
        return all(isinstance(value, str) for value in named) and self.loss is None

    def describe(self) -> dict[str, Any]:
        """Returns the fields as JSON-able values; live objects are replaced by their names."""
        facts = {name: getattr(self, name) for name in type(self).model_fields}
        for name in ("model", "data", "loss"):
            facts[name] = display_name(facts[name])
        facts["schedule"] = str(self.schedule)
        facts["data_dir"] = str(self.data_dir) if self.data_dir else None
        return facts


def display_name(thing: Any) -> str | None:
    """Returns a name for a model, dataset or function; None for None."""
    if thing is None or isinstance(thing, str):
        return thing
    return getattr(thing, "__qualname__", None) or type(thing).__name__


def build_job(**fields: Any) -> Job:
    """Builds a Job; raises UsageError with the first problem in one line."""
    try:
        return Job(**fields)
    except ValidationError as error:
        raise UsageError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][0])
        return f"unknown job field {name!r}; {suggest_name(name, Job.model_fields)}"
    return explain(error)


class JobRef(BaseModel):
    """Reference to a job, from which a process on any machine builds the same one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Path | None = None
    function: str = "job"
    hash: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
    """All fields of a job without a file; otherwise the fields that override the file."""

    def resolve(self) -> Job:
        """Returns the job; raises UsageError if its file is missing, invalid or has changed."""
        if self.file is None:
            return build_job(**self.fields)
        # In a copied project the path is relative to the directory the process was started in.
        file = self.file.absolute()
        if self.hash is not None and hash_file(file) != self.hash:
            raise UsageError(f"{file} has changed since the run was started; start the run again")
        job = _read_job_file(file, self.function)
        if not self.fields:
            return job
        return build_job(**{**{n: getattr(job, n) for n in Job.model_fields}, **self.fields})


def refer_to_job(file: Path | None, fields: dict[str, Any]) -> JobRef:
    """Returns a reference to a job file (`path.py`, `path.py:function`, YAML) or to fields."""
    if file is None:
        return JobRef(fields=fields)
    text, function = str(file), "job"
    if not Path(text).exists() and ":" in text:
        text, function = text.rsplit(":", 1)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"job file {path} was not found")
    return JobRef(file=path.resolve(), function=function, hash=hash_file(path), fields=fields)


def _read_job_file(path: Path, function: str) -> Job:
    if path.suffix in (".yaml", ".yml", ".json"):
        return build_job(**read_mapping(path, f"job file {path}"))
    if path.suffix != ".py":
        raise UsageError(f"job file {path} is not supported; use a .py, .yaml or .json file")
    module = load_module(path, "paceline_job")
    build = getattr(module, function, None)
    if not callable(build):
        raise UsageError(f"job file {path} has no function {function}(); define it")
    try:
        job = build()
    except PacelineError:
        raise
    except ValidationError as error:
        raise UsageError(f"{function}() in {path}: {_explain(error)}") from error
    except Exception as error:
        raise UsageError(locate_error(error, path)) from error
    if not isinstance(job, Job):
        raise UsageError(
            f"{function}() in {path} returned {type(job).__name__}; it must return a paceline.Job"
        )
    return job


def read_mapping(path: Path, subject: str) -> dict[str, Any]:
    """Reads a YAML or JSON file of named values; raises UsageError that begins with `subject`."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{subject} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        form = "JSON" if path.suffix == ".json" else "YAML"
        raise UsageError(f"{subject} is not valid {form}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{subject} must contain a mapping, for example 'model: mlp-128'")
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"{subject}: key {key!r} must be text")
    return value

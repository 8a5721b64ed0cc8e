"""Matrix files: models x data x strategies x batches x workers x seeds."""

import itertools
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from paceline.errors import UsageError, suggest_name
from paceline.job import Job, build_job
from paceline.launch.arm_settings import ArmSettings
from paceline.launch.run import check_sizes
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import parse_strategy

AXES = ("model", "data", "batch", "seed")
"""Job fields that a matrix varies; the others are equal in all runs."""

SCALES = ("full", "small")

JobFields = dict[str, Any]
"""Fields of `Job` as YAML gives them; `Job` validates them."""


class _MatrixPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MatrixArm(ArmSettings):
    """A strategy of a matrix, with its own settings: of its job, its place and its runs."""

    strategy: str
    arm: str | None = None
    """Name in tables; the strategy text by default."""
    workers: int | None = Field(default=None, ge=1)
    stands_for: str | None = None
    """Arm of the published study that it is shown next to."""
    batch_times: float = Field(default=1.0, gt=0)
    epochs_times: float = Field(default=1.0, gt=0)
    job: JobFields = Field(default_factory=dict)


class ModelAndData(_MatrixPart):
    """A model with its data, and the settings of this pair."""

    model: str
    data: str
    batches: list[int] | None = None
    job: JobFields = Field(default_factory=dict)
    stands_for: str | None = None
    """Workload of the published study that these runs are shown next to."""
    published_batches: list[int] | None = None
    """Batches of the study, one for each of `batches`, if they differ."""

    @model_validator(mode="after")
    def _check_batches(self) -> Self:
        if self.published_batches is not None and (
            self.batches is None or len(self.batches) != len(self.published_batches)
        ):
            raise ValueError("published_batches must have as many entries as batches")
        return self


class Matrix(ArmSettings):
    """Contents of the file; `list_cells` expands it to runs. Its settings hold for all arms."""

    title: str = "Matrix"
    about: str = ""
    study: str | None = None
    """Publication to compare with in `report --against published`."""
    job: JobFields = Field(default_factory=dict)
    work: list[ModelAndData] = Field(default_factory=list)
    models: list[str] = Field(default_factory=list)
    data: list[str] = Field(default_factory=list)
    strategies: list[MatrixArm]
    batches: list[int] = Field(default_factory=lambda: [128])
    batch_is: Literal["global", "per-worker"] = "global"
    workers: list[int] = Field(default_factory=lambda: [2])
    seeds: list[int] = Field(default_factory=lambda: [0])
    small: JobFields = Field(default_factory=dict)
    small_real: JobFields = Field(default_factory=dict)
    """Changes to `small` for real data, used by `paceline reproduce --data-dir`."""

    @field_validator("strategies", mode="before")
    @classmethod
    def _read_arms(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [{"strategy": part} if isinstance(part, str) else part for part in value]
        return value

    @field_validator("seeds", mode="before")
    @classmethod
    def _count_seeds(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) else value

    @field_validator("work", "strategies", "batches", "workers", "seeds")
    @classmethod
    def _check_distinct(cls, value: list[Any]) -> list[Any]:
        if any(part in value[:i] for i, part in enumerate(value)):
            raise ValueError("an entry is listed twice; every run of a matrix must be unique")
        return value

    @property
    def pairs(self) -> list[ModelAndData]:
        crossed = [
            ModelAndData(model=m, data=d) for m, d in itertools.product(self.models, self.data)
        ]
        return [*self.work, *crossed]


class MatrixCell(ArmSettings):
    """One run of a matrix, with the settings of its arm."""

    name: str
    """Its folder."""
    task: str
    """The comparison it belongs to: model, data and batch as the matrix defines them."""
    arm: str
    strategy: str
    workers: int
    job: JobFields
    published: str = ""
    """Published result to compare with, as workload/batch/arm; empty for none."""

    @property
    def spec(self) -> Strategy:
        return parse_strategy(self.strategy)

    @property
    def labels(self) -> dict[str, str]:
        published = {"published": self.published} if self.published else {}
        return {"task": self.task, "arm": self.arm, **published}

    @property
    def facts(self) -> JobFields:
        """Row of matrix.json, without settings that are not given."""
        empty = {name for name in ("where", "run", "published") if not getattr(self, name)}
        return self.model_dump(mode="json", exclude=empty)


CountWorkers = Callable[[ArmSettings, int | None, int], int]
"""Returns the number of workers of an arm: as its place has them, its own, or that of the axis."""


def count_workers_here(settings: ArmSettings, own: int | None, axis: int) -> int:
    return own or axis


def read_matrix(name: str, *, scale: str = "full", real: bool = False) -> Matrix:
    """Reads a matrix file, or a built-in one by name; `small` applies its `small:` part.

    With `real`, the small part for real data is applied on top of it.
    """
    if scale not in SCALES:
        raise UsageError(f"--scale {scale!r}: must be one of {', '.join(SCALES)}")
    path = find_matrix(name)
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"matrix {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"matrix {path} is not YAML: {error}".replace("\n", " ")) from None
    if not isinstance(plain, dict):
        raise UsageError(f"matrix {path}: must be a mapping with strategies, work and so on")
    if scale == "small":
        plain = apply_small(plain, path, "small")
        if real:
            plain = apply_small(plain, path, "small_real")
    try:
        matrix = Matrix(**plain)
    except ValidationError as error:
        raise UsageError(f"matrix {path}: {explain_matrix_error(error)}") from None
    arms = [arm.located_in(path.parent) for arm in matrix.strategies]
    return matrix.located_in(path.parent).model_copy(update={"strategies": arms})


def apply_small(plain: JobFields, path: Path, part: str) -> JobFields:
    """Applies the `small:` part of a matrix, or another one; fields of `job` are merged."""
    small = plain.get(part)
    if not isinstance(small, dict) or not small:
        raise UsageError(f"matrix {path} has no part '{part}:'; remove --scale, or add one")
    mixed = {**plain, **small}
    if isinstance(plain.get("job"), dict) and isinstance(small.get("job"), dict):
        mixed["job"] = {**plain["job"], **small["job"]}
    return mixed


def find_matrix(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    shipped = {p.stem: p for p in list_shipped()}
    if name in shipped:
        return shipped[name]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(
            f"matrix {name} does not exist; use a file, or one of {', '.join(shipped)}"
        )
    raise UsageError(f"unknown matrix {name!r}; {suggest_name(name, shipped)}")


def list_shipped() -> list[Path]:
    folder = Path(str(resources.files("paceline"))) / "matrices"
    return sorted(folder.glob("*.yaml"))


def explain_matrix_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "it"
    if first["type"] == "extra_forbidden":
        return f"{where} is not a field of a matrix"
    if first["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def list_cells(
    matrix: Matrix,
    given: JobFields,
    command: ArmSettings | None = None,
    count: CountWorkers = count_workers_here,
) -> list[MatrixCell]:
    """Returns all runs in order of execution; `given` replaces fields of every job.

    `command` has settings that replace those of the matrix, but not those of an arm.

    Seed by seed and strategies innermost, so that a slow hour of the machine falls on all
    strategies alike, and a matrix that is cut off has whole comparisons rather than one column.
    """
    if not matrix.pairs:
        raise UsageError("the matrix has no work; add 'work:', or 'models:' and 'data:'")
    for name in AXES:
        if name in matrix.job:
            raise UsageError(
                f"the matrix has {name!r} under 'job:', but it is one of its axes; "
                "write it as a list next to 'job:'"
            )
    common = (command or ArmSettings()).on_top_of(matrix)
    counts = {
        (number, axis): count(arm.on_top_of(common), arm.workers, axis)
        for number, arm in enumerate(matrix.strategies)
        for axis in matrix.workers
    }
    cells = [
        make_cell(matrix, work, arm, batch, counts[number, axis], seed, given, common)
        for seed in matrix.seeds
        for work in matrix.pairs
        for batch in work.batches or matrix.batches
        for axis in matrix.workers
        for number, arm in enumerate(matrix.strategies)
    ]
    # An arm with its own number of workers occurs once, regardless of the axis.
    distinct = {cell.name: cell for cell in cells}
    for cell in cells:
        if distinct[cell.name] != cell:
            raise UsageError(
                f"two arms are called {cell.arm!r} and differ in their settings; "
                "name them with 'arm:'"
            )
    for cell in distinct.values():
        # All runs are validated before the first one starts; data is located later.
        try:
            check_sizes(build_job(**cell.job).batch, cell.spec, cell.workers)
        except UsageError as error:
            raise UsageError(f"run {cell.name}: {error}") from None
    return list(distinct.values())


def make_cell(
    matrix: Matrix,
    work: ModelAndData,
    arm: MatrixArm,
    batch: int,
    workers: int,
    seed: int,
    given: JobFields,
    common: ArmSettings,
) -> MatrixCell:
    strategy = parse_strategy(arm.strategy)
    count = strategy.worker_count(workers)
    chosen = arm.on_top_of(common)
    if matrix.batch_is == "per-worker" and chosen.where.get("select") == ["auto"]:
        raise UsageError(
            "batch_is: per-worker and select: auto cannot be combined: the number of machines is "
            "not known in advance; use batch_is: global"
        )
    label = arm.arm or str(strategy)
    whole = batch * count if matrix.batch_is == "per-worker" else batch
    fields = {**matrix.job, **work.job, **arm.job, **given}
    epochs = fields.get("epochs", Job.model_fields["epochs"].default)
    per_worker = " per worker" if matrix.batch_is == "per-worker" else ""
    job = {
        **fields,
        "model": work.model,
        "data": work.data,
        "batch": scale_count(whole, arm.batch_times),
        "epochs": scale_count(epochs, arm.epochs_times),
        "seed": seed,
    }
    slug = re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")[:60]
    published = ""
    if work.stands_for and arm.stands_for:
        there = work.published_batches or work.batches or matrix.batches
        number = (work.batches or matrix.batches).index(batch)
        published = f"{work.stands_for}/{there[number]}/{arm.stands_for}"
    parts = (work.data, work.model, f"b{batch}", f"w{count}", slug, f"seed{seed}")
    return MatrixCell(
        name="-".join(parts),
        task=f"{work.model} on {work.data}, batch {batch}{per_worker}",
        arm=label,
        strategy=str(strategy),
        workers=count,
        job=job,
        published=published,
        where=chosen.where,
        run=chosen.run,
    )


def scale_count(count: Any, times: float) -> Any:
    """Returns an integer of at least 1; the job rejects other values."""
    return max(1, round(count * times)) if times != 1 and isinstance(count, int) else count


def list_jobs(cells: list[MatrixCell]) -> list[Job]:
    """Returns one job per model and dataset."""
    first: dict[tuple[str, str], MatrixCell] = {}
    for cell in cells:
        first.setdefault((cell.job["model"], cell.job["data"]), cell)
    return [build_job(**cell.job) for cell in first.values()]

"""`paceline reproduce`: repeats a published study, and shows its tables next to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.cli.commands import (
    argument,
    command,
    given_options,
    make_log,
    refuse_together,
    require_with,
)
from paceline.cli.placement import MatrixPlaces, Places, place_in_twin
from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.launch.settings import ProcessSettings
from paceline.options import PLACEMENT, RUN, Option, field_values, settings

if TYPE_CHECKING:
    from paceline.launch.matrix_file import Matrix, MatrixCell
    from paceline.launch.placement import Placement
    from paceline.launch.reproduction import Place, PreparedStudy, Study
    from paceline.report.comparison import Comparison
    from paceline.report.document import ReportOpening
    from paceline.report.runs import RunGroup
    from paceline.report.tables import ReportTable

MAX_WIDTH, TEXT_WIDTH, NOTE_WIDTH = 600, 60, 100
COSTS_ONLY = "cost"
"""Depth of full studies in virtual time: real gradients of whole studies would take days."""


@settings(RUN)
class ReproduceOptions:
    scale: Literal["full", "small"] = "small"
    """small takes minutes, on few rows of the data; full repeats the whole study."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files of named datasets; without it, small uses digits."""
    out: Annotated[
        Path | None, Option(short="o", metavar="DIR", default="runs/reproduce-STUDY-SCALE")
    ] = None
    """Directory for all runs and the report; the same command resumes them."""
    seeds: int | None = None
    """Number of runs per arm, with consecutive seeds, instead of the matrix's."""
    tensorflow: Annotated[Path | None, Option(metavar="PYTHON")] = None
    """Python with TensorFlow, for the arms that it trains. Default: that of `make peers`."""
    retry: bool = False
    """Repeat failed runs."""
    force: bool = False
    """Start over in --out."""
    quiet: bool = False
    """Do not show progress."""


@settings(PLACEMENT)
class ReproducePlace:
    pool: Annotated[Path | None, Option(metavar="POOL")] = None
    """Pool file: run on these machines over SSH."""
    engine: Annotated[Literal["ray", "spark"] | None, Option(metavar="ray|spark")] = None
    """Run on a Ray or Spark cluster."""
    address: str | None = None
    """Address of the Ray cluster, for example 10.0.0.1:6379."""
    master: Annotated[str | None, Option(metavar="URL")] = None
    """Spark master, for example spark://10.0.0.1:7077."""
    twin: bool = False
    """Simulate the machines of the study."""


@command
def reproduce(
    study: Annotated[str, argument("Study: switch, ps-allreduce, spark-tensorflow or pool.")],
    /,
    *,
    options: ReproduceOptions,
    where: ReproducePlace,
    processes: ProcessSettings,
) -> int:
    from paceline.launch.reproduction import find_study, prepare_study
    from paceline.launch.tensorflow_run import find_tensorflow

    chosen, place = find_study(study), read_place(where)
    place = replace(place, tensorflow=find_tensorflow(options.tensorflow))
    if options.scale == "full" and options.data_dir is None and not place.twin:
        raise UsageError("--scale full requires --data-dir: the whole study uses its own data")
    if options.seeds is not None and options.seeds < 1:
        raise UsageError(f"--seeds must be at least 1, got {options.seeds}")
    is_real = options.data_dir is not None
    prepared = prepare_study(chosen, options.scale, place, real=is_real)
    out = options.out or Path("runs") / f"reproduce-{study}-{options.scale}"
    statements = describe_conditions(prepared, options, place)
    for text in statements:
        print(text)
    comparison = run_study(prepared, options, processes, place, out)
    show_study(chosen, prepared, statements, out)
    return 1 if comparison["runs_failed"] else 0


def read_place(where: ReproducePlace) -> Place:
    """Raises UsageError for options that cannot be combined."""
    from paceline.launch.reproduction import Place

    reason = "a study is repeated at one place; remove one of them"
    if where.pool is not None:
        refuse_together("--pool", {"engine": where.engine, "twin": where.twin}, reason)
    if where.twin:
        refuse_together("--twin", {"engine": where.engine}, reason)
    if where.engine != "ray":
        require_with("--engine ray", {"address": where.address}, "it names a Ray cluster")
    if where.engine != "spark":
        require_with("--engine spark", {"master": where.master}, "it names a Spark cluster")
    names = {"address": where.address, "master": where.master}
    engine_options = {name: value for name, value in names.items() if value is not None}
    return Place(where.pool, where.engine, engine_options, where.twin)


def describe_conditions(
    prepared: PreparedStudy, options: ReproduceOptions, place: Place
) -> list[str]:
    """Returns sentences on how far this repetition is from the study."""
    study, matrix = prepared.study, prepared.matrix
    data = sorted({work.data for work in matrix.pairs})
    kind = "real data" if options.data_dir is not None else "bundled data"
    found = [
        f"Study {study.name}, scale {options.scale}, {place.describe()}: "
        f"{', '.join(data)} ({kind}), {len(matrix.seeds)} seed"
        f"{'s' if len(matrix.seeds) != 1 else ''}."
    ]
    if options.scale == "small":
        found.append(
            "A small repetition: fewer epochs, rows or processes and smaller networks than in the "
            "study, so that it shows how to measure and which direction effects have, not its "
            "numbers. Column `differs in` states the differences of each row."
        )
    if place.twin and options.scale == "full":
        found.append("Simulated with costs only: seconds, without accuracy.")
    return found


def run_study(
    prepared: PreparedStudy,
    options: ReproduceOptions,
    processes: ProcessSettings,
    place: Place,
    out: Path,
) -> Comparison:
    from paceline.launch.arm_settings import ArmSettings
    from paceline.launch.compare_runs import MatrixOptions, run_matrix

    matrix: Matrix = prepared.matrix
    if options.seeds is not None:
        matrix = matrix.model_copy(update={"seeds": list(range(options.seeds))})
    given = {} if options.data_dir is None else {"data_dir": str(options.data_dir.resolve())}
    matrix_options = MatrixOptions(
        **field_values(processes, ProcessSettings),
        out=out,
        given=given,
        command=ArmSettings(run=given_options(processes)),
        retry=options.retry,
        force=options.force,
        progress=not options.quiet,
    )
    with Places(make_log(quiet=options.quiet)) as shared:
        places = StudyPlaces(shared, out)
        places.study, places.tensorflow = prepared.study, place.tensorflow
        if place.twin and options.scale == "full":
            places.depth = COSTS_ONLY
        return run_matrix(matrix, matrix_options, places=places)


class StudyPlaces(MatrixPlaces):
    """Places simulated runs on the machines that the study had for their model."""

    study: Study
    depth = "learn"

    def _place(self, cell: MatrixCell, job: JobRef) -> Placement:
        if cell.twin is None:
            return super()._place(cell, job)
        where = {**cell.where, "twin": self.study.cluster_of(cell.job["model"])}
        return place_in_twin(cell.model_copy(update={"where": where}), job, self.depth)


def show_study(study: Study, prepared: PreparedStudy, statements: list[str], out: Path) -> None:
    """Prints the tables and writes them with the charts as a report."""
    from paceline.report.reproduction.opening import make_opening
    from paceline.report.writer import write_report

    openings: list[ReportOpening] = []

    def open_report(tasks: Sequence[RunGroup]) -> ReportOpening:
        opening = make_opening(study.name, statements, tasks, prepared.omitted)
        openings.append(opening)
        return opening

    report = out / "report.html"
    write_report(
        [out], report, out / "report.md", title=prepared.matrix.title, tables=out / "tables",
        make_opening=open_report,
    )  # fmt: skip
    for sheet in openings[0].sheets:
        print_sheet(sheet)
    for text in prepared.omitted:
        print(f"omitted arm: {text}")
    print(f"report: {report}")


def print_sheet(sheet: ReportTable) -> None:
    """Prints a table at its full width; long headings take several lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=Text(sheet.title), title_justify="left", pad_edge=False)
    for name, side in zip(sheet.headers, sheet.align("left", "right"), strict=True):
        justify: Literal["left", "right"] = "left" if side == "left" else "right"
        width = TEXT_WIDTH if side == "left" else None
        heading = Text(name.replace(", ", ",\n"))
        table.add_column(heading, justify=justify, no_wrap=width is None, max_width=width)
    for row in sheet.formatted_rows():
        table.add_row(*map(Text, row))
    console = Console(width=MAX_WIDTH)
    console.print(table, soft_wrap=True)
    if sheet.note:
        console.print(Text(sheet.note), width=NOTE_WIDTH)
    print()

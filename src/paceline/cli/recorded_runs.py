"""Commands on recorded runs: `paceline evaluate`, `report`, `dashboard`, `profile`, `export`."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.errors import UsageError
from paceline.options import Option, settings


@settings()
class EvaluateOptions:
    data: Annotated[str | None, Option(metavar="NAME|URL", default="the data of the run")] = None
    """Dataset name, path or URL."""
    data_dir: Annotated[Path | None, Option(metavar="DIR")] = None
    """Directory with the original files of named datasets, as DIR/<dataset>/<files>."""
    json: bool = False
    """Print the result as JSON."""


@command
def evaluate(
    folder: Annotated[Path, argument("Folder of a finished run.")],
    /,
    *,
    options: EvaluateOptions,
) -> None:
    from paceline.trained_model import evaluate as evaluate_run

    result = evaluate_run(folder, data=options.data, data_dir=options.data_dir)
    if options.json:
        print(json.dumps(result))
        return
    accuracy = result["test_acc"]
    known = "not defined (no classes)" if accuracy is None else f"{accuracy:.4f}"
    print(
        f"{result['data']} (test): loss {result['test_loss']:.4f}, accuracy {known}, "
        f"{result['predictions']:,} predictions"
    )


@settings()
class ReportOptions:
    out: Annotated[tuple[Path, ...], Option(short="o", metavar="FILE")] = (Path("report.html"),)
    """File to write, .html or .md. Repeatable."""
    title: str = "Paceline report"
    """Title of the report."""
    target: Annotated[
        float | None,
        Field(gt=0, le=1),
        Option(metavar="ACCURACY", default="highest that all runs reached"),
    ] = None
    """Validation accuracy for the time-to-accuracy comparison, 0 to 1."""
    against: Literal["published"] | None = None
    """Show the results of published studies next to these runs."""
    figures: Annotated[Path | None, Option(metavar="DIR")] = None
    """Write every chart as SVG and PNG to this directory."""
    tables: Annotated[Path | None, Option(metavar="DIR")] = None
    """Write every table as CSV and LaTeX to this directory."""


@command
def report(
    *folders: Annotated[Path, argument("Run folders, or directories of run folders.")],
    options: ReportOptions,
) -> None:
    from paceline.report.writer import write_report

    if not folders:
        raise UsageError("a run folder is required, for example `paceline report runs/first`")
    for path in write_report(
        folders,
        *options.out,
        title=options.title,
        target=options.target,
        published=options.against == "published",
        figures=options.figures,
        tables=options.tables,
    ):
        print(f"report: {path}")


@settings()
class DashboardOptions:
    port: Annotated[int, Field(ge=0, le=65535), Option(metavar="PORT")] = 8321
    """Port to listen on; 0 picks a free port."""
    host: Annotated[str, Option(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; addresses other than localhost require a token."""
    token: bool = False
    """Require a token on localhost too."""


@command
def dashboard(
    folder: Annotated[Path, argument("Run folder, or a directory of run folders.")],
    /,
    *,
    options: DashboardOptions,
) -> None:
    from paceline.dashboard.server import Dashboard

    board = Dashboard(folder, host=options.host, port=options.port, ask_token=options.token)
    print(f"dashboard: {board.url}", flush=True)  # Immediately, also for a reader of a pipe.
    if not board.on_loopback:
        print(
            "paceline: anyone with this address can see the runs; the connection is not encrypted",
            file=sys.stderr,
        )
    # SIGTERM ends it like Ctrl-C: exit status 130, and the port is released.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    board.serve()


@settings()
class ProfileOptions:
    top: Annotated[int, Field(ge=1)] = 20
    """Number of operators to show."""
    csv: Annotated[Path | None, Option(metavar="FILE")] = None
    """Write all operators to a CSV file."""


@command
def profile(
    *folders: Annotated[Path, argument("One run folder, or two to compare.")],
    options: ProfileOptions,
) -> None:
    from rich.console import Console

    from paceline.report.operator_profile import make_table, read_profile, write_csv

    if len(folders) not in (1, 2):
        raise UsageError(f"one or two run folders are required, got {len(folders)}")
    profiles = [read_profile(folder) for folder in folders]
    Console().print(make_table(profiles, options.top))
    if options.csv is not None:
        write_csv(profiles, options.csv)
        print(f"written: {options.csv}")


@settings()
class ExportOptions:
    form: Annotated[Literal["chrome", "csv", "tensorboard"], Option(name="as")]
    """Output format; chrome is a trace for Perfetto."""
    out: Annotated[Path | None, Option(short="o", default="inside the run folder")] = None
    """File or directory to write."""
    follow: bool = False
    """Keep exporting while the run is in progress (tensorboard only)."""


@command
def export(folder: Annotated[Path, argument("Run folder.")], /, *, options: ExportOptions) -> None:
    form, out = options.form, options.out
    if options.follow and form != "tensorboard":
        raise UsageError(f"--follow requires --as tensorboard: --as {form} is written once")
    from paceline.report import export as exports

    if form == "chrome":
        written = [exports.write_trace(folder, out or folder / "trace.json")]
    elif form == "csv":
        written = exports.write_csv_files(folder, out or folder / "csv")
    else:
        logs = out or folder / "tensorboard"
        written = [exports.write_tensorboard(folder, logs, follow=options.follow)]
    for path in written:
        print(f"written: {path}")

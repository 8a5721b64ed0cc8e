"""`paceline export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from paceline.cli.commands import argument, command
from paceline.errors import UsageError
from paceline.options import Option


@dataclass(frozen=True, kw_only=True)
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
    if form == "chrome":
        from paceline.report.chrome_trace import write_trace

        written = [write_trace(folder, out or folder / "trace.json")]
    elif form == "csv":
        from paceline.report.csv_export import write_csv_files

        written = list(write_csv_files(folder, out or folder / "csv"))
    else:
        from paceline.report.tensorboard import write_tensorboard

        written = [write_tensorboard(folder, out or folder / "tensorboard", follow=options.follow)]
    for path in written:
        print(f"written: {path}")

"""`paceline profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.errors import UsageError
from paceline.options import Option


@dataclass(frozen=True, kw_only=True)
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

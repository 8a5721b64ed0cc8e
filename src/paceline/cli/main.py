"""`paceline`: the commands, and what becomes of an error."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from paceline.cli import (
    compare,
    dashboard,
    data,
    demo,
    doctor,
    evaluate,
    export,
    launch,
    plan,
    pool,
    profile,
    report,
    train,
    tune,
    twin,
)
from paceline.errors import PacelineError, RunFailed

app = typer.Typer(
    name="paceline",
    help="Train one neural network on many unequal machines, at the pace those machines allow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(
    "demo", help="Compare strategies on this machine; small real data, a report at the end."
)(demo.demo)
app.command("train", help="Train one job with one strategy.")(train.train)
app.command("compare", help="Train one job with several strategies and seeds, side by side.")(
    compare.compare
)
app.command(
    "launch",
    help="Run a script with its own training loop on several workers.",
)(launch.launch)
app.command("tune", help="Find the smallest synchronous share that keeps the accuracy.")(tune.tune)
app.command("plan", help="Which machines and which strategy: predicted time, energy and cost.")(
    plan.plan
)
app.command("twin", help="The same strategies in virtual time, on machines you may not have.")(
    twin.twin
)
app.command("evaluate", help="Evaluate the trained model of a run.")(evaluate.evaluate)
app.command("report", help="Write an HTML report of one or more runs.")(report.report)
app.command("dashboard", help="Look at the runs of a folder in a browser, live and afterwards.")(
    dashboard.dashboard
)
app.command("profile", help="Times by operator of a run, or of two side by side.")(profile.profile)
app.command("export", help="A run's record as a trace, CSV files or TensorBoard logs.")(
    export.export
)
app.command("doctor", help="Examine every machine of a pool, and say what mends what is wrong.")(
    doctor.doctor
)
app.add_typer(pool.app)
app.add_typer(data.app)

INTERRUPTED = 130


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {metadata.version('paceline')}")
        raise typer.Exit


@app.callback()
def _general(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Options that belong to no command."""


def main() -> None:
    """Run a command: 0 done, 2 the user's mistake in one line, 1 failed or diverged."""
    try:
        # typer returns the status of an Exit, and 130 for an interrupt, in place of raising them.
        code = app(standalone_mode=False)
    except PacelineError as error:
        if isinstance(error, RunFailed) and error.details:
            print(error.details.rstrip(), file=sys.stderr)
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        # typer's own usage errors (click's) come here: one line, exit 2.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        print(f"paceline: {message()}", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:
        print("paceline: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

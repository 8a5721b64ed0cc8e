"""`paceline plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from paceline.cli.commands import JobFile, command
from paceline.cli.options import refer_to_options
from paceline.errors import UsageError
from paceline.job import Job
from paceline.options import RUN, Option
from paceline.report.number_format import format_number


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    option_group: ClassVar[str] = RUN

    pool: Annotated[Path, Option(metavar="POOL")]
    """Pool file with the machines to choose from."""
    objective: str = "time"
    """Objective: time, energy, cost, or a mix such as 'time=0.7,energy=0.3'."""
    deadline_s: Annotated[float | None, Field(gt=0), Option(metavar="SECONDS")] = None
    """Longest acceptable duration of the run."""
    budget: Annotated[float | None, Field(gt=0), Option(metavar="PRICE")] = None
    """Highest acceptable cost of the run, in the pool's currency."""
    json: bool = False
    """Print the whole plan as JSON."""
    out: Annotated[Path | None, Option(short="o", metavar="DIR")] = None
    """Write plan.json and a chart, plan.html, to this directory."""


@command
def plan(job: JobFile = None, /, *, options: PlanOptions, fields: Job) -> None:
    from paceline.cluster import read_pool
    from paceline.plan.explanation import plan_to_json
    from paceline.plan.run_log import calibrate_from_log, history_path, read_history
    from paceline.plan.search import parse_objective, search
    from paceline.twin.workload import workload_of_job

    objective = parse_objective(options.objective, options.deadline_s, options.budget)
    pool = read_pool(options.pool)
    resolved = refer_to_options(job, fields, workers=1).resolve()
    resolved.check()
    records = read_history(history_path(options.pool))
    machines = calibrate_from_log(pool, workload_of_job(resolved), records)
    plain = plan_to_json(machines, search(machines, objective), objective)
    plain["corrected_by"] = sum(r.model == machines.work.model for r in records)
    if options.out is not None:
        write_plan(plain, options.out)
    if options.json:
        print(json.dumps(plain, indent=1))
        return
    show_plan(plain)
    print_corrections(plain["corrected_by"])
    if options.out is not None:
        print(f"chart: {options.out / 'plan.html'}")


def show_plan(plain: dict[str, Any]) -> None:
    """Prints the choice, its reasons and the alternatives."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    chosen = plain["chosen"]
    low, high = chosen["seconds_interval"]
    print(f"plan: {plain['why']}")
    print(
        f"machines: {format_hosts(chosen['machines'])}; strategy {chosen['strategy']}; "
        f"expected {format_number(chosen['seconds'])} s "
        f"({format_number(low)} to {format_number(high)} s)"
    )
    table = Table(box=None, title="Choices", title_justify="left")
    for name in ("strategy", "machines", "seconds", "kJ", "price", "samples/s", "staleness"):
        # Numbers never wrap; a long strategy is folded, never truncated.
        if name == "strategy":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in [chosen, *plain["runners_up"]]:
        table.add_row(
            row["strategy"],
            str(len(row["machines"])),
            format_number(row["seconds"]),
            format_number(row["joules"] / 1000),
            format_number(row["price"]),
            format_number(row["samples_per_s"]),
            format_number(row["staleness"]),
        )
    console.print(table)
    for reason in plain["left_out"]:
        print(f"not used: {reason['host']}: {reason['why']}")


def print_corrections(runs: int) -> None:
    """Prints how many earlier runs the predictions are based on, if any."""
    if runs:
        some = "an earlier run" if runs == 1 else f"{runs} earlier runs"
        print(f"corrected by {some} of this model on this pool")


def format_hosts(names: list[str]) -> str:
    return (
        ", ".join(names)
        if len(names) <= 12
        else f"{', '.join(names[:12])} and {len(names) - 12} more"
    )


def write_plan(plain: dict[str, Any], out: Path) -> None:
    """Writes plan.json, and a chart of energy against time with the Pareto-optimal choices."""
    import plotly.graph_objects as go

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be created: {error.strerror}") from None
    (out / "plan.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    figure = go.Figure()
    for title, rows, size in (
        ("Pareto-optimal", plain["frontier"], 9),
        ("best of each other strategy", plain["runners_up"], 9),
        ("chosen", [plain["chosen"]], 16),
    ):
        figure.add_scatter(
            x=[r["seconds"] for r in rows],
            y=[r["joules"] / 1000 for r in rows],
            text=[f"{r['strategy']} on {len(r['machines'])}, price {r['price']:.3g}" for r in rows],
            mode="markers",
            marker={"size": size},
            name=title,
        )
    figure.update_layout(
        title=f"{plain['job']['model']}: energy against time",
        xaxis_title="seconds",
        yaxis_title="kJ",
        template="plotly_white",
    )
    figure.write_html(out / "plan.html", include_plotlyjs=True)

"""`paceline plan`."""

from __future__ import annotations

import json as json_form
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.errors import UsageError


def plan(
    pool: Annotated[Path, typer.Option(help="The machines to choose from.", show_default=False)],
    job: opt.JobFile = None,
    objective: Annotated[
        str, typer.Option(help="time, energy, cost, or a mix: 'time=0.7,energy=0.3'.")
    ] = "time",
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that the run may take at most.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="What the run may cost at most, in the pool's money.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder for plan.json and a picture, plan.html.")
    ] = None,
    model: opt.Model = None,
    data: opt.Data = None,
    data_dir: opt.DataDir = None,
    features: opt.Features = None,
    label: opt.Label = None,
    val_data: opt.ValData = None,
    format: opt.Format = None,
    shape: opt.Shape = None,
    classes: opt.Classes = None,
    fill: opt.Fill = None,
    skip_empty: opt.SkipEmpty = None,
    shard: opt.Shard = None,
    shuffle: opt.Shuffle = None,
    cache: opt.Cache = None,
    prefetch: opt.Prefetch = None,
    memory: opt.Memory = None,
    epochs: opt.Epochs = None,
    batch: opt.Batch = None,
    lr: opt.Lr = None,
    optimizer: opt.Optimizer = None,
    schedule: opt.Schedule = None,
    seed: opt.Seed = None,
    augment: opt.Augment = None,
    dtype: opt.Dtype = None,
) -> None:
    given = locals()
    from paceline.cluster import read_pool
    from paceline.plan.explanation import plan_to_json
    from paceline.plan.run_log import calibrate_from_log, history_path, read_history
    from paceline.plan.search import parse_objective, search

    wish = parse_objective(objective, deadline, budget)
    machines_of = read_pool(pool)
    resolved = opt.job_reference_from_options(job, 1, None, given).resolve()
    resolved.check()
    from paceline.twin.workload import workload_of_job

    records = read_history(history_path(pool))
    machines = calibrate_from_log(machines_of, workload_of_job(resolved), records)
    plain = plan_to_json(machines, search(machines, wish), wish)
    plain["corrected_by"] = sum(r.model == machines.work.model for r in records)
    if out is not None:
        write_plan(plain, out)
    if json:
        typer.echo(json_form.dumps(plain, indent=1))
        return
    show_plan(plain)
    print_corrections(plain["corrected_by"])
    if out is not None:
        typer.echo(f"picture: {out / 'plan.html'}")


def show_plan(plain: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    chosen = plain["chosen"]
    low, high = chosen["seconds_interval"]
    typer.echo(f"plan: {plain['why']}")
    typer.echo(
        f"machines: {format_hosts(chosen['machines'])}; strategy {chosen['strategy']}; "
        f"{chosen['seconds']:,.4g} s expected, between {low:,.4g} and {high:,.4g}"
    )
    table = Table(box=None, title="choices", title_justify="left")
    for name in ("strategy", "machines", "seconds", "kJ", "price", "samples/s", "staleness"):
        table.add_column(name, justify="left" if name in ("strategy",) else "right")
    for row in [chosen, *plain["runners_up"]]:
        table.add_row(
            row["strategy"],
            str(len(row["machines"])),
            f"{row['seconds']:,.4g}",
            f"{row['joules'] / 1000:,.4g}",
            f"{row['price']:,.3g}",
            f"{row['samples_per_s']:,.4g}",
            f"{row['staleness']:g}",
        )
    console.print(table)
    for reason in plain["left_out"]:
        typer.echo(f"left out: {reason['host']}: {reason['why']}")


def print_corrections(runs: int) -> None:
    if runs:
        some = "an earlier run" if runs == 1 else f"{runs} earlier runs"
        typer.echo(f"corrected by {some} of this model on this pool")


def format_hosts(names: list[str]) -> str:
    return (
        ", ".join(names)
        if len(names) <= 12
        else f"{', '.join(names[:12])} and {len(names) - 12} more"
    )


def write_plan(plain: dict[str, Any], out: Path) -> None:
    """plan.json, and the choices that no other beats as a picture."""
    import plotly.graph_objects as go

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be a folder: {error.strerror}") from None
    (out / "plan.json").write_text(json_form.dumps(plain, indent=1), encoding="utf-8")
    figure = go.Figure()
    for title, rows, size in (
        ("not beaten by any other", plain["frontier"], 9),
        ("best of other strategies", plain["runners_up"], 9),
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

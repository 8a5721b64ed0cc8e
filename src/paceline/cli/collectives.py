"""`paceline collectives`: collectives next to their cost formulas, and the fit of the formulas."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from paceline.cli.commands import (
    command,
    make_log,
    print_table,
    refuse_together,
    require_with,
)
from paceline.errors import UsageError
from paceline.launch.settings import DEFAULT_TIMEOUT_S, MIN_TIMEOUT_S
from paceline.options import PLACEMENT, RUN, Option, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cluster.pool import Host
    from paceline.launch.collectives_run import MeasuredCollective
    from paceline.launch.launcher import Launcher
    from paceline.plan.link_fit import LinkFit

DEFAULT_SIZES = "1k,10k,100k,300k,1M,3M"
UNITS = {"": 1, "k": 1000, "m": 1_000_000}
LEAST_BYTES, MOST_BYTES = 4, 1_000_000_000
LOCAL_WORKERS = 2


def parse_sizes(value: object) -> object:
    """Returns the bytes of a list such as `1k,100k,1M`; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    sizes = []
    for word in value.split(","):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([km]?)b?", word.strip().lower())
        nbytes = float(found[1]) * UNITS[found[2]] if found else 0.0
        if not LEAST_BYTES <= nbytes <= MOST_BYTES:
            raise ValueError(
                f"must be sizes of {LEAST_BYTES} to {MOST_BYTES:,} bytes such as "
                f"{DEFAULT_SIZES}, got {word.strip()!r}"
            )
        sizes.append(int(nbytes))
    return tuple(sorted(set(sizes)))


@settings(RUN)
class MeasurementSettings:
    sizes: Annotated[
        tuple[int, ...] | str,
        BeforeValidator(parse_sizes),
        Option(metavar="BYTES", default=DEFAULT_SIZES),
    ] = DEFAULT_SIZES
    """Sizes of the messages, separated by commas."""
    rounds: Annotated[int, Field(ge=3)] = 7
    """Rounds per collective and size, of which the fastest counts; fewer if they take long."""
    out: Annotated[
        Path | None, Option(short="o", metavar="DIR", default="runs/<time>-collectives")
    ] = None
    """Directory for the table, the plot and the logs."""
    force: bool = False
    """Overwrite an existing run in --out."""
    write: bool = False
    """Write the fitted latency and bandwidth to the pool file."""
    json: bool = False
    """Print the result as JSON."""
    timeout_s: Annotated[float, Option(metavar="SECONDS")] = DEFAULT_TIMEOUT_S
    """Stop if a worker makes no progress for this long."""
    quiet: bool = False
    """Do not show progress."""

    def __post_init__(self) -> None:
        if self.timeout_s < MIN_TIMEOUT_S:
            raise UsageError(
                f"--timeout must be at least {MIN_TIMEOUT_S:g} s, got {self.timeout_s:g}: "
                "workers report once per second"
            )


@settings(PLACEMENT)
class CollectivesPlacement:
    workers: Annotated[int | None, Option(default=str(LOCAL_WORKERS))] = None
    """Number of processes on this machine, without --pool."""
    pool: Annotated[Path | None, Option(metavar="POOL")] = None
    """Pool file: measure between these machines, over SSH."""
    select: Annotated[tuple[str, ...], Option(metavar="HOSTS", default="all")] = ()
    """Machines of the pool to use: all, gpu, cpu, energy, or names separated by commas."""


@command
def collectives(*, options: MeasurementSettings, where: CollectivesPlacement) -> None:
    from paceline.cli.pool import open_pool
    from paceline.cluster.pool import Host, select_hosts
    from paceline.cluster.pool_file import write_pool
    from paceline.launch.collectives_run import CollectivesOptions, run_collectives
    from paceline.launch.engines.local import LocalLauncher
    from paceline.launch.engines.ssh import SshLauncher
    from paceline.launch.project import ProjectBundle
    from paceline.launch.run_options import new_run_name
    from paceline.plan.link_fit import fit_links, held_out_sizes, write_fit

    log = make_log(quiet=options.quiet or options.json)
    launcher: Launcher = LocalLauncher()
    found, hosts = None, tuple[Host, ...]()
    if where.pool is not None:
        reason = "the pool file sets the number of workers"
        refuse_together("--pool", {"workers": where.workers}, reason)
        found = open_pool(where.pool)
        if options.write and found.form == "blueprint":
            write_pool(found, found.pool)  # Raises before minutes are spent on measurements.
        hosts = select_hosts(found.pool, where.select)
        launcher = SshLauncher(hosts, ProjectBundle(on_progress=log))
        workers = launcher.workers
    else:
        require_with("--pool", {"select": where.select}, "it selects machines of the pool")
        require_with("--pool", {"write": options.write}, "the fit is written to the pool file")
        workers = LOCAL_WORKERS if where.workers is None else where.workers
    check_workers(workers, where.pool)
    sizes = parse_sizes(options.sizes)
    assert isinstance(sizes, tuple)
    out = options.out or Path("runs") / new_run_name("collectives")
    log(f"measuring collectives of {workers} workers")
    wanted = CollectivesOptions(
        workers=workers,
        sizes=sizes,
        rounds=options.rounds,
        out=out,
        force=options.force,
        timeout_s=options.timeout_s,
    )
    rows = run_collectives(launcher, wanted)
    held_out = held_out_sizes(sizes)
    fit = fit_links([row for row in rows if row.nbytes not in held_out])
    body = describe(rows, fit, held_out)
    (out / "collectives.json").write_text(json.dumps(body, indent=1), encoding="utf-8")
    draw(rows, fit, out / "collectives.html")
    if found is not None and options.write:
        write_pool(found, write_fit(found.pool, seats(hosts), fit))
    if options.json:
        print(json.dumps(body, indent=1))
        return
    show(rows, fit, held_out)
    print(f"table and plot: {out}")
    if options.write:
        print(f"fit written to {where.pool}")


def check_workers(workers: int, pool: Path | None) -> None:
    if workers < 2:
        got = f"--workers {workers}" if pool is None else f"pool {pool} with {workers} worker"
        raise UsageError(f"{got}: a collective requires at least 2 workers; use more")


def seats(hosts: Sequence[Host]) -> list[Host]:
    """Returns the machine of each worker."""
    return [host for host in hosts for _ in range(host.workers)]


def describe(
    rows: Sequence[MeasuredCollective], fit: LinkFit, held_out: set[int]
) -> dict[str, Any]:
    """Returns the contents of collectives.json."""
    from paceline.plan.link_fit import fit_errors

    errors = {
        "fitted": fit_errors(fit, [row for row in rows if row.nbytes not in held_out]),
        "held_out": fit_errors(fit, [row for row in rows if row.nbytes in held_out]),
    }
    return {
        "latency_s": fit.latency_s,
        "bytes_per_s": fit.bytes_per_s,
        "held_out_bytes": sorted(held_out),
        "errors": {name: e and dataclasses.asdict(e) for name, e in errors.items()},
        "rows": [
            {**dataclasses.asdict(row), "formula_s": fit.seconds(row), "ratio": fit.ratio(row)}
            for row in rows
        ],
    }


def show(rows: Sequence[MeasuredCollective], fit: LinkFit, held_out: set[int]) -> None:
    """Prints one table per number of workers, and the errors of the formulas."""
    from paceline.plan.link_fit import LARGE_BYTES, fit_errors

    for workers in sorted({row.workers for row in rows}):
        same = [row for row in rows if row.workers == workers]
        machines = max(row.machines for row in same)
        place = "1 machine" if machines == 1 else f"{machines} machines"
        columns = {
            row.nbytes: format_bytes(row.nbytes) + ("*" if row.nbytes in held_out else "")
            for row in same
        }
        milliseconds = [1e3 * row.seconds for row in same]
        ratios = [fit.ratio(row) for row in same]
        for title, values in (("milliseconds", milliseconds), ("measured / formula", ratios)):
            table = {row.collective: {"collective": row.collective} for row in same}
            for row, value in zip(same, values, strict=True):
                table[row.collective][columns[row.nbytes]] = f"{value:.2f}"
            heading = f"{workers} workers on {place}: {title}"
            print_table(list(table.values()), left=("collective",), title=heading)
    print(
        f"fit: {1e3 * fit.latency_s:.3f} ms per message, {fit.bytes_per_s * 8 / 1e6:.1f} Mbit/s "
        f"({fit.bytes_per_s / 1e9:.3g} GB/s)"
    )
    for name, chosen in (
        ("fitted sizes", [row for row in rows if row.nbytes not in held_out]),
        ("held-out sizes (*)", [row for row in rows if row.nbytes in held_out]),
    ):
        if (errors := fit_errors(fit, chosen)) is not None:
            print(
                f"{name} from {format_bytes(LARGE_BYTES)}: error of the formula "
                f"{errors.median:.0%} in the median, {errors.worst:.0%} at most"
            )


def format_bytes(nbytes: int) -> str:
    """Returns for example 100 kB or 1.5 MB."""
    if nbytes >= UNITS["m"]:
        return f"{nbytes / UNITS['m']:g} MB"
    return f"{nbytes / UNITS['k']:g} kB" if nbytes >= UNITS["k"] else f"{nbytes} B"


def draw(rows: Sequence[MeasuredCollective], fit: LinkFit, path: Path) -> None:
    """Writes a page with one chart per number of workers: points measured, lines by formula."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    counts = sorted({row.workers for row in rows})
    titles = [f"{count} workers" for count in counts]
    figure = make_subplots(rows=1, cols=len(counts), subplot_titles=titles, shared_yaxes=True)
    names = list(dict.fromkeys(row.collective for row in rows))
    for place, name in enumerate(names):
        color = qualitative.Dark24[place % len(qualitative.Dark24)]
        for column, count in enumerate(counts, start=1):
            same = [r for r in rows if (r.workers, r.collective) == (count, name)]
            sizes = [r.nbytes for r in same]
            shared = {"x": sizes, "name": name, "legendgroup": name}
            figure.add_trace(
                go.Scatter(
                    **shared,
                    y=[r.seconds for r in same],
                    mode="markers",
                    marker={"color": color},
                    showlegend=column == len(counts) and bool(same),
                ),
                row=1,
                col=column,
            )
            figure.add_trace(
                go.Scatter(
                    **shared,
                    y=[fit.seconds(r) for r in same],
                    mode="lines",
                    line={"color": color, "width": 1},
                    showlegend=False,
                ),
                row=1,
                col=column,
            )
    figure.update_xaxes(type="log", title="bytes")
    figure.update_yaxes(type="log", title="seconds", col=1)
    figure.update_layout(
        title="Collectives: measured (points) and by formula (lines)", template="plotly_white"
    )
    figure.write_html(path, include_plotlyjs=True)

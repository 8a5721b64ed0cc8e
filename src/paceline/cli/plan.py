"""`paceline plan`, and the plan of a run on a pool: machines, expected time, what was learned."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline.cli.commands import JobFile, command, print_table, refer_to_options
from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.options import RUN, Option, settings
from paceline.report.number_format import format_number

if TYPE_CHECKING:
    from paceline.cluster.pool import Host, Pool
    from paceline.plan.estimate import Estimate
    from paceline.plan.pool_arrays import PoolArrays
    from paceline.specs.strategy import Strategy


@settings(RUN)
class PlanOptions:
    pool: Annotated[Path, Option(metavar="POOL")]
    """Pool file with the machines to choose from."""
    objective: str = "time"
    """Objective: time, energy, cost, or a mix such as 'time=0.7,energy=0.3'."""
    deadline_s: Annotated[float | None, Field(gt=0), Option(metavar="SECONDS")] = None
    """Longest acceptable duration of the run."""
    budget: Annotated[float | None, Field(gt=0), Option(metavar="PRICE")] = None
    """Highest acceptable cost of the run, in the pool's currency."""
    like: Annotated[tuple[Path, ...], Option(metavar="RUN")] = ()
    """Run folder of an earlier run of this job, for the time to --until val_acc>=X. Repeatable."""
    learn: Annotated[int | None, Field(ge=1), Option(metavar="SEEDS")] = None
    """Train the job here with this many seeds first, for the time to --until val_acc>=X."""
    json: bool = False
    """Print the whole plan as JSON."""
    out: Annotated[Path | None, Option(short="o", metavar="DIR")] = None
    """Write plan.json and a chart, plan.html, to this directory."""


@command
def plan(job: JobFile = None, /, *, options: PlanOptions, fields: Job) -> None:
    from paceline.cluster import read_pool
    from paceline.plan.explanation import plan_to_json
    from paceline.plan.search import parse_objective, search

    objective = parse_objective(options.objective, options.deadline_s, options.budget)
    pool = read_pool(options.pool)
    reference = refer_to_options(job, fields, workers=1)
    machines, earlier = calibrate_pool(options.pool, pool, reference)
    set_goal(machines, options, reference)
    plain = plan_to_json(machines, search(machines, objective), objective)
    plain["corrected_by"] = earlier
    if options.out is not None:
        write_plan(plain, options.out)
    if options.json:
        print(json.dumps(plain, indent=1))
        return
    show_plan(plain)
    if options.out is not None:
        print(f"chart: {options.out / 'plan.html'}")


def calibrate_pool(path: Path, pool: Pool, reference: JobRef) -> tuple[PoolArrays, int]:
    """Returns the machines for a job, corrected by earlier runs of its model, and their number."""
    from paceline.plan.run_log import calibrate_from_log, history_path, read_history
    from paceline.twin.workload import workload_of_job

    job = reference.resolve()
    job.check()
    records = read_history(history_path(path))
    machines = calibrate_from_log(pool, workload_of_job(job), records)
    return machines, sum(r.is_of(machines.work) for r in records)


def show_plan(plain: dict[str, Any]) -> None:
    """Prints the choice, its reasons and the alternatives."""
    chosen = plain["chosen"]
    names = chosen["machines"]
    hosts = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    low, high = chosen["seconds_interval"]
    goal = plain["accuracy"]
    until = f" until val_acc>={goal['target']:g}" if goal else ""
    print(f"plan: {plain['why']}")
    print(
        f"machines: {hosts}; strategy {chosen['strategy']}; "
        f"expected {format_number(chosen['seconds'])} s{until} ({format_number(low)} to "
        + ("never)" if high is None else f"{format_number(high)} s)")
    )
    parts = ("startup", "train", "evaluation", "checkpoint")
    print("of which: " + ", ".join(f"{p} {format_number(chosen[f'{p}_s'])} s" for p in parts))
    if goal:
        runs = "1 run" if goal["runs"] == 1 else f"{goal['runs']} runs"
        print(f"accuracy: reached after {format_number(goal['epochs'])} epochs in {runs}")
    elif chosen["efficiency"] < 1:
        print(
            f"accuracy: a sample is worth {chosen['efficiency']:.2f} of a synchronous one; expect "
            f"less accuracy, or train x{1 / chosen['efficiency']:.2f} epochs, as times for "
            "comparison assume"
        )
    if plain["guesses"]:
        print(f"guessed: {', '.join(plain['guesses'])}")
    rows = [
        {
            "strategy": row["strategy"],
            "machines": str(len(row["machines"])),
            "seconds": _number(row["seconds"]),
            "kJ": _number(row["joules"], 1e-3),
            **({"price": _number(row["price"])} if chosen["price"] else {}),
            "samples/s": format_number(row["samples_per_s"]),
            "staleness": format_number(row["staleness"]),
            "progress": f"{row['efficiency']:.2f}",
        }
        for row in [chosen, *plain["runners_up"]]
    ]
    print_table(rows, left=("strategy",), title="Choices", no_wrap=True)
    for reason in plain["left_out"]:
        print(f"not used: {reason['host']}: {reason['why']}")
    runs = plain["corrected_by"]
    if runs:
        some = "an earlier run" if runs == 1 else f"{runs} earlier runs"
        print(f"corrected by {some} of this model on this pool")


def _number(value: float | None, factor: float = 1.0) -> str:
    return "never" if value is None else format_number(value * factor)


def set_goal(machines: PoolArrays, options: PlanOptions, reference: JobRef) -> None:
    """Sets the accuracy to plan for, if the job has one and its learning curve is known.

    Raises UsageError if earlier runs never reached it, or a curve is given without a target.
    """
    from paceline.plan.learning_curve import AccuracyGoal, LearningCurve, read_run
    from paceline.plan.run_log import history_path, logged_curves, read_history

    work = machines.work
    until = reference.resolve().until_spec
    if until is None or until.metric != "val_acc" or until.sign not in (">=", ">"):
        if options.like or options.learn:
            raise UsageError("--like and --learn require a target; add --until 'val_acc>=0.95'")
        return
    curves = [read_run(path) for path in options.like]
    if options.learn:
        curves += learn_curves(reference, options.learn)
    curves = curves or logged_curves(read_history(history_path(options.pool)), work)
    if not curves:
        print(
            f"paceline: the time to {until} is unknown, so all epochs are planned; use --learn "
            "SEEDS, or --like with an earlier run of this job",
            file=sys.stderr,
        )
        return
    goal = AccuracyGoal(until.value, LearningCurve(tuple(curves), work.evaluated.get("val", 1)))
    if goal.curve.best < until.value:
        raise UsageError(
            f"--until {until}: earlier runs of this job reached {goal.curve.best:.4g} at most; "
            "choose a lower target"
        )
    machines.goal = goal


def learn_curves(reference: JobRef, seeds: int) -> list[Any]:
    """Trains the job in the simulator, as one machine, and returns the curve of each seed."""
    import tempfile

    from paceline.cluster.pool import equal_machines
    from paceline.plan.learning_curve import curve_points
    from paceline.strategies.registry import BASELINE, parse_strategy
    from paceline.twin.run import TwinOptions, run_twin

    job = reference.resolve()
    curves = []
    for seed in range(job.seed, job.seed + seeds):
        began = time.perf_counter()
        changes = {"seed": seed, "until": None, "checkpoint_every": "never"}
        with tempfile.TemporaryDirectory() as folder:
            twin = TwinOptions(out=Path(folder) / "run", pool=equal_machines(1))
            result = run_twin(job.model_copy(update=changes), parse_strategy(BASELINE), twin)
        curves.append(curve_points(result["history"]))
        left = seeds - len(curves)
        took = time.perf_counter() - began
        more = f", about {left * took:.1f} s to go" if left else ""
        print(f"paceline: trained seed {seed} in {took:.1f} s{more}", file=sys.stderr)
    return curves


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


def plan_on_pool(
    path: Path,
    pool: Pool,
    hosts: tuple[Host, ...],
    reference: JobRef,
    strategy: Strategy | None,
    *,
    choosing: bool,
    objective: str = "time",
) -> PoolPlan:
    """Estimates the job on the pool, corrected by the measurements of earlier runs there."""
    from paceline.plan.explanation import plan_to_json
    from paceline.plan.search import parse_objective, search, search_strategy

    # The cost model covers one worker per machine.
    single = choosing or strategy is None
    if single:
        hosts = tuple(h.model_copy(update={"workers": 1}) for h in hosts)
    smaller = pool.model_copy(update={"hosts": hosts})
    machines, earlier = calibrate_pool(path, smaller, reference)
    target = parse_objective(objective, None, None)
    if not single:
        everything = tuple(range(len(machines.hosts)))
        return PoolPlan(path=path, machines=machines, chosen=everything)
    if not choosing:
        found = search_strategy(machines, target)
    elif strategy is not None:
        alone = _allows_one_worker(strategy)
        found = search(machines, target, [str(strategy)], allow_single_host=alone)
    else:
        found = search(machines, target)
    plain = {**plan_to_json(machines, found, target), "corrected_by": earlier}
    best = found.chosen
    return PoolPlan(path=path, machines=machines, chosen=best.machines, best=best, plain=plain)


def _allows_one_worker(strategy: Strategy) -> bool:
    try:
        strategy.check_workers(1)
    except UsageError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Machines chosen from a pool, and the expected time on them."""

    path: Path
    machines: PoolArrays
    chosen: tuple[int, ...]
    best: Estimate | None = None
    plain: dict[str, Any] | None = None

    @property
    def hosts(self) -> list[Host]:
        return [self.machines.hosts[place] for place in self.chosen]

    @property
    def strategy(self) -> Strategy:
        from paceline.strategies.registry import parse_strategy

        assert self.best is not None
        return parse_strategy(self.best.strategy)

    def show(self) -> None:
        assert self.plain is not None
        show_plan(self.plain)

    def find_servers(self, strategy: Strategy) -> list[Host]:
        from paceline.plan.search import choose_server_hosts

        count = strategy.servers_for(len(self.chosen))
        places = choose_server_hosts(self.machines, self.chosen, count)
        return [self.machines.hosts[place] for place in places]

    def predict(self, strategy: Strategy) -> dict[str, object] | None:
        """Returns None outside the cost model: no cost facet, or workers that share a machine."""
        import numpy as np

        from paceline.plan.estimate import estimate

        if any(host.workers > 1 for host in self.hosts):
            return None
        try:
            found = estimate(self.machines, np.array(self.chosen), strategy)
        except UsageError:
            return None
        prediction = {"step_s": found.step_s, "seconds": found.seconds}
        return {**prediction, "seconds_interval": list(found.seconds_interval)}

    def remember(self, out: Path, seats: list[Host], result: Mapping[str, Any]) -> None:
        """Prints prediction and measurement, and records the run for later plans."""
        from paceline.plan.learning_curve import curve_points
        from paceline.plan.run_log import (
            LoggedRun,
            WorkerTiming,
            add_record,
            describe_prediction_error,
            history_path,
        )
        from paceline.twin.calibration import measure_shares

        actual = result["predicted"]
        line = None if actual is None else describe_prediction_error(actual, result)
        if line is None:
            return
        print(line)
        shares = measure_shares(out, len(seats))
        if shares is None:
            return  # The run was too short to learn from.
        record = LoggedRun(
            model=self.machines.work.model,
            batch=self.machines.work.batch,
            strategy=str(result["strategy"]),
            machines=tuple(host.host for host in seats),
            work=tuple(
                WorkerTiming(host.host, samples, busy_s)
                for host, (samples, busy_s) in zip(seats, shares, strict=True)
            ),
            step_s=actual["actual_step_s"],
            predicted_step_s=actual["step_s"],
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            data=self.machines.work.data,
            epochs=self.machines.work.epochs,
            startup_s=sum(result["stages"][s] or 0.0 for s in ("start", "read", "prepare")),
            curve=tuple(curve_points(result["history"])),
        )
        path = history_path(self.path)
        try:
            add_record(path, record)
        except OSError as error:
            print(
                f"paceline: {path} cannot be written ({error.strerror}); later plans will not use "
                "this run",
                file=sys.stderr,
            )

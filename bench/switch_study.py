#!/usr/bin/env python3
"""All-reduce, ps and switches between them, at equal samples: accuracy, loss and seconds.

    python bench/switch_study.py --data-dir DIR --out bench/results/switch.jsonl [--seeds 3]
    python bench/switch_study.py --out bench/results/switch.jsonl --table

Real gradients in virtual time, on the five published machines, calm and with one of them three
times slower. Rows are appended to the output file one by one; a further call continues where the
last one ended and prints the tables. With `--real`, the same jobs run on local processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtr

from paceline import data as datasets
from paceline.cluster.pool import Pool
from paceline.errors import PacelineError
from paceline.job import Job
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.specs.slowdown import InjectedSlowdown
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.schema import RunResult
from paceline.twin.calibration import calibrate_from_run
from paceline.twin.clusters import read_cluster
from paceline.twin.run import TwinOptions, run_twin
from scenarios import Rows

BASE, LAST = "allreduce", "ps"
SWITCHES = {f"switch(allreduce, ps, at={share}%)": share / 100 for share in (25, 50, 75)}
"""Strategies, and their share of all-reduce."""
REVERSE = {"switch(ps, allreduce, at=50%)": 0.5}
STRATEGIES = (BASE, LAST, *SWITCHES, *REVERSE, "auto")
VALIDATED, TESTED = 500, 2000
SLOWER = 3.0
PLACES = ("five", "one 3x slower")
"""Simulated machines."""
PROCESSES, UNSEEN = "processes", "three unequal processes"
REAL_WORKERS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network, the first images of a dataset, and the machines that were published for it."""

    model: str
    data: str
    images: int
    cluster: str
    """Empty if they are local processes."""
    job: dict[str, Any] = field(hash=False)
    halved: bool = True
    """Images have half their width and height."""


# The rate drops after 62.5 and 87.5% of the run, apart from every switch.
SCHEDULE = {"epochs": 8, "batch": 100, "schedule": "milestones(5, 7)", "lr": 0.05}
CASES = (
    Case("resnet8", "cifar10", 2000, "published-five", SCHEDULE),
    Case("densenet-bc-22-12", "fashion-mnist", 1200, "published-five-densenet", SCHEDULE),
)
HELD_OUT = Case(
    "cnn-small",
    "kmnist",
    2000,
    "",
    {"epochs": 4, "batch": 96, "schedule": "cosine", "lr": 0.05},
    halved=False,
)
HELD_OUT_CORES = (0.06, 0.06, 0.02)
"""Fraction of a core that each process may use: so little that other programs hardly matter."""
PREDICTED = tuple(s for s in STRATEGIES if s != "auto")
CALIBRATION_SEED = 100


@cache
def load_splits(case: Case, data_dir: Path | None) -> Any:
    whole = datasets.load(case.data, data_dir=data_dir, dtype="float32", augment=False, seed=0)
    parts = {"train": case.images, "val": VALIDATED, "test": TESTED}
    return dataclasses.replace(
        whole,
        **{
            part: Rows(table, np.arange(min(rows, len(table))), case.halved)
            for part, rows, table in (
                (part, rows, getattr(whole, part)) for part, rows in parts.items()
            )
        },
    )


def make_job(case: Case, seed: int, data_dir: Path | None) -> Job:
    fixed = {"optimizer": "sgd(momentum=0.9, weight_decay=0.0005)", "channels_last": True}
    return Job(
        model=case.model,
        # Not a lambda: worker processes import it.
        data=partial(load_splits, case, data_dir),
        seed=seed,
        checkpoint_every="never",
        **{**fixed, **case.job},
    )


def machines(case: Case, slow: bool) -> Pool:
    """Returns the published machines; the first of them three times slower if `slow`."""
    pool = read_cluster(case.cluster)
    if not slow:
        return pool
    first, *others = pool.hosts
    measured = {
        name: cost.model_copy(update={"per_sample_s": cost.per_sample_s * SLOWER})
        for name, cost in first.measured.items()
    }
    return pool.model_copy(
        update={"hosts": (first.model_copy(update={"measured": measured}), *others)}
    )


def real_options(case: Case, out: Path) -> RunOptions:
    if case is not HELD_OUT:
        return RunOptions(out=out, workers=REAL_WORKERS, threads=1)
    slow = tuple(InjectedSlowdown(w, cores=cores) for w, cores in enumerate(HELD_OUT_CORES))
    return RunOptions(out=out, workers=len(slow), threads=1, slowdowns=slow)


def run(case: Case, where: str, strategy: str, seed: int, data_dir: Path | None) -> Row:
    row: Row = {"model": case.model, "machines": where, "strategy": strategy, "seed": seed}
    job, spec = make_job(case, seed, data_dir), parse_strategy(strategy)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            if where in PLACES:
                pool = machines(case, slow=where != PLACES[0])
                result = run_twin(job, spec, TwinOptions(out=out, pool=pool, threads=1))
            else:
                result = run_training(job, spec, real_options(case, out))
        except PacelineError as error:
            return {**row, "status": "failed", "error": str(error)}
    return {
        **row,
        **outcome(result),
        "samples": result["samples"],
        "updates": result["updates"],
        "changes": [[s["from"], s["to"], s["samples"], s["pause_s"]] for s in result["switches"]],
        "computed_s": round(time.perf_counter() - began, 1),
    }


def outcome(result: RunResult) -> Row:
    # Real runs also start processes and read data, which depends on what else the machine does.
    return {
        "status": result["status"],
        "test_acc": result["test_acc"],
        "val_loss": result["val_loss"],
        "seconds": result["stages"]["train"],
    }


def predict(seeds: int, data_dir: Path | None) -> dict[str, Any]:
    """Returns the predictions, and a hash of them."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "recorded"
        job = make_job(HELD_OUT, CALIBRATION_SEED, data_dir)
        run_training(job, parse_strategy(BASE), real_options(HELD_OUT, recorded))
        pool = calibrate_from_run(recorded)
        rows = []
        for seed in range(seeds):
            for strategy in PREDICTED:
                job, spec = make_job(HELD_OUT, seed, data_dir), parse_strategy(strategy)
                options = TwinOptions(out=Path(folder) / "twin", pool=pool, threads=1, force=True)
                result = run_twin(job, spec, options)
                rows.append({"strategy": strategy, "seed": seed, **outcome(result)})
    case = {**dataclasses.asdict(HELD_OUT), "cores": HELD_OUT_CORES}
    body = {"case": case, "machines": pool.to_plain(), "predictions": rows}
    return {"sha256": hash_predictions(body), **body}


def hash_predictions(body: dict[str, Any]) -> str:
    plain = {name: value for name, value in body.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def interpolated_s(strategy: str, base_s: float, last_s: float) -> float | None:
    """Returns the seconds on the straight line between ps and all-reduce."""
    share = {**SWITCHES, **REVERSE}.get(strategy)
    return None if share is None else last_s + share * (base_s - last_s)


def p_value(pairs: list[float]) -> float:
    """Returns the two-sided p-value of a paired t-test of a mean difference of 0."""
    if len(pairs) < 2 or statistics.stdev(pairs) == 0:
        return math.nan
    t = statistics.mean(pairs) / (statistics.stdev(pairs) / math.sqrt(len(pairs)))
    return float(2 * stdtr(len(pairs) - 1, -abs(t)))


def spread(values: list[float], form: str) -> str:
    text = format(statistics.mean(values), form)
    return f"{text} ± {statistics.stdev(values):{form}}" if len(values) > 1 else text


def print_tables(rows: list[Row]) -> None:
    groups: dict[tuple[str, str], dict[str, dict[int, Row]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in rows:
        groups[row["model"], row["machines"]][row["strategy"]][row["seed"]] = row
    for (model, where), found in groups.items():
        print(f"\n### `{model}`, {where}\n")
        print(
            "| Strategy | Seeds | Test accuracy | Points, p | Validation loss | Difference, p | "
            "Seconds | Time saved | Straight line | Its error |\n"
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
        for strategy in [s for s in STRATEGIES if s in found]:
            print_row(strategy, found)


def print_row(strategy: str, found: dict[str, dict[int, Row]]) -> None:
    done = {k: r for k, r in found[strategy].items() if r["status"] == "done"}
    failed = len(found[strategy]) - len(done)
    if not done:
        print(f"| `{strategy}` | {failed} failed | | | | | | | | |")
        return
    base = {k: r for k, r in found.get(BASE, {}).items() if r["status"] == "done"}
    last = {k: r for k, r in found.get(LAST, {}).items() if r["status"] == "done"}
    seconds = [r["seconds"] for r in done.values()]
    cells = [
        f"`{strategy}`",
        f"{len(done)}" + (f", {failed} failed" if failed else ""),
        spread([100 * r["test_acc"] for r in done.values()], ".1f") + "%",
        *differences(done, base, "test_acc", 100, "+.1f"),
        spread([r["val_loss"] for r in done.values()], ".3f"),
        *differences(done, base, "val_loss", 1, "+.3f"),
        spread(seconds, ".0f"),
        *saved(strategy, done, base, last),
    ]
    print("| " + " | ".join(cells) + " |")


def differences(
    done: dict[int, Row], base: dict[int, Row], field: str, times: float, form: str
) -> list[str]:
    if done is base or done == base:
        return [""]
    pairs = [times * (row[field] - base[seed][field]) for seed, row in done.items() if seed in base]
    if not pairs:
        return [""]
    p = p_value(pairs)
    return [format(statistics.mean(pairs), form) + ("" if math.isnan(p) else f", {p:.2f}")]


def saved(
    strategy: str, done: dict[int, Row], base: dict[int, Row], last: dict[int, Row]
) -> list[str]:
    both = [seed for seed in done if seed in base and seed in last]
    if strategy == BASE or not both:
        return ["", "", ""]
    mean = {
        name: statistics.mean(part[seed]["seconds"] for seed in both)
        for name, part in (("own", done), ("base", base), ("last", last))
    }
    gained = f"{100 * (1 - mean['own'] / mean['base']):.1f}%"
    line = interpolated_s(strategy, mean["base"], mean["last"])
    if line is None:
        return [gained, "", ""]
    return [gained, f"{line:.0f}", f"{100 * (line / mean['own'] - 1):+.1f}%"]


def print_predictions(predicted: dict[str, Any], rows: list[Row]) -> None:
    """Prints predictions next to the runs that were made with their hash."""
    if hash_predictions(predicted) != predicted["sha256"]:
        raise SystemExit("the predictions were changed: their hash differs")
    mine = [r for r in rows if r.get("predictions") == predicted["sha256"]]
    print(
        "\n| Strategy | Seeds | Accuracy | Predicted | Validation loss | Predicted | Seconds | "
        "Predicted | Error | Straight line | Its error |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    mean_s = {
        s: statistics.mean(r["seconds"] for r in mine if r["strategy"] == s)
        for s in PREDICTED
        if any(r["strategy"] == s for r in mine)
    }
    for strategy, own_s in mean_s.items():
        found = [r for r in mine if r["strategy"] == strategy and r["status"] == "done"]
        seeds = {r["seed"] for r in found}
        expected = [
            r for r in predicted["predictions"] if r["strategy"] == strategy and r["seed"] in seeds
        ]
        expected_s = statistics.mean(r["seconds"] for r in expected)
        line = interpolated_s(strategy, mean_s[BASE], mean_s[LAST]) if LAST in mean_s else None
        cells = [f"`{strategy}`", str(len(found))]
        for name, times, form in (("test_acc", 100, ".1f"), ("val_loss", 1, ".3f")):
            cells += [spread([times * r[name] for r in part], form) for part in (found, expected)]
        cells += [spread([r["seconds"] for r in found], ".1f"), f"{expected_s:.1f}"]
        cells.append(f"{100 * (expected_s / own_s - 1):+.1f}%")
        cells += ["", ""] if line is None else [f"{line:.1f}", f"{100 * (line / own_s - 1):+.1f}%"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/switch.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="*", help="of the study; all by default")
    parser.add_argument("--machines", nargs="*", help="of the study; all by default")
    parser.add_argument("--runs", type=int, help="stop after this many further runs")
    parser.add_argument("--real", action="store_true", help="local processes, not the simulator")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    parser.add_argument("--predict", type=Path, metavar="FILE", help="write predictions")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="run what was predicted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.predict:
        args.predict.write_text(json.dumps(predict(args.seeds, args.data_dir), indent=1) + "\n")
        return
    predicted = json.loads(args.measure.read_text()) if args.measure else None
    rows = []
    if args.out.exists():
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    known = {(r["model"], r["machines"], r["strategy"], r["seed"]) for r in rows}
    places, cases, strategies = PLACES, CASES, STRATEGIES
    if predicted:
        places, cases, strategies = (UNSEEN,), (HELD_OUT,), PREDICTED
    elif args.real:
        places = (PROCESSES,)
    runs = [
        (case, where, strategy, seed)
        for where in places
        for seed in range(args.seeds)
        for case in cases
        for strategy in strategies
        if (case.model, where, strategy, seed) not in known
        and case.model in (args.models or [case.model])
        and where in (args.machines or [where])
    ][: args.runs]
    for case, where, strategy, seed in () if args.table else runs:
        row = run(case, where, strategy, seed, args.data_dir)
        rows.append({**row, "predictions": predicted["sha256"]} if predicted else row)
        with args.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    if predicted:
        print_predictions(predicted, rows)
    else:
        print_tables([r for r in rows if "predictions" not in r])


if __name__ == "__main__":
    main()

"""Compares the twin with real runs on this machine: samples per second and fraction of waiting.

    python bench/predicted.py --pairs 5 --out bench/results/predicted.json
    python bench/predicted.py --out bench/results/predicted.json --show-only
    python bench/predicted.py --out bench/results/predicted.json --replay

`--replay` predicts the recorded measurements from their recorded probes with the current twin.

A probe (each kind of machine alone, one worker with a server, the exchange between two processes)
and the measurement that it predicts alternate; the twin does not use the measurement. One real run
uses the four strategies one after another, so they share a start. Pairs are added to those in the
file. Prints a Markdown table: medians over the pairs, the twin's error and the spread of the
measurement.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Pool
from paceline.cluster.pool_file import pool_from_mapping
from paceline.launch.run_options import usable_cores
from paceline.telemetry.reader import read_steps
from paceline.telemetry.run_folder import RunFolder
from paceline.telemetry.steps import StepRecord
from step_probe import COLUMNS, limit, play, probe, read_cells, train, write_cells
from synthetic_job import CASES, Case

STRATEGIES = ("allreduce", "ps", "ps(sync=ssp(3))", "local_sgd(h=8)")
VIA = {"allreduce": "allreduce(via=network)", "ps": "ps(via=network)"}
VIA["ps(sync=ssp(3))"] = "ps(sync=ssp(3), via=network)"
"""Sockets, as between machines."""
QUOTA = 1 / 4
"""Fraction of a core per worker: four workers and a server leave cores free."""
SLOWER = 3
STEPS, PROBED_STEPS = 128, 40


def quotas(workers: int, one_slower: bool) -> list[float]:
    """Returns the fraction of a core of each worker."""
    return [QUOTA / (SLOWER if one_slower and w == 0 else 1) for w in range(workers)]


def measure(job: Path, cores: list[float], out: Path) -> dict[str, Any]:
    """Trains one real run with all strategies; returns rate and fraction of waiting of each."""
    points = ", ".join(f"{25 * k}%" for k in range(1, len(STRATEGIES)))
    train(
        job,
        out,
        "--strategy",
        f"switch({', '.join(VIA.get(s, s) for s in STRATEGIES)}, at=({points}))",
        "--workers",
        len(cores),
        *limit(cores),
    )
    return split_phases(RunFolder(out), len(cores))


def split_phases(folder: RunFolder, workers: int) -> dict[str, Any]:
    """Groups steps by strategy, without the first of each, which contains the switch."""
    result = folder.read_result()
    per_epoch = result["history"][0]["samples"]
    bounds = [0, *(row["samples"] for row in result["switches"]), result["samples"] + 1]
    found: dict[str, Any] = {}
    rows: list[list[list[StepRecord]]] = [[[] for _ in STRATEGIES] for _ in range(workers)]
    for worker in range(workers):
        for step in read_steps(folder.path, worker):
            at = step.epoch * per_epoch + step.start
            phase = max(k for k in range(len(STRATEGIES)) if bounds[k] <= at)
            rows[worker][phase].append(step)
    for index, strategy in enumerate(STRATEGIES):
        mine = [rows[worker][index][2:] for worker in range(workers)]
        found[strategy] = sum_up(mine, synchronous=not strategy.startswith("ps"))
    return found


def sum_up(steps: list[list[StepRecord]], *, synchronous: bool) -> dict[str, float]:
    """Returns the rate of all workers together, and the fraction of their time spent waiting."""
    seconds = [sum(getattr(s, c) for s in mine for c in COLUMNS) / 1e6 for mine in steps]
    samples = [sum(s.samples for s in mine) for mine in steps]
    waits = [sum(s.wait for s in mine) / 1e6 for mine in steps]
    if synchronous:
        # In a collective the last to arrive does not wait: what others take beyond it is waiting.
        for together in zip(*steps, strict=False):
            least = min(s.comm_exposed for s in together)
            for worker, step in enumerate(together):
                waits[worker] += (step.comm_exposed - least) / 1e6
    rate = sum(n / s for n, s in zip(samples, seconds, strict=True))
    return {"rate": rate, "waiting": sum(waits) / sum(seconds)}


def predict(job: Path, pool: Pool, workers: int, one_slower: bool, out: Path) -> dict[str, Any]:
    """Simulates each strategy in virtual time."""
    cores = quotas(workers, one_slower)
    return {s: sum_up_twin(play(job, pool, s, cores, out)) for s in STRATEGIES}


def sum_up_twin(result: dict[str, Any]) -> dict[str, float]:
    phases = result["phases"].values()
    whole = sum(sum(p[c] for c in COLUMNS) for p in phases)
    return {
        "rate": result["samples_per_s"],
        "waiting": sum(p["wait"] for p in phases) / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default="mlp-300-100,cnn-small,resnet8")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--out", type=Path, default=Path("bench/results/predicted.json"))
    parser.add_argument("--show-only", action="store_true")
    parser.add_argument("--replay", action="store_true")
    given = parser.parse_args()
    cells = read_cells(given.out)
    if given.replay:
        replay(cells)
        write_cells(given.out, cells)
    for pair in range(0 if given.show_only or given.replay else given.pairs):
        for case in (CASES[model] for model in given.models.split(",")):
            for workers in map(int, given.workers.split(",")):
                began = time.time()
                with tempfile.TemporaryDirectory() as folder:
                    one_pair(cells, case, workers, Path(folder))
                print(
                    f"pair {pair + 1}: {case.model}, {workers} workers, "
                    f"{time.time() - began:.0f} s",
                    file=sys.stderr,
                )
                write_cells(given.out, cells)
    show(cells)


def one_pair(cells: dict[str, Any], case: Case, workers: int, folder: Path) -> None:
    """Runs a probe and the runs that it predicts."""
    alone = case.write(folder / "alone.py", PROBED_STEPS)
    known = probe(alone, (QUOTA, QUOTA / SLOWER), folder)
    host = known.hosts[0].model_copy(update={"cores": usable_cores(), "workers": workers})
    pool = known.model_copy(update={"hosts": (host,)})
    job = case.write(folder / "job.py", STEPS, workers)
    for one_slower in (False, True):
        real = measure(job, quotas(workers, one_slower), folder / "real")
        twin = predict(job, pool, workers, one_slower, folder / "twin")
        for strategy in STRATEGIES:
            state = "one 3x slower" if one_slower else "calm"
            key = f"{case.model}|{workers}|{state}|{strategy}"
            cell = cells.setdefault(key, {"real": [], "twin": [], "probe": []})
            cell["real"].append(real[strategy])
            cell["twin"].append(twin[strategy])
            cell["probe"].append(pool.to_plain())


def replay(cells: dict[str, Any]) -> None:
    """Predicts all measurements of a recorded probe again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key, cell in cells.items():
            model, count, state, strategy = key.split("|")
            case, workers = CASES[model], int(count)
            job = case.write(folder / "job.py", STEPS, workers)
            cores = quotas(workers, state != "calm")
            for pair, probed in enumerate(cell["probe"]):
                pool = pool_from_mapping(probed, key)
                result = play(job, pool, strategy, cores, folder / "twin")
                cell["twin"][pair] = sum_up_twin(result)


def show(cells: dict[str, Any]) -> None:
    """Prints the table: errors are medians, a spread is the median distance from the median."""
    print(
        "| model | workers | machines | strategy | measured /s | twin /s | error | own spread "
        "| beyond it | waiting | twin | points off |"
    )
    print("|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    errors, beyond, points = [], [], []
    for key, cell in cells.items():
        real = [r["rate"] for r in cell["real"]]
        error = statistics.median(
            t["rate"] / r["rate"] - 1 for r, t in zip(cell["real"], cell["twin"], strict=True)
        )
        middle = statistics.median(real)
        spread = statistics.median(abs(r / middle - 1) for r in real)
        waiting = statistics.median(r["waiting"] for r in cell["real"])
        played = statistics.median(t["waiting"] for t in cell["twin"])
        errors.append(abs(error))
        beyond.append(max(0.0, abs(error) - spread))
        points.append(abs(played - waiting))
        print(
            "| "
            + " | ".join(f"`{k}`" if n == 3 else k for n, k in enumerate(key.split("|")))
            + f" | {middle:,.0f} | {statistics.median(t['rate'] for t in cell['twin']):,.0f}"
            f" | {100 * error:+.1f} % | {100 * spread:.1f} % | {100 * beyond[-1]:.1f} %"
            f" | {100 * waiting:.0f} % | {100 * played:.0f} % | {100 * points[-1]:.0f} |"
        )
    for name, values in (("error", errors), ("beyond the spread", beyond), ("waiting", points)):
        within = sum(e <= 0.15 for e in values)
        print(
            f"\n{name}: median {100 * statistics.median(values):.1f}, "
            f"worst {100 * max(values):.1f}; {within} of {len(values)} within 15."
        )


if __name__ == "__main__":
    main()

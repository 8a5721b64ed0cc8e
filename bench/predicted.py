"""The twin beside real runs on this machine: samples a second and the share of waiting.

    python bench/predicted.py --pairs 5 --out bench/results/predicted.json
    python bench/predicted.py --out bench/results/predicted.json --show-only

A probe (each kind of machine alone, one worker with a server, the way between two processes) and
the measurement that it is to foretell follow each other; nothing of the measurement is known to the
twin. One real run goes through the four strategies one after another, so that they share a start.
Pairs are added to those that the file holds already.
Prints a Markdown table: medians over the pairs, and beside the twin's error the measurement's own
spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from made_job import write_job
from paceline.cluster.pool import Pool, StepCost
from paceline.job import refer_to_job
from paceline.launch.run import usable_cores
from paceline.specs.strategy import read_strategy
from paceline.specs.trouble import Trouble
from paceline.telemetry.folder import RunFolder, read_events
from paceline.telemetry.reading import rows_of
from paceline.twin.calibrate import busy_s, calibrate_from_run, read_steps, steady_mean
from paceline.twin.probe import probe_ways
from paceline.twin.run import TwinOptions, run_twin

STRATEGIES = ("allreduce", "ps", "ps(sync=ssp(3))", "local_sgd(h=8)")
QUOTA = 1 / 4
"""Of a core, for each worker: four of them and a server leave cores free."""
SLOWER = 3
STEPS, PROBED_STEPS = 128, 30
STEP_COLUMNS = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait")


@dataclass(frozen=True)
class Case:
    """A network, the shape of its inputs, and how many of them each worker takes in a step."""

    model: str
    shape: tuple[int, ...]
    share: int


CASES = (
    Case("mlp-300-100", (1, 28, 28), 256),
    Case("cnn-small", (1, 28, 28), 32),
    Case("resnet8", (1, 8, 8), 64),
)


def quotas(workers: int, one_slower: bool) -> list[float]:
    """What of a core each worker has."""
    return [QUOTA / (SLOWER if one_slower and w == 0 else 1) for w in range(workers)]


def probe(case: Case, workers: int, folder: Path) -> Pool:
    """What is known before a measurement: a worker alone, and the ways between processes.

    One process is up to a fifth faster than the next here, all its life: so there are three.
    """
    job = write_job(folder / "alone.py", case.model, case.shape, case.share, PROBED_STEPS)
    alone, slow, served = folder / "alone", folder / "slow", folder / "served"
    run(job, "single", quotas(1, False), alone)
    run(job, "single", quotas(1, True), slow)
    run(job, "ps", quotas(1, False), served)
    busy = [
        quota * steady_mean([busy_s(s) for s in read_steps(RunFolder(out), 0)])
        for out, quota in ((alone, QUOTA), (slow, QUOTA / SLOWER), (served, QUOTA))
    ]
    found = calibrate_from_run(alone)
    host = found.hosts[0]
    cost = StepCost(
        per_sample_s=statistics.fmean(busy) / case.share,
        update_s=host.measured[case.model].update_s,
    )
    host = host.model_copy(
        update={
            "host": "localhost",
            "cores": usable_cores(),
            "workers": workers,
            "measured": {"any": cost},
        }
    )
    ways = probe_ways(int(RunFolder(alone).read_result()["parameter_bytes"]))
    pool = found.model_copy(update={"hosts": (host,), **ways, "control_ms": 0.0})
    return pool.model_copy(update={"control_ms": fit_control(job, pool, served)})


def fit_control(job: Path, pool: Pool, served: Path) -> float:
    """Milliseconds that one worker and one server take for an exchange beyond what is modelled."""
    real = steady_mean([s["comm_exposed"] + s["wait"] for s in read_steps(RunFolder(served), 0)])
    one = pool.model_copy(update={"hosts": (pool.hosts[0].model_copy(update={"workers": 1}),)})
    result = play(job, one, "ps", quotas(1, False), served.with_name("played"))
    phases = result["phases"]["worker-0"]
    steps = result["samples"] / refer_to_job(job, {}).resolve().batch
    return max(0.0, real / 1e3 - 1e3 * (phases["comm_exposed"] + phases["wait"]) / steps)


def run(job: Path, strategy: str, cores: list[float], out: Path) -> None:
    command = [
        *(sys.executable, "-c", "from paceline.cli.main import main; main()", "train", str(job)),
        *("--workers", str(len(cores)), "--out", str(out), "--force", "--quiet"),
        *("--threads", "1", "--strategy", strategy),
    ]
    for worker, share in enumerate(cores):
        command += ["--slow", f"worker={worker},cores={share}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)


def measure(job: Path, cores: list[float], out: Path) -> dict[str, Any]:
    """One real run through all strategies: rate and share of waiting of each."""
    points = ", ".join(f"{25 * k}%" for k in range(1, len(STRATEGIES)))
    run(job, f"switch({', '.join(STRATEGIES)}, at=({points}))", cores, out)
    return split_phases(RunFolder(out), len(cores))


def split_phases(folder: RunFolder, workers: int) -> dict[str, Any]:
    """Steps by the strategy they belong to: the first of each is left out, it holds the switch."""
    result = folder.read_result()
    per_epoch = result["history"][0]["samples"]
    bounds = [0, *(row["samples"] for row in result["switches"]), result["samples"] + 1]
    found: dict[str, Any] = {}
    rows: list[list[list[dict[str, Any]]]] = [[[] for _ in STRATEGIES] for _ in range(workers)]
    for worker in range(workers):
        for event in read_events(folder.events(f"worker-{worker}")):
            if event.get("kind") != "steps":
                continue
            for step in rows_of(event):
                at = step["epoch"] * per_epoch + step["start"]
                phase = max(k for k in range(len(STRATEGIES)) if bounds[k] <= at)
                rows[worker][phase].append(step)
    for index, strategy in enumerate(STRATEGIES):
        mine = [rows[worker][index][2:] for worker in range(workers)]
        found[strategy] = sum_up(mine, synchronous=not strategy.startswith("ps"))
    return found


def sum_up(steps: list[list[dict[str, Any]]], *, synchronous: bool) -> dict[str, float]:
    """Rate of all workers together, and what of their time they spent waiting for others."""
    seconds = [sum(s[c] for s in mine for c in STEP_COLUMNS) / 1e6 for mine in steps]
    samples = [sum(s["hi"] - s["lo"] for s in mine) for mine in steps]
    waits = [sum(s["wait"] for s in mine) / 1e6 for mine in steps]
    if synchronous:
        # In a collective the last to arrive does not wait: what others take beyond it is waiting.
        for together in zip(*steps, strict=False):
            least = min(s["comm_exposed"] for s in together)
            for worker, step in enumerate(together):
                waits[worker] += (step["comm_exposed"] - least) / 1e6
    rate = sum(n / s for n, s in zip(samples, seconds, strict=True))
    return {"rate": rate, "waiting": sum(waits) / sum(seconds)}


def play(job: Path, pool: Pool, strategy: str, cores: list[float], out: Path) -> dict[str, Any]:
    troubles = tuple(Trouble(worker=w, cores=c) for w, c in enumerate(cores))
    options = TwinOptions(
        out=out, pool=pool, depth="cost", troubles=troubles, force=True, workers=len(cores)
    )
    return run_twin(refer_to_job(job, {}), read_strategy(strategy), options)


def predict(job: Path, pool: Pool, workers: int, one_slower: bool, out: Path) -> dict[str, Any]:
    """Play each strategy in virtual time."""
    found = {}
    for strategy in STRATEGIES:
        result = play(job, pool, strategy, quotas(workers, one_slower), out)
        phases = result["phases"].values()
        whole = sum(sum(p[c] for c in STEP_COLUMNS) for p in phases)
        found[strategy] = {
            "rate": result["samples_per_s"],
            "waiting": sum(p["wait"] for p in phases) / whole,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default=",".join(c.model for c in CASES))
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--out", type=Path, default=Path("bench/results/predicted.json"))
    parser.add_argument("--show-only", action="store_true")
    given = parser.parse_args()
    cells: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    wanted = given.models.split(",")
    for pair in range(0 if given.show_only else given.pairs):
        for case in (c for c in CASES if c.model in wanted):
            for workers in map(int, given.workers.split(",")):
                began = time.time()
                with tempfile.TemporaryDirectory() as folder:
                    one_pair(cells, case, workers, Path(folder))
                print(
                    f"pair {pair + 1}: {case.model}, {workers} workers, "
                    f"{time.time() - began:.0f} s",
                    file=sys.stderr,
                )
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    show(cells)


def one_pair(cells: dict[str, Any], case: Case, workers: int, folder: Path) -> None:
    """A probe, and the runs that it is to foretell."""
    pool = probe(case, workers, folder)
    job = write_job(folder / "job.py", case.model, case.shape, case.share * workers, STEPS)
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


def show(cells: dict[str, Any]) -> None:
    """Errors are medians over the pairs; a spread is the median distance from the median."""
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

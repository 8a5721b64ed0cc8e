"""The twin beside real runs on this machine: samples a second and the share of waiting.

    python bench/predicted.py --data-dir DIR --pairs 5 --out bench/results/predicted.json
    python bench/predicted.py --out bench/results/predicted.json --show-only

Pairs of a probe (one worker alone, the way between two processes) and a measurement follow each
other; nothing else of the measurement is known to the twin. One real run goes through the four
strategies one after another, so that they share a start. Pairs are added to those that the file
holds already.
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
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Pool
from paceline.job import Job
from paceline.specs.strategy import read_strategy
from paceline.specs.trouble import read_trouble
from paceline.telemetry.folder import RunFolder, read_events
from paceline.telemetry.reading import rows_of
from paceline.twin.calibrate import calibrate_from_run
from paceline.twin.probe import probe_ways
from paceline.twin.run import TwinOptions, run_twin

STRATEGIES = ("allreduce", "ps", "ps(sync=ssp(3))", "local_sgd(h=8)")
MODELS = {
    "mlp-300-100": {"data": "fashion-mnist", "epochs": 1},
    "cnn-small": {"data": "digits", "epochs": 32},
    "resnet8": {"data": "digits", "epochs": 12},
}
QUOTA = 4
"""Each worker has a quarter of a core, so that processes hardly touch each other."""
STEP_COLUMNS = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait")
BATCH = 128
LR = 0.001
"""Nothing may diverge here; the learning rate costs no time."""


def slowed(workers: int, one_slower: bool) -> list[str]:
    """What each worker is slowed by.

    A worker that is slowed sleeps, which is a quota on its processor without the jerks of one.
    """
    factors = [QUOTA * (3 if one_slower and w == 0 else 1) for w in range(workers)]
    return [f"worker={w},factor={f}" for w, f in enumerate(factors)]


def probe(job: dict[str, Any], workers: int, out: Path) -> Pool:
    """One worker alone under its quota, with the share that it will have, and the ways between."""
    run(job, "single", 1, slowed(1, False), out, BATCH // workers, max(1, job["epochs"] // 4))
    alone = calibrate_from_run(out)
    figures = probe_ways(int(RunFolder(out).read_result()["parameter_bytes"]))
    host = alone.hosts[0].model_copy(update={"host": "localhost", "workers": workers})
    return alone.model_copy(update={"hosts": (host,), **figures})


def run(
    job: dict[str, Any],
    strategy: str,
    workers: int,
    slow: list[str],
    out: Path,
    batch: int,
    epochs: int,
) -> None:
    command = [
        *(sys.executable, "-c", "from paceline.cli.main import main; main()", "train"),
        *("--model", job["model"], "--data", job["data"], "--epochs", str(epochs)),
        *("--lr", str(LR), "--workers", str(workers), "--out", str(out), "--force", "--quiet"),
        *("--checkpoint-every", "never", "--threads", "1", "--batch", str(batch)),
        *("--strategy", strategy),
    ]
    if job["data_dir"] is not None:
        command += ["--data-dir", str(job["data_dir"])]
    for one in slow:
        command += ["--slow", one]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)


def measure(job: dict[str, Any], workers: int, slow: list[str], out: Path) -> dict[str, Any]:
    """One real run through all strategies: rate and share of waiting of each."""
    points = ", ".join(f"{25 * k}%" for k in range(1, len(STRATEGIES)))
    strategy = f"switch({', '.join(STRATEGIES)}, at=({points}))"
    run(job, strategy, workers, slow, out, BATCH, job["epochs"])
    return split_phases(RunFolder(out), workers)


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


def make_job(job: dict[str, Any]) -> Job:
    return Job(
        model=job["model"],
        data=job["data"],
        data_dir=job["data_dir"],
        epochs=job["epochs"],
        batch=BATCH,
        lr=LR,
        checkpoint_every="never",
    )


def predict(spec: Job, pool: Pool, workers: int, one_slower: bool, out: Path) -> dict[str, Any]:
    """Play each strategy in virtual time; the probed machine has its quota already."""
    slow = [read_trouble("slow", "worker=0,factor=3", workers)] if one_slower else []
    troubles = tuple(slow)
    found = {}
    for strategy in STRATEGIES:
        options = TwinOptions(
            out=out, pool=pool, depth="cost", troubles=troubles, force=True, workers=workers
        )
        result = run_twin(spec, read_strategy(strategy), options)
        phases = result["phases"].values()
        whole = sum(sum(p[c] for c in STEP_COLUMNS) for p in phases)
        found[strategy] = {
            "rate": result["samples_per_s"],
            "waiting": sum(p["wait"] for p in phases) / whole,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--out", type=Path, default=Path("bench/results/predicted.json"))
    parser.add_argument("--show-only", action="store_true")
    given = parser.parse_args()
    cells: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for pair in range(0 if given.show_only else given.pairs):
        for model in given.models.split(","):
            for workers in map(int, given.workers.split(",")):
                began = time.time()
                job = {"model": model, "data_dir": given.data_dir, **MODELS[model]}
                with tempfile.TemporaryDirectory() as folder:
                    one_pair(cells, job, workers, Path(folder))
                print(
                    f"pair {pair + 1}: {model}, {workers} workers, {time.time() - began:.0f} s",
                    file=sys.stderr,
                )
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    show(cells)


def one_pair(cells: dict[str, Any], job: dict[str, Any], workers: int, folder: Path) -> None:
    """A probe, and the runs that it is to predict."""
    spec = make_job(job)
    pool = probe(job, workers, folder / "alone")
    for one_slower in (False, True):
        real = measure(job, workers, slowed(workers, one_slower), folder / "real")
        twin = predict(spec, pool, workers, one_slower, folder / "twin")
        for strategy in STRATEGIES:
            state = "one 3x slower" if one_slower else "calm"
            key = f"{job['model']}|{workers}|{state}|{strategy}"
            cell = cells.setdefault(key, {"real": [], "twin": [], "probe": []})
            cell["real"].append(real[strategy])
            cell["twin"].append(twin[strategy])
            cell["probe"].append(pool.model_dump(mode="json", exclude_defaults=True))


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

"""Probes before a measurement: a worker alone, with a server, and the exchange between two."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.job import refer_to_job
from paceline.specs.slowdown import InjectedSlowdown
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from paceline.twin.calibration import coefficient_of_variation, read_warm_steps, trimmed_mean
from paceline.twin.machine_probe import probe_backends
from paceline.twin.run import TwinOptions, run_twin

COLUMNS = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait")
"""The parts of a step."""
COLD = 7
"""Steps of a probe to skip in addition to the first tenth, while torch warms up."""


def train(job: Path, out: Path, *options: object, home: Path | None = None) -> None:
    """Trains one real run, with one thread per process."""
    command = [sys.executable, "-c", "from paceline.cli.main import main; main()", "train", job]
    command += [*options, "--threads", 1, "--out", out, "--force", "--quiet"]
    environment = {**os.environ, **({"HOME": str(home)} if home is not None else {})}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")


def limit(cores: Iterable[float]) -> list[str]:
    """Returns the options that give each worker its fraction of a core."""
    return [part for w, c in enumerate(cores) for part in ("--slow", f"worker={w},cores={c}")]


def play(job: Path, pool: Pool, strategy: str, cores: list[float], out: Path) -> dict[str, Any]:
    """Simulates the same run."""
    slowdowns = tuple(InjectedSlowdown(worker=w, cores=c) for w, c in enumerate(cores))
    options = TwinOptions(
        out=out, pool=pool, depth="cost", slowdowns=slowdowns, force=True, workers=len(cores)
    )
    return run_twin(refer_to_job(job, {}), parse_strategy(strategy), options)


def probe(job: Path, quotas: tuple[float, float], folder: Path) -> Pool:
    """Measures this machine as one of a pool with `quotas[0]` of a core for its worker.

    Processes differ permanently by up to a fifth in speed here, so three are measured.
    """
    quota, other = quotas
    runs: Mapping[str, tuple[str, float]] = {
        "alone": ("single", quota),
        "slow": ("single", other),
        "served": ("ps(via=network)", quota),
    }
    for name, (strategy, cores) in runs.items():
        train(job, folder / name, "--strategy", strategy, "--workers", 1, *limit([cores]))
    steps = {name: read_warm_steps(folder / name, 0)[COLD:] for name in runs}
    busy = [
        runs[name][1] * trimmed_mean([s.compute_s for s in mine]) for name, mine in steps.items()
    ]
    spec = refer_to_job(job, {}).resolve()
    cost = StepCost(
        per_sample_s=statistics.fmean(busy) / spec.batch,
        update_s=trimmed_mean([s.optimizer / 1e6 for s in steps["alone"]]),
    )
    nbytes = int(RunFolder(folder / "alone").read_result()["parameter_bytes"])
    pool = Pool(
        hosts=(Host(host="localhost", measured={"any": cost}),),
        link=Link(mbit_s=float("inf"), latency_ms=0.0),
        jitter=Jitter(cv=min(2.0, coefficient_of_variation(steps["alone"]))),
    ).model_copy(update={**probe_backends(nbytes, shared=False), "control_ms": 0.0})
    # What one worker and one server take for an exchange beyond what is modelled.
    played = play(job, pool, "ps", [quota], folder / "played")
    phases = played["phases"]["worker-0"]
    modelled = 1e3 * (phases["comm_exposed"] + phases["wait"]) * spec.batch / played["samples"]
    real = trimmed_mean([s.comm_exposed + s.wait for s in steps["served"]]) / 1e3
    return pool.model_copy(update={"control_ms": max(0.0, real - modelled)})


def read_cells(path: Path) -> dict[str, Any]:
    cells: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return cells


def write_cells(path: Path, cells: dict[str, Any]) -> None:
    """Formats one line per row of the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

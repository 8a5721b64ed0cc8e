"""Compares predicted and measured step times over links of several speeds. Requires root.

    python bench/steps.py --pairs 5 --out bench/results/steps.json
    python bench/steps.py --out bench/results/steps.json --show-only
    python bench/steps.py --out bench/results/steps.json --replay

`--replay` predicts the recorded measurements from their recorded probes with the current planner.

Three machines are network namespaces with their own SSH servers, as in the tests; `tc` limits the
sending rate. Two have workers, each with half a core, the third serves parameters. A pair is a
probe (one worker alone, with a server, the exchange between two processes; the doctor's links) and
one run per number of workers, half `allreduce`, half `ps`. Pairs are added to those in the file.
Prints a Markdown table: medians over the pairs, and the spread of the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cluster.doctor import ExaminationOptions, examine
from paceline.cluster.measurements import update_pool
from paceline.cluster.pool import Host, Pool, StepCost
from paceline.cluster.pool_file import load_pool, pool_from_mapping
from paceline.job import refer_to_job
from paceline.plan.estimate import estimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.run_folder import RunFolder
from paceline.twin.calibration import read_warm_steps
from paceline.twin.workload import workload_of_job
from step_probe import COLUMNS, limit, probe, read_cells, train, write_cells
from synthetic_job import CASES, Case

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import network_namespaces as machines_here

LINKS = {"100 Mbit/s": 100, "1 Gbit/s": 1000, "unlimited": None}
STRATEGIES = ("allreduce", "ps")
QUOTA = 1 / 2
STEPS, PROBED_STEPS = 44, 40


def limit_links(lab: machines_here.Lab, mbit_s: int | None) -> None:
    """Limits the sending rate of each machine on the shared network."""
    for machine in lab.machines:
        tc = ("tc", "-n", machine.namespace, "qdisc")
        machines_here.run(*tc, "del", "dev", "eth0", "root", check=False)
        if mbit_s is not None:
            shape = ("tbf", "rate", f"{mbit_s}mbit", "burst", "64kb", "latency", "50ms")
            machines_here.run(*tc, "add", "dev", "eth0", "root", *shape)


@contextmanager
def at_home(lab: machines_here.Lab) -> Iterator[None]:
    """Sets HOME to a directory with the SSH key and known hosts."""
    before = os.environ["HOME"]
    os.environ["HOME"] = str(lab.home)
    try:
        yield
    finally:
        os.environ["HOME"] = before


def examine_links(lab: machines_here.Lab, folder: Path) -> Pool:
    path = lab.write_pool(folder / "pool.yaml", all={"python": sys.executable})
    with at_home(lab):
        return update_pool(
            asyncio.run(examine(load_pool(path).pool, ExaminationOptions(flops_s=0.1)))
        )


def only_links(pool: Pool) -> dict[str, Any]:
    """Returns the machines' properties for a prediction, without paths and accounts."""
    hosts = [Host(host=h.host, link=h.link) for h in pool.hosts]
    return Pool(hosts=tuple(hosts)).to_plain()


def predict(job: Path, known: Pool, links: Pool, workers: int) -> dict[str, float]:
    """Returns seconds per step, as predicted by `paceline plan`."""
    cost = known.hosts[0].measured["any"]
    stretched = StepCost(per_sample_s=cost.per_sample_s / QUOTA, update_s=cost.update_s)
    hosts = tuple(h.model_copy(update={"measured": {"any": stretched}}) for h in links.hosts)
    pool = known.model_copy(update={"hosts": hosts})
    machines = PoolArrays(pool, workload_of_job(refer_to_job(job, {}).resolve()))
    chosen = np.arange(workers)
    return {s: estimate(machines, chosen, parse_strategy(s)).step_s for s in STRATEGIES}


def measure(lab: machines_here.Lab, job: Path, workers: int, folder: Path) -> dict[str, float]:
    """Returns seconds per step under each strategy, from all steps except the first of each."""
    marked = {f"h{n + 1}": {"energy_efficient": True} for n in range(workers)}
    pool = lab.write_pool(folder / "chosen.yaml", all={"python": sys.executable}, **marked)
    out = folder / "real"
    options = ["--pool", pool, "--select", "energy", "--servers-on", lab.machines[2].name]
    options += ["--strategy", f"switch({', '.join(STRATEGIES)}, at=50%)", *limit([QUOTA] * workers)]
    train(job, out, *options, home=lab.home)
    result = RunFolder(out).read_result()
    bound = result["switches"][0]["samples"]
    found = {}
    for strategy in STRATEGIES:
        rates = []
        for worker in range(workers):
            mine = [
                step
                for step in read_warm_steps(out, worker)
                if (step.start < bound) == (strategy == STRATEGIES[0])
            ][2:]
            seconds = sum(getattr(s, c) for s in mine for c in COLUMNS) / 1e6
            rates.append(sum(s.samples for s in mine) / seconds)
        found[strategy] = refer_to_job(job, {}).resolve().batch / sum(rates)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("bench/results/steps.json"))
    parser.add_argument("--show-only", action="store_true")
    parser.add_argument("--replay", action="store_true")
    given = parser.parse_args()
    cells = read_cells(given.out)
    cases = [CASES[model] for model in given.models.split(",")]
    if given.replay:
        replay(cells)
        write_cells(given.out, cells)
    elif not given.show_only:
        with (
            tempfile.TemporaryDirectory() as folder,
            machines_here.make_lab(Path(folder) / "lab") as lab,
        ):
            for pair in range(given.pairs):
                one_pair(lab, cases, cells, Path(folder), f"pair {pair + 1}")
                write_cells(given.out, cells)
    show(cells)


def one_pair(
    lab: machines_here.Lab, cases: list[Case], cells: dict[str, Any], folder: Path, name: str
) -> None:
    (folder / "project").mkdir(exist_ok=True)
    began = time.time()
    links = {}
    for link, mbit_s in LINKS.items():
        limit_links(lab, mbit_s)
        links[link] = examine_links(lab, folder)
    for case in cases:
        alone = case.write(folder / "alone.py", PROBED_STEPS)
        known = probe(alone, (QUOTA, QUOTA), folder)
        for link, mbit_s in LINKS.items():
            limit_links(lab, mbit_s)
            for workers in (1, 2):
                job = case.write(folder / "project" / "job.py", STEPS, workers)
                real = measure(lab, job, workers, folder)
                said = predict(job, known, links[link], workers)
                for strategy in STRATEGIES:
                    key = f"{case.model}|{workers}|{link}|{strategy}"
                    cell = cells.setdefault(key, {"real": [], "said": [], "probe": []})
                    cell["real"].append(real[strategy])
                    cell["said"].append(said[strategy])
                    cell["probe"].append([known.to_plain(), only_links(links[link])])
        print(f"{name}: {case.model}, {time.time() - began:.0f} s", file=sys.stderr)


def replay(cells: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for key, cell in cells.items():
            model, count, _, strategy = key.split("|")
            case, workers = CASES[model], int(count)
            path = Path(folder) / "job.py"
            job = case.write(path, STEPS, workers)
            for pair, (known, links) in enumerate(cell["probe"]):
                pools = pool_from_mapping(known, key), pool_from_mapping(links, key)
                cell["said"][pair] = predict(job, *pools, workers)[strategy]


def show(cells: dict[str, Any]) -> None:
    """Prints the table: errors are medians, a spread is the median distance from the median."""
    print("| model | workers | link | strategy | measured ms | predicted ms | error | own spread |")
    print("|---|---:|---|---|---:|---:|---:|---:|")
    errors = []
    for key, cell in sorted(cells.items()):
        middle = statistics.median(cell["real"])
        error = statistics.median(
            s / r - 1 for s, r in zip(cell["said"], cell["real"], strict=True)
        )
        spread = statistics.median(abs(r / middle - 1) for r in cell["real"])
        errors.append(abs(error))
        words = [f"`{k}`" if n == 3 else k for n, k in enumerate(key.split("|"))]
        print(
            f"| {' | '.join(words)} | {1e3 * middle:.1f} "
            f"| {1e3 * statistics.median(cell['said']):.1f} "
            f"| {100 * error:+.1f} % | {100 * spread:.1f} % |"
        )
    within = sum(e <= 0.2 for e in errors)
    print(
        f"\nmedian {100 * statistics.median(errors):.1f}%, worst {100 * max(errors):.1f}%; "
        f"{within} of {len(errors)} within 20%."
    )


if __name__ == "__main__":
    main()

"""Simulates the scaling of strategies from 1 to 10,000 machines; writes a chart and its numbers.

    python bench/scaling.py --out docs/images/scaling.svg --json bench/results/scaling.json

Weak scaling: every machine has a share of 32 samples per step of a network of 1 million parameters
that takes 30 ms for them (0.1 GFLOP per sample at 100 GFLOP/s), on 10 Gbit/s links.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Host, Link, Pool
from paceline.plan.cost_model import Workload
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

SHARE, STEPS = 32, 10
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 5000, 10_000)
LINES = {
    "all-reduce, ring": ("allreduce", "ring"),
    "all-reduce, tree": ("allreduce", "tree"),
    "ps, 1 server": ("ps", "auto"),
    "ps, 8 servers": ("ps(servers=8)", "auto"),
    "ps, 64 servers": ("ps(servers=64)", "auto"),
    "ps, ssp(3), 64 servers": ("ps(sync=ssp(3), servers=64)", "auto"),
    "local_sgd(h=8)": ("local_sgd(h=8)", "auto"),
    "grouped(32), 64 servers": ("grouped(size=32, servers=64)", "auto"),
}


def play(strategy: str, collective: str, workers: int) -> dict[str, float] | None:
    spec = parse_strategy(strategy)
    if spec.servers_for(workers) > workers or getattr(spec, "size", 1) > workers:
        return None
    hosts = tuple(Host(host=f"m{i}", cores=8, gflops=100) for i in range(workers))
    pool = Pool(hosts=hosts, link=Link(mbit_s=10_000, latency_ms=0.05))
    pool = pool.model_copy(update={"collective": collective, "collective_gb_s": 5.0})
    batch = SHARE * workers
    work = Workload(
        model="scaled",
        data="none",
        shapes=((1000, 1000),),
        item_bytes=4,
        flops_per_sample=1e8,
        samples=batch * STEPS,
        batch=batch,
        epochs=1,
        evaluated={},
        slots=1,
    )
    world = Simulator(RunSpec(strategy=spec, workers=workers), pool, work, WeightsBackend())
    began = time.perf_counter()
    world.run()
    history = world.coordinator.history
    phases = [t["phases"] for t in world.coordinator.totals.values()]
    idle = sum(p["wait"] + p["comm_exposed"] for p in phases)
    return {
        "samples_per_s": history.samples / history.train_seconds,
        "not_computing": idle / (world.timeline.now * workers),
        "real_s": time.perf_counter() - began,
        "events": world.timeline.events,
    }


def play_million() -> None:
    """Times the twin itself: 10,000 machines, one server, 1,000,000 updates."""
    workers, updates = 10_000, 1_000_000
    hosts = tuple(Host(host=f"m{i}", cores=8, gflops=100) for i in range(workers))
    pool = Pool(hosts=hosts, link=Link(mbit_s=10_000, latency_ms=0.05))
    work = Workload(
        model="scaled",
        data="none",
        shapes=((1000, 1000),),
        item_bytes=4,
        flops_per_sample=1e8,
        samples=SHARE * updates,
        batch=SHARE * workers,
        epochs=1,
        evaluated={},
        slots=1,
    )
    began = time.perf_counter()
    plan = RunSpec(strategy=parse_strategy("ps"), workers=workers)
    world = Simulator(plan, pool, work, WeightsBackend())
    world.run()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{world.coordinator.history.updates:,} updates on {workers:,} machines: "
        f"{time.perf_counter() - began:.1f} s, {world.timeline.events:,} events, {memory:.0f} MB"
    )


def draw(found: dict[str, Any], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "paceline"  # the same picture from the same figures
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    styles = ["-", "--", ":", "-.", "-", "--", ":", "-."]
    for (name, points), style in zip(found.items(), styles, strict=True):
        sizes = [p["workers"] for p in points]
        left.plot(sizes, [p["samples_per_s"] for p in points], style, label=name, marker=".")
        right.plot(sizes, [100 * p["not_computing"] for p in points], style, marker=".")
    left.set(xscale="log", yscale="log", xlabel="machines", ylabel="samples / virtual second")
    right.set(xscale="log", xlabel="machines", ylabel="waiting and exchanging, % of all time")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/images/scaling.svg"))
    parser.add_argument("--json", type=Path, default=Path("bench/results/scaling.json"))
    parser.add_argument("--most", type=int, default=SIZES[-1])
    parser.add_argument("--million", action="store_true", help="only time a million updates")
    given = parser.parse_args()
    if given.million:
        play_million()
        return
    found: dict[str, list[dict[str, float]]] = {}
    for name, (strategy, collective) in LINES.items():
        for workers in (s for s in SIZES if s <= given.most):
            point = play(strategy, collective, workers)
            if point is not None:
                found.setdefault(name, []).append({"workers": workers, **point})
        last = found[name][-1]
        print(f"{name}: {last['samples_per_s']:,.0f} samples/s on {last['workers']:,.0f} machines")
    given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw(found, given.out)


if __name__ == "__main__":
    main()

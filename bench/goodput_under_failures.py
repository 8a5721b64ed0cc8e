"""Simulates training on 10 to 10,000 machines that fail and return, under three policies.

    python bench/goodput_under_failures.py --json bench/results/goodput.json --out goodput.svg
    python bench/goodput_under_failures.py --json bench/results/goodput.json --sizes 10,100

Goodput is the rate of samples that count, relative to the same machines without failures. Machines
fail independently (exponential, mean MTBF_S) and return after REPAIR_S. All policies have the same
failures, machines, steps, delay of detection and startup:

elastic    Paceline: the twin with the coordinator of real runs. The step in progress is repeated by
           the machines that remain, which also take over the share of the lost one.
restart    all processes restart from the latest checkpoint with the machines that exist then. The
           interval of checkpoints is Daly's estimate of the best one (J. T. Daly, "A higher order
           estimate of the optimum checkpoint interval for restart dumps", 2006, which extends
           J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974).
           Machines that return take part from the next restart, or restart all at the next
           checkpoint, whichever has the higher goodput.
drop       torchft-like: the step in progress is lost for all groups of machines, and training
           continues without the group of the lost machine, with a smaller batch, until it is back.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.pool import DownPeriod, Host, Jitter, Link, Pool
from paceline.launch.deadlines import SILENCE_S
from paceline.plan.cost_model import Workload, allreduce_s
from paceline.protocol.run_spec import RunSpec
from paceline.strategies.registry import parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightsBackend

SIZES = (10, 100, 1000, 10_000)
MTBF_S, REPAIR_S, STARTUP_S = 3 * 86400.0, 600.0, 30.0
HOURS = {10: 48.0, 100: 5.0, 1000: 1.0, 10_000: 0.06}
"""Length of a run without failures, so that several machines fail."""
SHARE, PARAMETERS = 64, 25_000_000
STORAGE_BYTES_S = 1e9
"""Rate at which a checkpoint is written, and read again by all machines at the same time."""
GROUPS = (1, 5)
REFERENCE_STEPS = 5


@dataclass(frozen=True)
class Outage:
    machine: int
    from_s: float
    to_s: float


def draw_outages(machines: int, seconds: float, seed: int) -> list[Outage]:
    """Returns the failures of all machines, in order."""
    rng, outages = random.Random(f"{seed}/{machines}"), []
    for machine in range(machines):
        at = rng.expovariate(1 / MTBF_S)
        while at < seconds:
            outages.append(Outage(machine, at, at + REPAIR_S))
            at += REPAIR_S + rng.expovariate(1 / MTBF_S)
    return sorted(outages, key=lambda each: each.from_s)


def make_pool(machines: int, outages: list[Outage]) -> Pool:
    down: dict[int, list[DownPeriod]] = {}
    for each in outages:
        down.setdefault(each.machine, []).append(DownPeriod(from_s=each.from_s, to_s=each.to_s))
    hosts = (
        Host(host=f"m{i}", cores=8, gflops=100, startup_s=STARTUP_S, down=tuple(down.get(i, ())))
        for i in range(machines)
    )
    # Without jitter a short run has the rate of a long one.
    pool = Pool(
        hosts=tuple(hosts), link=Link(mbit_s=10_000, latency_ms=0.05), jitter=Jitter(cv=0.0)
    )
    return pool.model_copy(update={"collective_gb_s": 5.0})


def simulate(pool: Pool, steps: int) -> tuple[float, Simulator]:
    """Returns the virtual seconds of this many global batches under `allreduce`."""
    machines = len(pool.hosts)
    batch = SHARE * machines
    work = Workload(
        model="scaled",
        data="none",
        shapes=((PARAMETERS,),),
        item_bytes=4,
        flops_per_sample=16e9,  # 10 seconds per step
        samples=batch * steps,
        batch=batch,
        epochs=1,
        evaluated={},
        slots=1,
    )
    plan = RunSpec(strategy=parse_strategy("allreduce"), workers=machines, min_workers=1)
    world = Simulator(plan, pool, work, WeightsBackend())
    end = world.run()
    assert end.status == "done", end.error
    assert world.coordinator.history.samples == batch * steps
    return world.timeline.now, world


@dataclass(frozen=True)
class Steps:
    """Duration of a step without failures, and of what all policies need after one."""

    machines: int
    step_s: float
    regroup_s: float
    exchange_s: float

    def with_machines(self, count: int) -> float:
        """Seconds of a step whose batch is divided among fewer machines."""
        compute_s = self.step_s - self.exchange_s
        return self.exchange_s + compute_s * self.machines / max(1, count)

    @property
    def checkpoint_s(self) -> float:
        return PARAMETERS * 8 / STORAGE_BYTES_S


# ---- the other policies -----------------------------------------------------------------------


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Computing time between two checkpoints, equation 37 of Daly."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * checkpoint_s * mtbf_s) * series - checkpoint_s


def count_up(machines: int, outages: list[Outage], now: float) -> int:
    """Returns the number of machines that exist at a time."""
    return machines - sum(o.from_s <= now < o.to_s for o in outages)


def restart_from_checkpoints(
    steps: Steps, outages: list[Outage], total: int, *, admits: bool
) -> float:
    """Returns the seconds until this many steps are done.

    With `admits`, machines that have returned restart all at the next checkpoint.
    """
    interval_s = daly_interval_s(steps.checkpoint_s, MTBF_S / steps.machines)
    now, done, saved, index = 0.0, 0.0, 0.0, 0
    members = steps.machines
    while done < total:
        step_s = steps.with_machines(members)
        target = min(total, saved + max(1.0, interval_s // step_s))
        ends = now + (target - done) * step_s + steps.checkpoint_s
        while index < len(outages) and outages[index].from_s < now:
            index += 1
        if index < len(outages) and outages[index].from_s < ends:
            done, now = saved, restart(steps, outages, outages[index].from_s + SILENCE_S)
            members = count_up(steps.machines, outages, now)
            continue
        now, done, saved = ends, target, target
        if admits and count_up(steps.machines, outages, now) > members:
            now = restart(steps, outages, now)
            members = count_up(steps.machines, outages, now)
    return now


def restart(steps: Steps, outages: list[Outage], now: float) -> float:
    """Starts all processes; a failure meanwhile is noticed, and all start once more."""
    while True:
        up = now + STARTUP_S + steps.regroup_s + steps.checkpoint_s
        later = [o.from_s for o in outages if now < o.from_s < up]
        if not later:
            return up
        now = later[0] + SILENCE_S


def drop_groups(
    steps: Steps, outages: list[Outage], seconds: float, size: int
) -> tuple[float, float]:
    """Returns the samples that count until `seconds`, and those that were lost, in full steps."""
    groups = steps.machines // size
    events = []  # (time, change of the number of machines that are missing in a group)
    for each in outages:
        events.append((each.from_s, each.machine // size, 1))
        events.append((each.to_s + STARTUP_S, each.machine // size, -1))
    missing = [0] * groups
    alive, now, counted, lost = groups, 0.0, 0.0, 0.0
    for at, group, change in sorted(events):
        if at >= seconds:
            break
        before = missing[group]
        missing[group] += change
        if (before == 0) == (missing[group] == 0):
            continue
        if at > now:
            whole = (at - now) // steps.step_s
            counted += whole * alive / groups
            if change > 0:
                lost += (at - now) / steps.step_s % 1 * alive / groups
                now = at + SILENCE_S
            else:  # A group returns between two steps.
                counted += alive / groups
                now += (whole + 1) * steps.step_s
        elif change > 0:
            now = max(now, at + SILENCE_S)
        alive += -1 if change > 0 else 1
        now += steps.regroup_s
    counted += max(0.0, seconds - now) / steps.step_s * alive / groups
    return counted, lost


# ---- comparison -------------------------------------------------------------------------------


def compare(machines: int, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    calm = make_pool(machines, [])
    reference_s, _ = simulate(calm, REFERENCE_STEPS)
    step_s = reference_s / REFERENCE_STEPS
    total = int(HOURS[machines] * 3600 / step_s)
    outages = draw_outages(machines, HOURS[machines] * 3600 * 10, seed)
    seconds, world = simulate(make_pool(machines, outages), total)
    views = world.coordinator.history.views
    exchange_s = allreduce_s(calm, calm.hosts, PARAMETERS * 4)
    # The coordinator handles three replies of each machine in a change of the view.
    regroup_s = calm.regroup_s + 3 * machines * calm.control_ms / 1e3
    steps = Steps(machines, step_s, regroup_s, exchange_s)
    ideal_s = total * step_s
    restarts = {
        name: ideal_s / restart_from_checkpoints(steps, outages, total, admits=admits)
        for name, admits in (("next restart", False), ("next checkpoint", True))
    }
    admission = max(restarts, key=lambda name: restarts[name])
    drops = {}
    for size in GROUPS:
        counted, lost = drop_groups(steps, outages, ideal_s, size)
        drops[str(size)] = {"goodput": counted / total, "lost_samples": lost / total}
    return {
        "machines": machines,
        "step_s": step_s,
        "steps": total,
        "hours": ideal_s / 3600,
        "failures": sum(o.from_s < seconds for o in outages),
        "elastic": ideal_s / seconds,
        "views": len(views),
        "pause_s": sorted(v.pause_s for v in views)[len(views) // 2] if views else None,
        "restart": restarts[admission],
        "admission": admission,
        "interval_s": daly_interval_s(steps.checkpoint_s, MTBF_S / machines),
        "drop": drops,
        "real_s": time.perf_counter() - began,
    }


def show(rows: list[dict[str, Any]]) -> None:
    names = ["machines", "hours", "failures", "elastic", "restart"]
    names += [f"drop ({size} per group)" for size in GROUPS]
    print("| " + " | ".join(names) + " |")
    print("|" + "---:|" * len(names))
    for row in rows:
        drops = [f"{100 * row['drop'][str(size)]['goodput']:.1f}%" for size in GROUPS]
        cells = [f"{row['machines']:,}", f"{row['hours']:.0f}", str(row["failures"])]
        cells += [f"{100 * row['elastic']:.1f}%", f"{100 * row['restart']:.1f}%", *drops]
        print("| " + " | ".join(cells) + " |")


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    panel = figure.subplots()
    sizes = [row["machines"] for row in rows]
    lines = {
        "elastic (Paceline)": ([row["elastic"] for row in rows], "#1b6ca8", "o-"),
        "restart from checkpoints": ([row["restart"] for row in rows], "#9aa5b1", "s--"),
    }
    for size, style in zip(GROUPS, ("^:", "v:"), strict=True):
        values = [row["drop"][str(size)]["goodput"] for row in rows]
        lines[f"drop the group, {size} per group"] = (values, "#c26d3c", style)
    for name, (values, colour, style) in lines.items():
        panel.plot(sizes, [100 * v for v in values], style, color=colour, label=name)
    panel.set_xscale("log")
    panel.set_ylim(0, 102)
    panel.set_xlabel("machines")
    panel.set_ylabel("goodput in % of the failure-free rate")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="chart")
    options = parser.parse_args()
    sizes = [int(word) for word in options.sizes.split(",")]
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    for machines in sizes:
        row = compare(machines, options.seed)
        rows = sorted(
            [*(r for r in rows if r["machines"] != machines), row], key=lambda r: r["machines"]
        )
        setup = {"mtbf_s": MTBF_S, "repair_s": REPAIR_S, "startup_s": STARTUP_S}
        options.json.write_text(json.dumps({**setup, "rows": rows}, indent=1) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
    show(rows)
    if options.out is not None:
        draw(rows, options.out)


if __name__ == "__main__":
    main()

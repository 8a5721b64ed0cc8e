"""Writes the results of an examination into the pool and as JSON."""

import statistics
from collections import Counter
from dataclasses import asdict

from paceline.cluster.diagnosis import Problem, link_rates
from paceline.cluster.doctor import Examination, MachineExamination
from paceline.cluster.pool import Gpu, Host, Link, Pool, StepCost

GIBI = 1 << 30


def update_pool(found: Examination) -> Pool:
    """Returns the pool with measured values; unreachable machines keep their entries."""
    hosts = tuple(_update(found, machine) for machine in found.machines)
    return found.pool.model_copy(update={"hosts": hosts})


def _update(found: Examination, machine: MachineExamination) -> Host:
    facts = machine.facts
    if not facts or machine.error is not None:
        return machine.host
    changes: dict[str, object] = {"cores": facts["cores"]}
    if facts["memory_bytes"]:
        changes["memory_gb"] = round(facts["memory_bytes"] / GIBI, 1)
    gpus = [gpu for gpu in facts["gpus"] if "error" not in gpu]
    if gpus:
        counted = Counter((gpu["model"], gpu["memory_bytes"]) for gpu in gpus)
        # torch and nvidia-smi may order GPUs differently, so rates belong to single models only.
        rate = round(min(machine.gpu_gflops), 2) if machine.gpu_gflops else None
        changes["gpus"] = tuple(
            Gpu(
                count=count,
                model=model,
                memory_gb=size and round(size / GIBI, 1),
                gflops=rate if len(counted) == 1 else None,
            )
            for (model, size), count in counted.items()
        )
    if machine.gflops:
        changes["gflops"] = round(machine.gflops, 2)
    link = find_link(found, machine.name)
    if link is not None:
        changes["link"] = link
    steps = machine.steps or {}
    if "per_sample_s" in steps:
        cost = StepCost(**{key: steps[key] for key in ("fixed_s", "per_sample_s", "update_s")})
        changes["measured"] = {**machine.host.measured, steps["model"]: cost}
        changes["startup_s"] = round(steps["startup_s"], 2)
    return machine.host.model_copy(update=changes)


def find_link(found: Examination, name: str) -> Link | None:
    """Estimates a machine's link: the best bandwidth to any other machine, at the median latency.

    The slower end limits a pair, so the fastest partner is the closest to the machine's own rate.
    """
    rates = link_rates(found, name)
    delays = [
        pair.latency_s
        for pair in found.pairs
        if name in (pair.source, pair.target) and pair.latency_s is not None
    ]
    if not rates or not delays:
        return None
    mbit_s = round(max(rates) * 8 / 1e6, 1)
    return Link(mbit_s=mbit_s, latency_ms=round(1e3 * statistics.median(delays), 4))


def examination_to_json(found: Examination, problems: list[Problem]) -> dict[str, object]:
    """Returns the whole examination as plain data, for `--json`."""
    return {
        "ok": not any(problem.level == "error" for problem in problems),
        "problems": [asdict(problem) for problem in problems],
        "hosts": [
            {
                "host": machine.name,
                "reachable": bool(machine.facts),
                "error": str(machine.error) if machine.error else None,
                "address": machine.address,
                "interfaces": machine.routes,
                "clock_offset_s": machine.clock_offset_s,
                "clock_error_s": machine.clock_error_s,
                "gflops": machine.gflops,
                "gpu_gflops": machine.gpu_gflops,
                "steps": machine.steps,
                **machine.facts,
            }
            for machine in found.machines
        ],
        "pairs": [
            {
                "from": pair.source,
                "to": pair.target,
                "ports": {str(port) if port else "any": how for port, how in pair.reached.items()},
                "latency_ms": None if pair.latency_s is None else 1e3 * pair.latency_s,
                "mbit_s": None if pair.bytes_per_s is None else pair.bytes_per_s * 8 / 1e6,
                "why_not": pair.why_not,
            }
            for pair in found.pairs
        ],
    }

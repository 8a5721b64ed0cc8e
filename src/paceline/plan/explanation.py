"""Explains a plan: the choice, the runners-up, and why each host was excluded."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.plan.estimate import Estimate, estimate
from paceline.plan.pool_arrays import PoolArrays
from paceline.plan.search import Objective, SearchResult
from paceline.strategies.registry import cost, parse_strategy

MAX_REASONS = 20


def plan_to_json(machines: PoolArrays, found: SearchResult, wish: Objective) -> dict[str, Any]:
    """Returns the output of `--json` and the contents of `plan.json`."""
    return {
        "job": {
            "model": machines.work.model,
            "data": machines.work.data,
            "parameters": machines.work.parameters,
            "flops_per_sample": machines.work.flops_per_sample,
            "samples": machines.work.samples,
            "batch": machines.work.batch,
            "epochs": machines.work.epochs,
        },
        "objective": dict(wish.weights),
        "deadline_s": wish.deadline_s,
        "budget": wish.budget,
        "chosen": estimate_to_json(machines, found.chosen),
        "why": explain_choice(machines, found, wish),
        "runners_up": [estimate_to_json(machines, e) for e in found.runners_up],
        "left_out": excluded_hosts(machines, found.chosen, wish),
        "frontier": [estimate_to_json(machines, e) for e in found.frontier],
        "one_machine": estimate_to_json(machines, found.best_single)
        if found.best_single is not None
        else None,
    }


def estimate_to_json(machines: PoolArrays, one: Estimate) -> dict[str, Any]:
    return {
        "strategy": one.strategy,
        "machines": [machines.hosts[i].host for i in one.machines],
        "step_s": one.step_s,
        "samples_per_s": one.samples_per_s,
        "seconds": one.seconds,
        "seconds_interval": list(one.interval),
        "joules": one.joules,
        "price": one.price,
        "staleness": one.staleness,
    }


def explain_choice(machines: PoolArrays, found: SearchResult, wish: Objective) -> str:
    chosen, alone = found.chosen, found.best_single
    objective = max(wish.weights, key=lambda o: wish.weights[o])
    if alone is None:
        names = [machines.hosts[i].host for i in chosen.machines]
        largest = max(h.memory_gb or 0.0 for h in machines.hosts)
        return (
            f"the model does not fit on one machine (it needs {machines.needed_gb:.1f} GB, the "
            f"largest has {largest:g}): {len(names)} stages on {', '.join(names[:-1])} "
            f"and {names[-1]}, {_amount(chosen, objective)} of {objective}"
        )
    if len(chosen.machines) == 1:
        name = machines.hosts[chosen.machines[0]].host
        more = [e for e in found.runners_up if len(e.machines) > 1]
        if not more:
            limited = wish.deadline_s is not None or wish.budget is not None
            why = "no other choice keeps within the limits" if limited else "there is no other"
            return f"use one machine, {name}: {why}"
        best = min(more, key=lambda e: e.value(objective))
        return (
            f"use one machine, {name}: {_amount(chosen, objective)} of {objective}, where the best "
            f"of several ({len(best.machines)} under {best.strategy}) needs "
            f"{_amount(best, objective)}: exchanging costs more than sharing saves"
        )
    name = machines.hosts[alone.machines[0]].host
    ratio = alone.value(objective) / max(chosen.value(objective), 1e-12)
    return (
        f"{len(chosen.machines)} machines under {chosen.strategy}: {_amount(chosen, objective)} of "
        f"{objective}, {name} alone {_amount(alone, objective)} (x{ratio:.2f})"
    )


def _amount(one: Estimate, objective: str) -> str:
    if objective == "time":
        return f"{one.seconds:,.4g} s"
    return f"{one.joules / 1000:,.4g} kJ" if objective == "energy" else f"{one.price:,.4g}"


def excluded_hosts(machines: PoolArrays, chosen: Estimate, wish: Objective) -> list[dict[str, str]]:
    """Returns why each excluded machine is not in the plan: memory, or a worse objective."""
    spec = parse_strategy(chosen.strategy if len(chosen.machines) > 1 else "allreduce")
    inside = set(chosen.machines)
    objective = max(wish.weights, key=lambda o: wish.weights[o])
    reasons = []
    outside = [i for i in range(len(machines.hosts)) if i not in inside]
    for index in outside[:MAX_REASONS]:
        host = machines.hosts[index]
        wider = np.array(sorted([*inside, index]))
        facet = cost(spec)
        spec = facet.on_hosts(spec, len(wider))
        if not facet.fits(machines, wider, spec):
            whole_model = spec.state_fraction(len(wider)).weights == 1
            why = (
                f"the model needs {machines.needed_gb:.1f} GB, it has {host.memory_gb:g}"
                if whole_model
                else "no stage fits into its memory"
            )
        else:
            more = estimate(machines, wider, spec)
            change = 100 * (more.value(objective) / max(chosen.value(objective), 1e-12) - 1)
            why = f"with it {objective} would be {_amount(more, objective)} ({change:+.1f} %)"
            if not wish.is_met_by(more):
                why += ", beyond the limit"
        reasons.append({"host": host.host, "why": why})
    if len(outside) > MAX_REASONS:
        reasons.append(
            {"host": f"{len(outside) - MAX_REASONS} more", "why": "for the same reasons"}
        )
    return reasons

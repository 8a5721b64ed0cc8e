"""Explains a plan: the choice, the runners-up, and why each host was excluded."""

import math
from typing import Any

import numpy as np

from paceline.plan.estimate import Estimate, estimate, find_guesses
from paceline.plan.pool_arrays import PoolArrays
from paceline.plan.search import Objective, SearchResult
from paceline.strategies.registry import cost, parse_strategy

MAX_REASONS = 20
JOB_FACTS = ("model", "data", "parameters", "flops_per_sample", "samples", "batch", "epochs")
"""Fields of the workload in the plan."""


def plan_to_json(
    machines: PoolArrays, result: SearchResult, objective: Objective
) -> dict[str, Any]:
    """Returns the output of `--json` and the contents of `plan.json`."""
    return {
        "job": {name: getattr(machines.work, name) for name in JOB_FACTS},
        "objective": dict(objective.weights),
        "deadline_s": objective.deadline_s,
        "budget": objective.budget,
        "accuracy": goal_to_json(machines),
        "chosen": estimate_to_json(machines, result.chosen),
        "why": explain_choice(machines, result, objective),
        "guesses": find_guesses(machines, np.array(result.chosen.machines)),
        "runners_up": [estimate_to_json(machines, e) for e in result.runners_up],
        "left_out": excluded_hosts(machines, result.chosen, objective),
        "frontier": [estimate_to_json(machines, e) for e in result.frontier],
        "one_machine": estimate_to_json(machines, result.best_single)
        if result.best_single is not None
        else None,
    }


def estimate_to_json(machines: PoolArrays, one: Estimate) -> dict[str, Any]:
    """Returns the estimate with names of machines; null where a goal is not reached."""
    values = {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in vars(one).items()
    }
    interval = [None if math.isinf(bound) else bound for bound in one.seconds_interval]
    names = [machines.hosts[i].host for i in one.machines]
    return {**values, "machines": names, "seconds_interval": interval}


def goal_to_json(machines: PoolArrays) -> dict[str, Any] | None:
    goal = machines.goal
    if goal is None:
        return None
    epochs = goal.curve.samples_to(goal.target) / machines.work.samples
    return {"target": goal.target, "runs": len(goal.curve.runs), "epochs": epochs}


def explain_choice(machines: PoolArrays, result: SearchResult, objective: Objective) -> str:
    """Returns the reason for the choice, compared with the best alternative."""
    chosen, single = result.chosen, result.best_single
    metric = objective.main
    if single is None:
        names = [machines.hosts[i].host for i in chosen.machines]
        largest = max(h.memory_gb or 0.0 for h in machines.hosts)
        return (
            f"the model does not fit on one machine (it needs {machines.needed_gb:.1f} GB, the "
            f"largest has {largest:g} GB): {len(names)} stages on {', '.join(names[:-1])} "
            f"and {names[-1]}, {metric} {_amount(chosen, metric)}"
        )
    if len(chosen.machines) == 1:
        name = machines.hosts[chosen.machines[0]].host
        more = [e for e in result.runners_up if len(e.machines) > 1]
        if not more:
            limited = objective.deadline_s is not None or objective.budget is not None
            rule = "meets the limits" if limited else "is possible"
            return f"use one machine, {name}: no plan with several machines {rule}"
        best = min(more, key=lambda e: e.value(metric))
        return (
            f"use one machine, {name}: {metric} {_amount(chosen, metric)}; the best plan with "
            f"several ({len(best.machines)} with {best.strategy}) needs "
            f"{_amount(best, metric)}, because communication costs more than it saves"
        )
    name = machines.hosts[single.machines[0]].host
    ratio = single.value(metric) / max(chosen.value(metric), 1e-12)
    return (
        f"{len(chosen.machines)} machines with {chosen.strategy}: {metric} "
        f"{_amount(chosen, metric)}; the best single machine, {name}, needs "
        f"{_amount(single, metric)} (x{ratio:.2f})"
    )


def _amount(one: Estimate, metric: str) -> str:
    """Formats the quantity that plans are ranked by: that of equal progress."""
    value = one.value(metric)
    if metric == "time":
        return f"{value:,.4g} s"
    return f"{value / 1000:,.4g} kJ" if metric == "energy" else f"{value:,.4g}"


def excluded_hosts(
    machines: PoolArrays, chosen: Estimate, objective: Objective
) -> list[dict[str, str]]:
    """Returns why each excluded machine is not in the plan: memory, or a worse result."""
    spec = parse_strategy(chosen.strategy if len(chosen.machines) > 1 else "allreduce")
    inside, metric = set(chosen.machines), objective.main
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
                f"the model needs {machines.needed_gb:.1f} GB, it has {host.memory_gb:g} GB"
                if whole_model
                else "no stage fits in its memory"
            )
        else:
            more = estimate(machines, wider, spec)
            change = 100 * (more.value(metric) / max(chosen.value(metric), 1e-12) - 1)
            why = f"with it, {metric} would be {_amount(more, metric)} ({change:+.1f}%)"
            if not objective.is_met_by(more):
                why += ", which exceeds the limits"
        reasons.append({"host": host.host, "why": why})
    if len(outside) > MAX_REASONS:
        reasons.append(
            {"host": f"{len(outside) - MAX_REASONS} more", "why": "not evaluated individually"}
        )
    return reasons

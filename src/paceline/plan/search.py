"""Search for the hosts and the strategy that minimize an objective under limits."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, combinations

import numpy as np

from paceline.cluster.pool import Host, Pool
from paceline.errors import SpecError, UsageError
from paceline.plan.estimate import Estimate, estimate
from paceline.plan.facet import CostFacet
from paceline.plan.pool_arrays import Ints, PoolArrays
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import BASELINE, cost_facet, parse_strategy, records

OBJECTIVES = ("time", "energy", "cost")
MAX_HOSTS_ALL_SIZES = 48
MAX_SPLIT_HOSTS = 10
"""Hosts that a model is split over, those with the most memory first."""
MAX_HOSTS_ALL_SPLITS = 6
CLIMB_STARTS = 6
"""Starting points per strategy from which swapping single hosts is tried."""
MAX_CLIMB_HOSTS = 32
"""Above this many hosts, swapping single hosts hardly matters: only sizes and orders are tried."""


Rank = tuple[bool, float]
"""True if a plan exceeds the limits, and its score; the smallest is the best."""


def candidates() -> tuple[str, ...]:
    """Strategies that the planner tries: those that the registered strategies name."""
    return tuple(text for record in records().values() for text in record.candidates)


@dataclass(frozen=True)
class Objective:
    """Quantities that the planner minimizes, and limits that must not be exceeded."""

    weights: Mapping[str, float]
    deadline_s: float | None = None
    budget: float | None = None

    @property
    def main(self) -> str:
        """The quantity with the largest weight."""
        return max(self.weights, key=lambda o: self.weights[o])

    def is_met_by(self, candidate: Estimate) -> bool:
        """Returns True if the estimate is within the deadline and the budget."""
        too_slow = self.deadline_s is not None and candidate.seconds > self.deadline_s
        too_expensive = self.budget is not None and candidate.price > self.budget
        return not (too_slow or too_expensive)

    def score(self, candidate: Estimate, best: Mapping[str, float]) -> float:
        """Returns the weighted sum of the ratios to the best value of each objective."""
        return sum(w * candidate.value(o) / max(best[o], 1e-12) for o, w in self.weights.items())


def parse_objective(text: str, deadline_s: float | None, budget: float | None) -> Objective:
    """Parses `time`, or a mix such as `time=0.7,energy=0.3`. Raises UsageError."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if name not in OBJECTIVES:
            raise UsageError(
                f"--objective {text!r}: {name!r} must be one of {', '.join(OBJECTIVES)}"
            )
        try:
            weights[name] = float(value) if sign else 1.0
        except ValueError:
            raise UsageError(f"--objective {text!r}: {value!r} must be a number") from None
        if not weights[name] > 0:
            raise UsageError(f"--objective {text!r}: a weight must be greater than 0")
    for name, limit in (("--deadline", deadline_s), ("--budget", budget)):
        if limit is not None and not limit > 0:
            raise UsageError(f"{name} {limit:g}: must be greater than 0")
    return Objective(weights, deadline_s, budget)


@dataclass(frozen=True)
class SearchResult:
    """The best plan and its alternatives."""

    chosen: Estimate
    runners_up: list[Estimate]
    """The best plan of each other strategy, and the best single machine."""
    frontier: list[Estimate]
    """Pareto-optimal choices in time, energy and cost."""
    best_single: Estimate | None
    """The best single machine; None if the model fits on none."""


def search(
    machines: PoolArrays,
    objective: Objective,
    strategies: Sequence[str] | None = None,
    *,
    allow_single_host: bool = True,
) -> SearchResult:
    """Returns the best hosts and strategy.

    With `allow_single_host` false, one machine is chosen only if no other fits the model. Raises
    UsageError if the model does not fit, or no plan meets the limits.
    """
    usable = np.flatnonzero(machines.fits)
    if "cost" in objective.weights or objective.budget is not None:
        unpriced = [h.host for h in machines.hosts if h.price_per_hour is None]
        if unpriced:
            raise UsageError(
                f"machine {unpriced[0]} has no price_per_hour, which a plan by cost requires"
            )
    if not len(usable):
        return _search_split(machines, objective)
    specs = [parse_strategy(s) for s in (candidates() if strategies is None else strategies)]
    tried: dict[tuple[str, bytes], Estimate] = {}

    def evaluate(spec: Strategy, chosen: Ints) -> Estimate:
        key = (str(spec), chosen.tobytes())
        if key not in tried:
            tried[key] = estimate(machines, chosen, spec)
        return tried[key]

    def evaluate_if_possible(spec: Strategy, chosen: Ints) -> Estimate | None:
        possible = _possible(spec, len(chosen), machines.work.batch)
        return evaluate(spec, chosen) if possible else None

    single = parse_strategy(BASELINE)
    for index in usable if len(usable) <= MAX_HOSTS_ALL_SIZES else _extremes(machines, usable):
        evaluate(single, np.array([index]))
    for order in _orders(machines, usable):
        for size in _sizes(len(order)):
            for spec in specs:
                evaluate_if_possible(spec, np.sort(order[:size]))
    best = _best_values(tried.values())

    def rank(candidate: Estimate) -> Rank:
        return not objective.is_met_by(candidate), objective.score(candidate, best)

    for spec in specs if len(usable) <= MAX_CLIMB_HOSTS else ():
        starts = sorted((e for (text, _), e in tried.items() if text == str(spec)), key=rank)
        # The best start may lead to a local optimum.
        for start in starts[:CLIMB_STARTS]:
            _hill_climb(start, usable, partial(evaluate_if_possible, spec), rank)
    allowed = [
        e
        for e in tried.values()
        if objective.is_met_by(e) and (allow_single_host or len(e.machines) > 1 or len(usable) == 1)
    ]
    ranked = _ranked(allowed, tried.values(), objective, best)
    singles = [e for e in tried.values() if len(e.machines) == 1]
    return SearchResult(
        ranked[0],
        _runners_up(ranked),
        _frontier(tried.values()),
        min(singles, key=lambda e: objective.score(e, best)),
    )


def _search_split(machines: PoolArrays, objective: Objective) -> SearchResult:
    """Returns the best strategy that splits a model that fits on no single host.

    Raises UsageError if it does not fit on all of them together either.
    """
    tried: list[Estimate] = []
    order = np.lexsort((-machines.speed, -machines.memory_bytes))[:MAX_SPLIT_HOSTS]
    facets: list[CostFacet[Strategy]] = [
        cost_facet(record) for record in records().values() if record.cost is not None
    ]
    for parts in range(2, len(order) + 1):
        specs = [(facet, spec) for facet in facets for spec in facet.splits(machines, parts)]
        for chosen in combinations(sorted(int(i) for i in order), parts):
            hosts = np.array(chosen)
            tried += [
                estimate(machines, hosts, spec)
                for facet, spec in specs
                if facet.fits(machines, hosts, spec)
            ]
        if tried and len(order) > MAX_HOSTS_ALL_SPLITS:
            break  # more parts only help if fewer do not fit
    if not tried:
        largest = max(h.memory_gb or 0.0 for h in machines.hosts)
        raise UsageError(
            f"the model fits on no machine: it needs {machines.needed_gb:.1f} GB, the largest has "
            f"{largest:g} GB, and no pipeline over {len(order)} of them fits either"
        )
    allowed = [e for e in tried if objective.is_met_by(e)]
    ranked = _ranked(allowed, tried, objective, _best_values(tried))
    return SearchResult(ranked[0], ranked[1:4], _frontier(tried), None)


def search_strategy(machines: PoolArrays, objective: Objective) -> SearchResult:
    """Returns the best strategy on all of these machines. Raises UsageError like `search`."""
    all_hosts = np.arange(len(machines.hosts))
    unfit = np.flatnonzero(~machines.fits)
    if len(unfit):
        host = machines.hosts[int(unfit[0])]
        raise UsageError(
            f"the model does not fit on machine {host.host}: it needs {machines.needed_gb:.1f} GB, "
            f"the machine has {host.memory_gb:g} GB; use --select auto to exclude such machines"
        )
    singles = [estimate(machines, np.array([i]), parse_strategy(BASELINE)) for i in all_hosts]
    tried = [
        estimate(machines, all_hosts, spec)
        for spec in map(parse_strategy, candidates())
        if _possible(spec, len(all_hosts), machines.work.batch)
    ] or singles
    allowed = [e for e in tried if objective.is_met_by(e)]
    if not allowed:
        raise UsageError("nothing on these machines keeps within the limits: use --select auto")
    best = _best_values([*tried, *singles])
    ranked = sorted(allowed, key=lambda e: objective.score(e, best))
    return SearchResult(
        ranked[0],
        _runners_up(ranked),
        _frontier(tried),
        min(singles, key=lambda e: objective.score(e, best)),
    )


def choose_hosts_by_speed(pool: Pool) -> tuple[list[Host], str]:
    """Selects machines for an unknown program whose processes run synchronously.

    Each process computes as much as the slowest, so a machine is included only if it increases the
    total rate. Communication costs are unknown and ignored. The second value is the reason.
    """
    speed = {h.host: h.gflops * h.speed / h.workers for h in pool.hosts}
    order = sorted(pool.hosts, key=lambda h: -speed[h.host])
    processes = accumulate(host.workers for host in order)
    totals = [count * speed[host.host] for count, host in zip(processes, order, strict=True)]
    size = 1 + max(range(len(order)), key=lambda i: (totals[i], i))
    inside = {h.host for h in order[:size]}
    chosen = [h for h in pool.hosts if h.host in inside]
    why = f"{size} of {len(order)} machines, {totals[size - 1]:.4g} GFLOP/s in lockstep"
    if size < len(order):
        next_best = order[size]
        why += (
            f"; with {next_best.host} ({speed[next_best.host]:.4g} GFLOP/s per process) "
            f"the total would be {totals[size]:.4g} GFLOP/s"
        )
    return chosen, why


def choose_server_hosts(machines: PoolArrays, chosen: Sequence[int], servers: int) -> list[int]:
    """Returns the machines for parameter servers: those with the best links.

    Empty if all links are equal; servers are then assigned round-robin.
    """
    links = machines.bandwidth[list(chosen)]
    if not servers or len(set(links.tolist())) == 1:
        return []
    order = np.argsort(-links, kind="stable")
    return [int(chosen[int(place)]) for place in order[: min(servers, len(chosen))]]


def _possible(spec: Strategy, size: int, batch: int) -> bool:
    if not 2 <= size <= batch or spec.servers_for(size) > size:
        return False
    try:
        spec.check_workers(size)
    except SpecError:
        return False
    return True


def _orders(machines: PoolArrays, usable: Ints) -> Iterator[Ints]:
    """Yields orders of the machines in which good candidates come first."""
    speed = machines.speed[usable]
    yield usable[np.argsort(-speed, kind="stable")]
    yield usable[np.argsort(machines.busy_w[usable] / speed, kind="stable")]
    yield usable[np.argsort(machines.idle_w[usable] / speed, kind="stable")]
    if machines.price.any():
        yield usable[np.argsort(machines.price[usable] / speed, kind="stable")]
    yield usable[np.lexsort((-speed, -machines.bandwidth[usable]))]


def _sizes(count: int) -> list[int]:
    """Returns the numbers of machines to try, up to `count`."""
    if count <= MAX_HOSTS_ALL_SIZES:
        return list(range(2, count + 1))
    return [int(s) for s in np.unique(np.round(np.geomspace(2, count, 40)).astype(int))]


def _extremes(machines: PoolArrays, usable: Ints) -> Ints:
    """Returns candidates for the best single machine out of many."""
    speed = machines.speed[usable]
    keys = (-speed, machines.busy_w[usable] / speed, machines.price[usable] / speed)
    extremes: Ints = np.unique(np.concatenate([usable[np.argsort(k)[:8]] for k in keys]))
    return extremes


def _best_values(tried: Collection[Estimate]) -> dict[str, float]:
    return {o: min(e.value(o) for e in tried) for o in OBJECTIVES}


def _ranked(
    allowed: list[Estimate],
    tried: Collection[Estimate],
    objective: Objective,
    best: Mapping[str, float],
) -> list[Estimate]:
    """Returns the allowed plans, best first. Raises UsageError if there are none."""
    if not allowed:
        raise UsageError(
            f"no plan meets the limits; the fastest takes {min(e.seconds for e in tried):.0f} s, "
            f"the cheapest costs {min(e.price for e in tried):.2f}"
        )
    return sorted(allowed, key=lambda e: (objective.score(e, best), len(e.machines)))


def _hill_climb(
    current: Estimate,
    usable: Ints,
    evaluate: Callable[[Ints], Estimate | None],
    rank: Callable[[Estimate], Rank],
) -> None:
    """Adds, removes or swaps single machines as long as the rank improves."""
    while True:
        inside = set(current.machines)
        outside = [int(i) for i in usable if int(i) not in inside]
        moves = [inside | {i} for i in outside]
        moves += [inside - {i} for i in inside]
        moves += [(inside - {i}) | {j} for i in inside for j in outside]
        neighbors = [evaluate(np.array(sorted(move))) for move in moves]
        step = min((e for e in neighbors if e is not None), key=rank, default=current)
        if rank(step) >= rank(current):
            return
        current = step


def _runners_up(ranked: list[Estimate]) -> list[Estimate]:
    """Returns the best of each strategy except the chosen one."""
    best: dict[tuple[str, bool], Estimate] = {}
    for candidate in ranked:
        best.setdefault((candidate.strategy, len(candidate.machines) > 1), candidate)
    return list(best.values())[1:]


def _frontier(tried: Collection[Estimate]) -> list[Estimate]:
    """Returns the Pareto-optimal estimates, fastest first."""
    kept: list[Estimate] = []
    for one in sorted(tried, key=lambda e: (e.seconds, e.joules, e.price)):
        if math.isfinite(one.seconds) and not any(
            k.joules <= one.joules and k.price <= one.price for k in kept
        ):
            kept.append(one)
    return kept

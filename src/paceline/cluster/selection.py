"""Selects machines of a pool: all, with a GPU, without a GPU, or energy-efficient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cluster.pool import Host, Pool
from paceline.errors import UsageError, suggest_name

SELECTIONS: dict[str, tuple[Callable[[Host], bool], str]] = {
    "all": (lambda host: True, "exists"),
    "gpu": (lambda host: host.gpu_count > 0, "has a GPU"),
    "cpu": (lambda host: host.gpu_count == 0, "has no GPU"),
    "energy": (lambda host: host.energy_efficient, "is marked energy_efficient"),
}
PLANNED = "auto"
"""Handled by the planner, which needs the job; not a selection."""


def select_hosts(pool: Pool, words: Sequence[str]) -> tuple[Host, ...]:
    """Returns the selected machines in the pool's order. Raises UsageError if there are none.

    `words` contains every --select option; only one may be given.
    """
    requested = list(dict.fromkeys(words)) or ["all"]
    for word in requested:
        if word not in SELECTIONS and not (word == PLANNED and len(requested) > 1):
            raise UsageError(f"unknown --select {word!r}; {suggest_name(word, SELECTIONS)}")
    if len(requested) > 1:
        selects = " and --select ".join(requested)
        raise UsageError(
            f"--select {selects} cannot be combined: a run uses one selection; remove one of them"
        )
    is_selected, rule = SELECTIONS[requested[0]]
    chosen = tuple(host for host in pool.hosts if is_selected(host))
    if not chosen:
        others = [word for word, (fits, _) in SELECTIONS.items() if any(map(fits, pool.hosts))]
        raise UsageError(
            f"--select {requested[0]}: no machine in the pool {rule}; "
            f"selections that match some of its {len(pool.hosts)} machines: {', '.join(others)}"
        )
    return chosen

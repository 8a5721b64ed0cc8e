"""Which machines of a pool take part: all, those with a GPU, those without, the economical ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.cluster.pool import Host, Pool
from paceline.errors import UsageError, suggest_name

SELECTIONS: dict[str, tuple[Callable[[Host], bool], str]] = {
    "all": (lambda host: True, "is there"),
    "gpu": (lambda host: host.gpu_count > 0, "has a GPU"),
    "cpu": (lambda host: host.gpu_count == 0, "is without a GPU"),
    "energy": (lambda host: host.energy_efficient, "is marked energy_efficient"),
}
PLANNED = "auto"
"""Not a selection but a plan, which needs to know what is to be trained."""


def select_hosts(pool: Pool, words: Sequence[str]) -> tuple[Host, ...]:
    """The machines of one selection, in the pool's order; raises UsageError for an empty one.

    `words` is every selection that was asked for: two of them exclude each other.
    """
    asked = list(dict.fromkeys(words)) or ["all"]
    for word in asked:
        if word not in SELECTIONS and not (word == PLANNED and len(asked) > 1):
            raise UsageError(f"--select {word} is unknown: {suggest_name(word, SELECTIONS)}")
    if len(asked) > 1:
        raise UsageError(f"--select {' and --select '.join(asked)} exclude each other: give one")
    wanted, rule = SELECTIONS[asked[0]]
    chosen = tuple(host for host in pool.hosts if wanted(host))
    if not chosen:
        others = [word for word, (fits, _) in SELECTIONS.items() if any(map(fits, pool.hosts))]
        raise UsageError(
            f"--select {asked[0]}: no machine of the pool {rule}; "
            f"of its {len(pool.hosts)} there are some for {', '.join(others)}"
        )
    return chosen

"""Cost formulas of collectives: the messages on the longest path, and the bytes that they carry.

With latency a per message and bandwidth B of every link, in both directions at once, a collective
takes `messages * a + bytes / B` seconds. Additions are free: what they take is a difference between
formula and measurement. Formulas and algorithms: R. Thakur, R. Rabenseifner and W. Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple


class Steps(NamedTuple):
    """The longest path of a collective."""

    messages: float
    nbytes: float

    def seconds(self, latency_s: float, bytes_per_s: float) -> float:
        return self.messages * latency_s + self.nbytes / bytes_per_s


Formula = Callable[[int, float], Steps]
"""Steps for p workers and n bytes: of a vector, or of all parts of a vector that is divided."""


def tree_levels(members: int) -> int:
    return math.ceil(math.log2(members)) if members > 1 else 0


def _one_way(members: int, nbytes: float) -> Steps:
    return Steps(1, nbytes)


def _tree(members: int, nbytes: float) -> Steps:
    """Whole vectors, one level after the other: broadcast, reduce and scan."""
    levels = tree_levels(members)
    return Steps(levels, levels * nbytes)


def _parts(members: int, nbytes: float) -> Steps:
    """A part of the vector to or from each other worker, one after the other."""
    others = members - 1
    return Steps(others, others * nbytes / members)


def _queued_parts(members: int, nbytes: float) -> Steps:
    """Parts that leave without waiting for each other."""
    return Steps(min(1, members - 1), _parts(members, nbytes).nbytes)


def ring(members: int, nbytes: float) -> Steps:
    """Reduce-scatter and all-gather, along a ring."""
    others = members - 1
    return Steps(2 * others, 2 * others * nbytes / members)


def tree(members: int, nbytes: float) -> Steps:
    """Reduce to a root and broadcast, level by level."""
    levels = tree_levels(members)
    return Steps(2 * levels, 2 * levels * nbytes)


def butterfly(members: int, nbytes: float) -> Steps:
    """Recursive doubling. Workers beyond a power of two are added first and get the sum last."""
    if members < 2:
        return Steps(0, 0.0)
    levels = members.bit_length() - 1
    levels += 0 if members == 1 << levels else 2
    return Steps(levels, levels * nbytes)


FLAT: Final[dict[str, Formula]] = {"ring": ring, "tree": tree, "butterfly": butterfly}
"""All-reduces in which every worker takes part in the same way."""
AUTO: Final = "auto"
HIERARCHICAL: Final = "hierarchical"
ALGORITHMS: Final = (AUTO, *FLAT, HIERARCHICAL)

COLLECTIVES: Final[dict[str, Formula]] = {
    "point-to-point": _one_way,
    "broadcast": _tree,
    "reduce": _tree,
    "all-reduce (ring)": ring,
    "all-reduce (tree)": tree,
    "all-reduce (butterfly)": butterfly,
    "gather": _parts,
    "all-gather": _parts,
    "scatter": _queued_parts,
    "reduce-scatter": _parts,
    "all-to-all": _parts,
    "scan": _tree,
}


def all_reduce_steps(name: str, members: int, machines: int, nbytes: float) -> Steps:
    """Returns the steps of an all-reduce; the bytes are those on the link of a machine.

    The workers of a machine share its link and are neighbors in the order of ranks, so a ring or a
    tree crosses it once at a time, but a butterfly once per worker.
    """
    each = -(-members // machines)
    if name == HIERARCHICAL:
        between = ring(machines, nbytes)
        return Steps(between.messages + 2 * tree_levels(each), between.nbytes)
    steps = FLAT[name](members, nbytes)
    if name == "butterfly" and each > 1:
        return Steps(steps.messages, butterfly(machines, each * nbytes).nbytes)
    return steps if machines > 1 else Steps(steps.messages, 0.0)


def candidates(members: int, machines: int) -> tuple[str, ...]:
    """Returns the algorithms that `auto` chooses from: equal ones only once."""
    return (*FLAT, HIERARCHICAL) if 1 < machines < members else tuple(FLAT)


def member_counts(workers: int) -> list[int]:
    """Returns the numbers of workers to measure: powers of two, and all of them."""
    counts = [1 << k for k in range(1, workers.bit_length())]
    return sorted({*counts, workers})


def collective_steps(name: str, members: int, machines: int, nbytes: float) -> Steps:
    """Returns the steps of a collective by its name in a table of `paceline collectives`."""
    algorithm = name.removeprefix("all-reduce (").removesuffix(")")
    if algorithm in ALGORITHMS and machines > 1:
        return all_reduce_steps(algorithm, members, machines, nbytes)
    return COLLECTIVES[name](members, nbytes)

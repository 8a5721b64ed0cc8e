"""Tasks of a launched script, their machines, and their environment variables.

Sets the variables of both torch (MASTER_ADDR, RANK, ...) and TensorFlow (TF_CONFIG). Every process
has a rank, including servers and evaluators, because all run the same script.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.pool import Host
from paceline.errors import UsageError, suggest_name

ROLES = ("chief", "worker", "ps", "evaluator")
"""Roles in the order of ranks."""
AT_MOST_ONE = ("chief", "evaluator")
UNENDING = ("ps",)
"""Roles that run until they are stopped; the job is done without them."""


@dataclass(frozen=True, kw_only=True)
class ScriptTask:
    """One process of the script."""

    role: str
    index: int
    rank: int
    site: int
    """Index of its machine."""
    host: Host
    local_rank: int
    local_size: int

    @property
    def who(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def label(self) -> str:
        return f"{self.role} {self.index} {self.host.host}"


@dataclass(frozen=True)
class TaskAddress:
    """A task, after all machines have been contacted."""

    address: str
    interface: str | None
    port: int | str
    """Port of a TensorFlow task; a placeholder text before it is chosen."""


def read_roles(text: str | None) -> dict[str, int] | None:
    """Parses `chief=1,worker=6,ps=2`. Raises UsageError for roles that TensorFlow rejects."""
    if text is None:
        return None
    counts: dict[str, int] = {}
    for part in text.split(","):
        role, equals, number = part.strip().partition("=")
        if role not in ROLES:
            raise UsageError(f"--roles: unknown role {role!r}; {suggest_name(role, ROLES)}")
        if not equals or not number.strip().isdigit():
            raise UsageError(f"--roles: {part.strip()!r} must be {role}=NUMBER")
        if role in counts:
            raise UsageError(f"--roles: {role} is listed twice")
        counts[role] = int(number)
        if role in AT_MOST_ONE and counts[role] > 1:
            raise UsageError(
                f"--roles: {role}={counts[role]} is not supported; at most one {role} is allowed"
            )
    if not counts.get("chief") and not counts.get("worker"):
        raise UsageError(f"--roles {text}: at least one chief or worker is required")
    return counts


def place_tasks(hosts: Sequence[Host], roles: dict[str, int] | None) -> list[ScriptTask]:
    """Assigns tasks to machines. Without roles, ranks are consecutive per machine, as in torchrun.

    With roles they go round the machines one by one, so that servers do not share one; a machine
    with more `workers` is passed over less often, and more tasks than places start anew.
    """
    if roles is None:
        seats = [site for site, host in enumerate(hosts) for _ in range(host.workers)]
        named = [("worker", index) for index in range(len(seats))]
    else:
        most = max(host.workers for host in hosts)
        turns = [[s for s, h in enumerate(hosts) if h.workers > turn] for turn in range(most)]
        circle = [site for turn in turns for site in turn]
        named = [(role, index) for role in ROLES for index in range(roles.get(role, 0))]
        seats = [circle[number % len(circle)] for number in range(len(named))]
    return [
        ScriptTask(
            role=role,
            index=index,
            rank=rank,
            site=site,
            host=hosts[site],
            local_rank=seats[:rank].count(site),
            local_size=seats.count(site),
        )
        for rank, ((role, index), site) in enumerate(zip(named, seats, strict=True))
    ]


def make_environment(
    tasks: Sequence[ScriptTask],
    places: Sequence[TaskAddress],
    task: ScriptTask,
    master_port: int | str,
) -> dict[str, str]:
    """Environment variables of one task; `places` are those of all tasks, by rank."""
    cluster: dict[str, list[str]] = {}
    for other, place in zip(tasks, places, strict=True):
        if other.role != "evaluator":  # Not part of the cluster, as in TensorFlow.
            address = f"[{place.address}]" if ":" in place.address else place.address
            cluster.setdefault(other.role, []).append(f"{address}:{place.port}")
    this = {"type": task.role, "index": task.index}
    environment = {
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(master_port),
        "RANK": str(task.rank),
        "WORLD_SIZE": str(len(tasks)),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_size),
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": this}),
        "PYTHONUNBUFFERED": "1",
    }
    if (interface := places[task.rank].interface) is not None:
        # By route: libraries that choose by host name often pick the wrong interface.
        for library in ("GLOO", "NCCL", "TP"):
            environment[f"{library}_SOCKET_IFNAME"] = interface
    return environment

"""Studies that can be repeated: their matrices, and the arms that can run at a given place."""

import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Pool, read_pool, select_hosts
from paceline.errors import UsageError, suggest_name
from paceline.launch.matrix_file import Matrix, MatrixArm, read_matrix
from paceline.launch.tensorflow_run import find_tensorflow

LOCAL_SPARK = "local[4]"
"""Spark on this machine, with as many task slots as the study had processes."""


@dataclass(frozen=True)
class Study:
    """A published study; `clusters` are its simulated machines, by model or "any"."""

    name: str
    matrix: str
    clusters: Mapping[str, str]
    has_servers: bool = False
    selects_machines: bool = False

    def cluster_of(self, model: str) -> str:
        return self.clusters.get(model, self.clusters["any"])


STUDIES = {
    study.name: study
    for study in (
        Study(
            "switch",
            "published-switch",
            {"any": "published-five", "densenet-bc-40-12": "published-five-densenet"},
        ),
        Study(
            "ps-allreduce", "published-ps-allreduce", {"any": "published-nine"}, has_servers=True
        ),
        Study("spark-tensorflow", "published-spark-tensorflow", {"any": "published-three"}),
        Study("pool", "published-pool", {"any": "published-pool"}, selects_machines=True),
    )
}


@dataclass(frozen=True)
class Place:
    """The place of a repetition: a pool, an engine or simulated machines, else this machine."""

    pool: Path | None = None
    engine: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the engine, such as its address."""
    twin: bool = False
    tensorflow: Path | None = None
    """Python of the arms that TensorFlow trains; None if it has no environment."""

    def describe(self) -> str:
        if self.pool is not None:
            return f"on the machines of {self.pool.name}, over SSH"
        if self.engine is not None:
            return f"on {self.engine.capitalize()}"
        return "in virtual time, on the published machines" if self.twin else "on this machine"


@dataclass(frozen=True)
class PreparedStudy:
    study: Study
    matrix: Matrix
    omitted: list[str]
    """Arms that cannot run here, with the reason."""


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise UsageError(f"unknown study {name!r}; {suggest_name(name, STUDIES)}")
    return STUDIES[name]


def prepare_study(study: Study, scale: str, place: Place, *, real: bool) -> PreparedStudy:
    """Reads the matrix of a study, and adapts its arms to the place.

    `real`: the original data is available, so that a small repetition does not use digits.
    """
    matrix = read_matrix(study.matrix, scale=scale, real=real and scale == "small")
    pool = read_pool(place.pool) if place.pool is not None else None
    arms: list[MatrixArm] = []
    omitted: list[str] = []
    for arm in matrix.strategies:
        reason = explain_missing(arm, place)
        changed = None if reason else place_arm(study, arm, place, pool)
        if changed is None:
            name = arm.arm or arm.strategy
            omitted.append(f"{name}: {reason or 'the pool has no such machine'}")
        else:
            arms.append(changed)
    if not arms:
        raise UsageError(f"no arm of {study.name} can run {place.describe()}: {'; '.join(omitted)}")
    if pool is not None:
        matrix = matrix.model_copy(update={"workers": [len(pool.hosts)]})
    return PreparedStudy(study, matrix.model_copy(update={"strategies": arms}), omitted)


def omit_peers(matrix: Matrix) -> tuple[Matrix, list[str]]:
    """Returns the matrix without arms that TensorFlow trains if it is not available, and why."""
    place = Place(tensorflow=find_tensorflow(None))
    missing = [arm for arm in matrix.strategies if arm.peer and explain_missing(arm, place)]
    left = [arm for arm in matrix.strategies if arm not in missing]
    if missing and not left:
        raise UsageError(f"no arm of the matrix can run: {explain_missing(missing[0], place)}")
    omitted = [f"{arm.arm or arm.strategy}: {explain_missing(arm, place)}" for arm in missing]
    return matrix.model_copy(update={"strategies": left}), omitted


def explain_missing(arm: MatrixArm, place: Place) -> str | None:
    """Returns why an arm cannot run at the place; None if it can."""
    if arm.peer is not None:
        if place.twin:
            return "the twin simulates strategies, not TensorFlow"
        if place.pool is not None:
            return "TensorFlow is trained in processes of this machine, not on those of a pool"
        if place.tensorflow is None:
            return (
                "TensorFlow has no environment here; run `make peers`, or name its Python for "
                "`reproduce` with --tensorflow, and repeat the command, which adds the arm"
            )
        return None
    if arm.where.get("engine") != "spark":
        return None
    if place.engine not in (None, "spark"):
        return f"it runs on Spark, not on {place.engine}"
    if place.twin:
        return "the twin simulates strategies, not engines"
    if place.pool is not None:
        return "it runs on Spark's executors, not on the machines of a pool"
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed; run pip install 'paceline[spark]'"
    if shutil.which("java") is None:
        return "Spark needs Java, which is not installed"
    return None


def place_arm(study: Study, arm: MatrixArm, place: Place, pool: Pool | None) -> MatrixArm | None:
    """Returns the arm with the options of its place; None if no machine is selected."""
    where = dict(arm.where)
    if pool is not None:
        where = {"pool": str(place.pool)}
        if study.selects_machines:
            hosts = select_machines(arm, pool)
            if not hosts:
                return None
            where["select"] = [",".join(hosts)]
        elif study.has_servers and arm.strategy.startswith("ps"):
            workers, servers = divide_machines(pool)
            where |= {"select": [",".join(workers)], "servers_on": [",".join(servers)]}
            text = arm.strategy.replace("servers=2", f"servers={len(servers)}")
            return arm.model_copy(update={"strategy": text, "where": where, "workers": None})
        return arm.model_copy(update={"where": where, "workers": None})
    if place.twin:
        where = {"twin": study.clusters["any"]}
        if study.selects_machines:
            where["select"] = ["a" if arm.arm == "single" else str(arm.arm)]
        elif study.has_servers and arm.strategy.startswith("ps"):
            where |= {"select": ["m1,m2,m3,m4,m5,m6"], "servers_on": ["m7,m8"]}
    elif where.get("engine") is not None:
        where |= place.options or default_options("spark")
    elif place.engine is not None and "twin" not in where and study.name != "spark-tensorflow":
        where = {"engine": place.engine, **(place.options or default_options(place.engine))}
    return arm.model_copy(update={"where": where})


def default_options(engine: str) -> dict[str, str]:
    """Returns the options of an engine on this machine."""
    return {"master": LOCAL_SPARK} if engine == "spark" else {}


def select_machines(arm: MatrixArm, pool: Pool) -> list[str]:
    """Returns the machines of a selection of the study; one for the arm `single`."""
    if arm.arm == "single":
        first = next((h for h in pool.hosts if h.energy_efficient), pool.hosts[0])
        return [first.host]
    try:
        return [host.host for host in select_hosts(pool, (str(arm.arm),))]
    except UsageError:
        return []


def divide_machines(pool: Pool) -> tuple[list[str], list[str]]:
    """Returns the workers and servers of a pool, in the proportions of 1 chief, 6 and 2 of nine.

    The chief is not used: the coordinator runs where the command does. A pool of fewer than five
    machines spares none for it.
    """
    names = [host.host for host in pool.hosts]
    if len(names) < 2:
        raise UsageError(f"the pool has {len(names)} machine; at least 2 are required")
    servers = max(1, len(names) * 2 // 9)
    return names[1 if len(names) >= 5 else 0 : -servers], names[-servers:]

"""Places runs on machines: checks the options, and makes launchers from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.cli.commands import Log, refuse_together, require_with
from paceline.errors import UsageError, suggest_name
from paceline.job import JobRef
from paceline.launch.settings import MachineSettings, PlacementSettings

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from paceline.cluster.pool import Host, Pool
    from paceline.launch.arm_settings import ArmSettings
    from paceline.launch.engines.engine import EngineLauncher
    from paceline.launch.engines.ssh import SshLauncher
    from paceline.launch.launcher import Launcher
    from paceline.launch.matrix_file import MatrixCell
    from paceline.launch.placement import Placement
    from paceline.launch.project import ProjectBundle
    from paceline.launch.remote_launcher import RemoteLauncher
    from paceline.launch.run_loop import LoopThread
    from paceline.specs.strategy import Strategy

L = TypeVar("L", bound="RemoteLauncher")

LOCAL_WORKERS = 2
ENGINES = ("ray", "spark")
PLANNED = ("auto",)


def check_machines(where: MachineSettings, workers: int | None) -> None:
    """Raises UsageError for options that cannot be combined, or that would have no effect."""
    if where.pool is not None:
        reason = "the pool file sets the number of workers"
        refuse_together("--pool", {"workers": workers}, reason)
        reason = "a run uses either a pool or an engine; remove one of them"
        others = {"engine": where.engine, "address": where.address, "master": where.master}
        refuse_together("--pool", others, reason)
        return
    require_with("--pool", {"select": where.select}, "it selects machines of the pool")
    require_with("--pool", {"servers-on": where.servers_on}, "it names machines of the pool")
    if where.engine is None:
        reason = "without them the run uses this machine and this directory"
        require_with("--pool or --engine", {"project": where.project, "venv": where.venv}, reason)
        require_with("--engine ray", {"address": where.address}, "it names a Ray cluster")
        require_with("--engine spark", {"master": where.master}, "it names a Spark cluster")
    elif where.engine not in ENGINES:
        raise UsageError(
            f"unknown --engine {where.engine!r}; {suggest_name(where.engine, ENGINES)}"
        )


@dataclass(frozen=True, kw_only=True)
class PlaceRequest:
    """A requested run, before a place is chosen."""

    strategy: str
    where: PlacementSettings
    refer: Callable[[int], JobRef]
    """Returns the job for a number of workers, on which its batch may depend."""
    out: Path
    workers: int | None = None
    threads: int | None = None
    batch_is_per_worker: bool = False

    @property
    def is_planned(self) -> bool:
        """True if the planner chooses the machines or the strategy."""
        return self.where.pool is not None and (self.strategy == "auto" or self.selects_by_plan)

    @property
    def selects_by_plan(self) -> bool:
        chosen = self.where.select or (PLANNED if self.strategy == "auto" else ())
        return chosen == PLANNED


class Places:
    """Places the runs of one command, which share pools, projects and launchers.

    As a context manager, it keeps machines connected and prepared from one run to the next.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._rivals: dict[str, list[RemoteLauncher]] = {}
        self._loop: LoopThread | None = None
        self._keeps_open = False
        self._pools: dict[Path, Pool] = {}
        self._bundles: dict[Hashable, ProjectBundle] = {}
        self._launchers: dict[Hashable, RemoteLauncher] = {}

    def __enter__(self) -> Places:
        self._keeps_open = True
        return self

    def __exit__(self, *exc: object) -> None:
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            for launcher in self._launchers.values():
                loop.run(launcher.disconnect)
        finally:
            loop.close()

    def _share(self, key: Hashable, make: Callable[[], L]) -> L:
        """Returns the launcher of a key, which all runs of the command use."""
        if key not in self._launchers:
            launcher = self._launchers[key] = make()
            if self._keeps_open:
                from paceline.launch.run_loop import LoopThread

                self._loop = self._loop or LoopThread()
                launcher.keep_open(self._loop)
        return cast("L", self._launchers[key])

    def count_workers(self, where: PlacementSettings, workers: int | None) -> int:
        """Returns the number of workers of a place; of all selected machines if it is planned."""
        check_machines(where, workers)
        if where.pool is None:
            return LOCAL_WORKERS if workers is None else workers
        return sum(host.workers for host in self._select(where))

    def place(self, request: PlaceRequest) -> Placement:
        """Chooses where a run takes place; raises UsageError before any process is started."""
        where = request.where
        check_machines(where, request.workers)
        if where.pool is not None:
            return self._on_pool(request, where.pool)
        reason = "the planner needs to know the machines"
        require_with("--pool", {"objective": where.objective}, reason)
        from paceline.launch.engines.local import LocalLauncher
        from paceline.launch.placement import Placement
        from paceline.strategies.registry import parse_strategy

        strategy, workers = parse_strategy(request.strategy), request.workers
        if workers is None:
            workers = strategy.worker_count(LOCAL_WORKERS)  # A strategy may need only one worker.
        job = request.refer(workers)
        launcher: Launcher = LocalLauncher()
        if where.engine is not None:
            launcher = self._engine_launcher(request, job, workers)
        return Placement(launcher=launcher, workers=workers, strategy=strategy, job=job)

    def _on_pool(self, request: PlaceRequest, path: Path) -> Placement:
        from paceline.cli.plan import plan_on_pool
        from paceline.cluster.pool import find_hosts
        from paceline.launch.placement import Placement
        from paceline.strategies.registry import parse_strategy

        where, pool = request.where, self._open_pool(path)
        choosing = request.selects_by_plan
        if where.objective is not None and not request.is_planned:
            raise UsageError(
                "--objective requires --strategy auto or --select auto: otherwise nothing is "
                "planned"
            )
        hosts = pool.hosts if choosing else self._select(where)
        servers_on = find_hosts(pool, where.servers_on, "--servers-on")
        if choosing and request.batch_is_per_worker:
            raise UsageError(
                "--select auto and --batch-per-worker cannot be combined: the number of machines "
                "is not known in advance; use --batch"
            )
        job = request.refer(len(hosts) if choosing else sum(h.workers for h in hosts))
        planned = request.strategy == "auto"
        strategy = None if planned else parse_strategy(request.strategy)
        plan = plan_on_pool(
            *(path, pool, hosts, job, strategy),
            choosing=choosing,
            objective=where.objective or "time",
        )
        if request.is_planned:
            plan.show()
            hosts = tuple(plan.hosts)
        expected = chosen = strategy or plan.strategy
        if planned and len(hosts) > 1:
            chosen = parse_strategy(f"auto(start={expected})")  # Continues by measurement.
        serving = tuple(servers_on or plan.find_servers(chosen))
        bundle = self._bundle(request, job)
        key = ("ssh", repr(hosts), repr(serving), id(bundle))
        launcher = self._share(key, lambda: make_pool_launcher(hosts, serving, bundle))
        if not (where.select or self._keeps_open):
            launcher.watch(path)  # The arms of a comparison keep their machines.
        report_server_hosts(serving, chosen, launcher.workers, self._log)
        return Placement(
            launcher=launcher,
            workers=launcher.workers,
            strategy=chosen,
            job=job,
            predicted=plan.predict(expected),
            after=lambda result: plan.remember(request.out, launcher.worker_hosts, result),
        )

    def _engine_launcher(self, request: PlaceRequest, job: JobRef, workers: int) -> EngineLauncher:
        """Returns the launcher of a cluster, which has as many slots as its largest run needs."""
        where, threads = request.where, request.threads or 1
        bundle = self._bundle(request, job)
        key = (where.engine, where.address, where.master, threads, id(bundle))
        launcher = self._share(key, lambda: make_engine_launcher(where, workers, bundle, threads))
        launcher.workers = max(launcher.workers, workers)
        launcher.rivals = self._rivals.setdefault(str(where.engine), [])
        if launcher not in launcher.rivals:
            launcher.rivals.append(launcher)
        return launcher

    def _bundle(self, request: PlaceRequest, job: JobRef) -> ProjectBundle:
        """Returns the project to copy to other machines."""
        from paceline.launch.project import bundle_project

        where = request.where
        key = (job.file, where.project, where.venv)
        if key not in self._bundles:
            self._bundles[key] = bundle_project(
                job.file,
                out=request.out,
                folder=where.project,
                venv=where.venv,
                tell=self._log,
            )
        return self._bundles[key]

    def _open_pool(self, path: Path) -> Pool:
        from paceline.cli.pool import open_pool

        if path not in self._pools:
            self._pools[path] = open_pool(path).pool
        return self._pools[path]

    def _select(self, where: PlacementSettings) -> tuple[Host, ...]:
        from paceline.cluster.pool import select_hosts

        assert where.pool is not None
        pool = self._open_pool(where.pool)
        return tuple(pool.hosts if where.select == PLANNED else select_hosts(pool, where.select))


class MatrixPlaces:
    """Places the runs of a matrix, as their arms or the command define."""

    tensorflow: Path | None = None
    """Python of the arms that TensorFlow trains."""

    def __init__(self, places: Places, out: Path) -> None:
        self._places = places
        self._out = out
        self._placed: dict[Hashable, Placement] = {}

    def count(self, settings: ArmSettings, own: int | None, axis: int) -> int:
        where = settings.placement
        if settings.twin is not None or settings.peer is not None:
            return own or axis
        return self._places.count_workers(where, own if where.pool is not None else own or axis)

    def place(self, cell: MatrixCell) -> Placement:
        job = JobRef(fields=cell.job)
        # Seeds do not change a place, so nothing is planned twice.
        fields = {name: value for name, value in cell.job.items() if name != "seed"}
        key = repr((cell.where, cell.run, cell.strategy, cell.workers, fields))
        if key not in self._placed:
            self._placed[key] = self._place(cell, job)
        return replace(self._placed[key], job=job)

    def _place(self, cell: MatrixCell, job: JobRef) -> Placement:
        if cell.twin is not None:
            return place_in_twin(cell, job)
        if cell.peer is not None:
            return place_in_tensorflow(cell, job, self.tensorflow)
        where = cell.placement
        return self._places.place(
            PlaceRequest(
                strategy=cell.strategy,
                where=where,
                refer=lambda workers: job,
                out=self._out,
                workers=None if where.pool is not None else cell.workers,
                threads=cell.run.get("threads"),
            )
        )


def place_in_twin(cell: MatrixCell, job: JobRef, depth: str = "learn") -> Placement:
    """Places a run on simulated machines, with `select` and `servers_on` as on those of a pool."""
    from paceline.cluster.pool import find_hosts, select_hosts
    from paceline.launch.engines.local import LocalLauncher
    from paceline.launch.placement import Placement
    from paceline.twin.clusters import read_cluster
    from paceline.twin.run import run_in_twin

    assert cell.twin is not None
    cluster, where = read_cluster(cell.twin), cell.placement
    servers_on = find_hosts(cluster, where.servers_on, "servers_on")
    cluster = cluster.model_copy(update={"hosts": select_hosts(cluster, where.select)})
    return Placement(
        launcher=LocalLauncher(),
        workers=cell.workers,
        strategy=cell.spec,
        job=job,
        run=run_in_twin(cluster, depth, servers_on),
    )


def place_in_tensorflow(cell: MatrixCell, job: JobRef, python: Path | None) -> Placement:
    from paceline.launch.engines.local import LocalLauncher
    from paceline.launch.placement import Placement
    from paceline.launch.tensorflow_run import find_tensorflow, run_in_tensorflow

    python = python or find_tensorflow(None)
    if python is None:
        raise UsageError(
            f"arm {cell.arm} is trained by TensorFlow, whose environment is not here; run `make "
            "peers` in the directory of the command, or remove the arm"
        )
    return Placement(
        launcher=LocalLauncher(),
        workers=cell.workers,
        strategy=cell.spec,
        job=job,
        run=run_in_tensorflow(python),
    )


def make_engine_launcher(
    where: MachineSettings, workers: int, bundle: ProjectBundle, threads: int
) -> EngineLauncher:
    from paceline.launch.engines.engine import EngineLauncher

    return EngineLauncher(_make_engine(where, threads), workers, bundle, threads=threads)


def _make_engine(where: MachineSettings, threads: int) -> Any:
    if where.engine == "ray":
        if where.master is not None:
            raise UsageError("--master applies to Spark; use --address for a Ray cluster")
        from paceline.ray import RayEngine

        return RayEngine(where.address, cpus_each=threads)
    if where.address is not None:
        raise UsageError("--address applies to Ray; use --master for a Spark cluster")
    from paceline.spark.engine import SparkEngine

    return SparkEngine(master=where.master)


def make_pool_launcher(
    hosts: Sequence[Host], servers_on: Sequence[Host], bundle: ProjectBundle
) -> SshLauncher:
    from paceline.launch.engines.ssh import SshLauncher

    return SshLauncher(hosts, bundle, servers_on=servers_on)


def report_server_hosts(
    servers_on: Sequence[Host], strategy: Strategy, workers: int, log: Log
) -> None:
    """Logs which machines run the servers of a strategy that has some."""
    if servers_on and strategy.servers_for(workers):
        log(f"parameter servers run on {', '.join(host.host for host in servers_on)}")

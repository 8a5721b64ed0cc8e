"""Ray engine: one actor per slot of a placement group; workers and servers run inside the actors.

Ray allocates the slots and reports lost actors; everything else works as on any other machine.
Requires the extra `paceline[ray]`.
"""

import contextlib
import logging
import socket
import threading
from typing import Any

from paceline.cluster.doctor import most_common
from paceline.cluster.remote.probe import source_address_for
from paceline.data.stores import open_store, require_extra
from paceline.errors import RunFailed, UsageError
from paceline.launch.engines.engine import EngineLauncher, OnAgentLost

PLACEMENT_TIMEOUT_S = 60.0
"""Time limit for Ray to allocate all slots."""
CONNECT_TIMEOUT_S = 10.0
POLL_S = 0.5
NODE_ID_CHARS = 8


class RayEngine:
    """A running Ray cluster. `address` is as in `ray.init`; by default it is discovered.

    An existing connection of the program (`ray.init`) is reused and left open.
    """

    name = "ray"

    def __init__(
        self, address: str | None = None, *, cpus_each: float = 1.0, gpus_each: float = 0.0
    ) -> None:
        self._ray = load_ray()
        self._address = address
        self._needs = {"CPU": cpus_each} | ({"GPU": gpus_each} if gpus_each else {})
        self._is_ours = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def find_address(self) -> str:
        if not self._ray.is_initialized():
            self._connect()
        nodes = [n["NodeManagerAddress"] for n in self._ray.nodes() if n["Alive"]]
        found = most_common([s for s in map(source_address_for, nodes) if s])
        if found is None:
            raise RunFailed(f"ray: no route from this machine to its nodes ({', '.join(nodes)})")
        return found

    def _connect(self) -> None:
        where = f" at {self._address}" if self._address else ""
        fix = "start one with `ray start --head`, or set its address"
        # Ray itself would retry for minutes.
        reason = explain_unreachable(self._address or "")
        if reason:
            raise UsageError(f"no Ray cluster found{where} ({reason}); {fix}")
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            self._ray.init(
                address=self._address or "auto",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0][:200]
            raise UsageError(f"no Ray cluster found{where} ({reason}); {fix}") from None
        self._is_ours = True

    def begin(self, tickets: list[str], on_lost: OnAgentLost) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._check_size(len(tickets))
        self._ended.clear()
        # All or nothing: a run with only some of its workers would wait forever.
        self._group = placement_group([dict(self._needs)] * len(tickets), strategy="SPREAD")
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            needs = " and ".join(f"{each:g} {name}" for name, each in self._needs.items())
            raise RunFailed(
                f"ray: {len(tickets)} slots of {needs} were not allocated within "
                f"{PLACEMENT_TIMEOUT_S:g} s: the cluster is busy, or no node is large enough"
            )
        actor = self._ray.remote(RayHostAgent)
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0)}
        for index in range(len(tickets)):
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            self._actors.append(actor.options(scheduling_strategy=strategy, **options).remote())
        calls = [a.serve.remote(t) for a, t in zip(self._actors, tickets, strict=True)]
        self._watcher = threading.Thread(
            target=self._watch, args=(calls, on_lost), name="ray-watch", daemon=True
        )
        self._watcher.start()

    def _check_size(self, slots: int) -> None:
        total = self._ray.cluster_resources()
        for name, each in self._needs.items():
            if each * slots > total.get(name, 0.0):
                raise UsageError(
                    f"{slots} slots of {each:g} {name} were requested, but the Ray cluster has "
                    f"{total.get(name, 0.0):g} in total; use fewer workers or add nodes"
                )

    def _watch(self, calls: list[Any], on_lost: OnAgentLost) -> None:
        """Reports lost actors with Ray's reason, which is the most precise one."""
        left = dict(enumerate(calls))
        while left and not self._ended.is_set():
            done, _ = self._ray.wait(list(left.values()), timeout=POLL_S)
            for index in [i for i, call in left.items() if call in done]:
                try:
                    self._ray.get(left.pop(index))
                except self._ray.exceptions.RayError as error:
                    if not self._ended.is_set():
                        on_lost(index, summarize_ray_error(error))

    def end(self) -> None:
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(2 * POLL_S + 1.0)
        actors, group, is_ours = self._actors, self._group, self._is_ours
        self._actors, self._group, self._is_ours, self._watcher = [], None, False, None
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            for actor in actors:
                self._ray.kill(actor)
            if group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(group)
        if is_ours:
            self._ray.shutdown()


class RayHostAgent:
    """Actor that runs a host agent, controlled by the supervisor until the run ends."""

    def serve(self, ticket: str) -> None:
        import ray

        from paceline.worker.outpost import run_host_agent

        node = ray.get_runtime_context().get_node_id()
        run_host_agent(ticket, f"Ray node {node[:NODE_ID_CHARS]}")


def explain_unreachable(address: str) -> str:
    """Returns why an address with a port is unreachable; empty if it is reachable."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return ""  # A keyword of Ray, such as auto.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def summarize_ray_error(error: Exception) -> str:
    """Returns the most informative line of Ray's error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for word in ("ModuleNotFoundError", "ImportError"):
        matches = [line for line in lines if line.startswith(word)]
        if matches:
            return f"{matches[-1]}; install paceline on every node"
    matches = [line for line in lines if "died" in line or "dead" in line]
    return (matches or lines or [type(error).__name__])[0][:200]


def load_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError("Ray is not installed; run pip install 'paceline[ray]'") from None
    return ray


class RayLauncher(EngineLauncher):
    """Runs a job on a Ray cluster: `paceline.train(job, launcher=RayLauncher(workers=4))`.

    Each worker is an actor with `cpus_each` CPUs and `gpus_each` GPUs, and so is each of the
    `server_places`, if servers get separate slots.
    """

    def __init__(
        self,
        workers: int,
        address: str | None = None,
        *,
        cpus_each: float = 1.0,
        gpus_each: float = 0.0,
        server_places: int = 0,
        **options: Any,
    ) -> None:
        engine = RayEngine(address, cpus_each=cpus_each, gpus_each=gpus_each)
        threads = max(1, int(cpus_each))
        super().__init__(engine, workers, own_servers=server_places, threads=threads, **options)


def write_dataset(dataset: Any, url: str) -> str:
    """Writes a Ray Dataset as Parquet files for the workers; returns the `data=` of a Job.

    Ray's tasks write on the nodes that store the blocks. `url` is an empty directory that all nodes
    can access (a shared path, `hdfs://`, `s3://`). Array columns become fixed-size lists, the
    format in which features are read. Raises UsageError if the directory is not empty.
    """
    ray = load_ray()
    arrow = require_extra("pyarrow.fs", "data", "writing a Ray Dataset")
    if not isinstance(dataset, require_extra("ray.data", "ray", "Ray Data").Dataset):
        raise UsageError(
            f"write_dataset: expected a ray.data.Dataset, got {type(dataset).__name__}"
        )
    if not ray.is_initialized():
        raise UsageError("write_dataset requires a connection to Ray; call ray.init() first")
    store, path = open_store(url)
    if store.exists(path) and store.find(path):
        raise UsageError(f"{url} is not empty; choose another directory, or remove it")
    store.makedirs(path, exist_ok=True)
    lists = dataset.map_batches(_as_lists, batch_format="pyarrow", zero_copy_batch=True)
    lists.write_parquet(path, filesystem=arrow.PyFileSystem(arrow.FSSpecHandler(store)))
    if not any(name.endswith(".parquet") for name in store.find(path)):
        raise UsageError("the Ray Dataset has no rows")
    return f"{url.rstrip('/')}/*.parquet"


def _as_lists(batch: Any) -> Any:
    """Converts Ray's tensor columns, which other readers do not support, to plain lists."""
    import pyarrow as pa

    columns = []
    for name in batch.column_names:
        column = batch[name].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0) if column.num_chunks else pa.array([], type=column.type)
        if isinstance(column, pa.ExtensionArray) and hasattr(column, "to_numpy"):
            rows = column.to_numpy(zero_copy_only=False)
            flat = pa.array(rows.reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(flat, len(flat) // max(1, len(rows)))
        columns.append(column)
    return pa.table(columns, names=batch.column_names)


lay_out = write_dataset
"""The old name, for one release."""

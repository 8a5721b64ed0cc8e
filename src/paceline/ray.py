"""Ray as an engine: places in a placement group, one actor each, workers and servers inside them.

Ray finds the places and tells when one is lost; everything else is Paceline's own, as on any other
machine. Needs the extra `paceline[ray]`.
"""

from __future__ import annotations

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

PLACED_S = 60.0
"""How long to wait for Ray to find places for all."""
CONNECT_S = 10.0
LOOK_S = 0.5
ID_SHOWN = 8


class RayEngine:
    """A running Ray cluster; `address` as in `ray.init`, the one that is found if nothing is said.

    A program that has called `ray.init` itself keeps its connection.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus_each: float = 1.0,
        gpus_each: float = 0.0,
        placed_s: float = PLACED_S,
    ) -> None:
        self._ray = load_ray()
        self._address = address
        self._needs = {"CPU": cpus_each} | ({"GPU": gpus_each} if gpus_each else {})
        self._placed_s = placed_s
        self._is_ours = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._over = threading.Event()
        self._watching: threading.Thread | None = None

    def find_address(self) -> str:
        if not self._ray.is_initialized():
            self._connect()
        nodes = [n["NodeManagerAddress"] for n in self._ray.nodes() if n["Alive"]]
        found = most_common([s for s in map(source_address_for, nodes) if s])
        if found is None:
            raise RunFailed(f"ray: there is no route from here to its nodes ({', '.join(nodes)})")
        return found

    def _connect(self) -> None:
        where = f"at {self._address}" if self._address else "here"
        mend = "start one with `ray start --head`, or name its address"
        # Ray itself would try for minutes.
        why = explain_unreachable(self._address or "")
        if why:
            raise UsageError(f"no Ray cluster is reached {where} ({why}): {mend}")
        logging.getLogger("ray").setLevel(logging.ERROR)
        try:
            self._ray.init(
                address=self._address or "auto",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            why = str(error).splitlines()[0][:200]
            raise UsageError(f"no Ray cluster is reached {where} ({why}): {mend}") from None
        self._is_ours = True

    def begin(self, tickets: list[str], on_lost: OnAgentLost) -> None:
        ray = self._ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._check_size(len(tickets))
        # All or nothing: a run of which half the workers are placed would wait for ever.
        self._group = placement_group([dict(self._needs)] * len(tickets), strategy="SPREAD")
        if not self._group.wait(self._placed_s):
            raise RunFailed(
                f"ray: no room for {len(tickets)} places of {self._describe_needs()} within "
                f"{self._placed_s:g} s: others use the cluster, or no node is large enough"
            )
        actor = ray.remote(RayHostAgent)
        for index in range(len(tickets)):
            strategy = PlacementGroupSchedulingStrategy(self._group, index)
            options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0)}
            self._actors.append(actor.options(scheduling_strategy=strategy, **options).remote())
        calls = [a.serve.remote(t) for a, t in zip(self._actors, tickets, strict=True)]
        self._watching = threading.Thread(
            target=self._watch, args=(calls, on_lost), name="ray-watch", daemon=True
        )
        self._watching.start()

    def _check_size(self, places: int) -> None:
        total = self._ray.cluster_resources()
        for name, each in self._needs.items():
            if each * places > total.get(name, 0.0):
                raise UsageError(
                    f"{places} places of {each:g} {name} are asked for, the Ray cluster has "
                    f"{total.get(name, 0.0):g} in all: fewer workers, or more nodes"
                )

    def _describe_needs(self) -> str:
        return " and ".join(f"{each:g} {name}" for name, each in self._needs.items())

    def _watch(self, calls: list[Any], on_lost: OnAgentLost) -> None:
        """Ray knows first, and best, why an actor is gone."""
        left = dict(enumerate(calls))
        while left and not self._over.is_set():
            done, _ = self._ray.wait(list(left.values()), timeout=LOOK_S)
            for index in [i for i, call in left.items() if call in done]:
                try:
                    self._ray.get(left.pop(index))
                except self._ray.exceptions.RayError as error:
                    if not self._over.is_set():
                        on_lost(index, summarize_ray_error(error))

    def end(self) -> None:
        self._over.set()
        if self._watching is not None:
            self._watching.join(2 * LOOK_S + 1.0)
        if not self._ray.is_initialized():
            return
        with contextlib.suppress(Exception):
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
        if self._is_ours:
            self._ray.shutdown()


class RayHostAgent:
    """An actor: calls the supervisor, and does as it says until the run is over."""

    def serve(self, ticket: str) -> None:
        import ray

        from paceline.worker.outpost import run_host_agent

        node = ray.get_runtime_context().get_node_id()
        run_host_agent(ticket, f"Ray node {node[:ID_SHOWN]}")


def explain_unreachable(address: str) -> str:
    """Of an address with a port: why nothing answers there; empty if something does."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return ""  # A word that Ray understands, such as auto.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def summarize_ray_error(error: Exception) -> str:
    """The line of Ray's long account that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for word in ("ModuleNotFoundError", "ImportError"):
        told = [line for line in lines if line.startswith(word)]
        if told:
            return f"{told[-1]}: install paceline on every node"
    told = [line for line in lines if "died" in line or "dead" in line]
    return (told or lines or [type(error).__name__])[0][:200]


def load_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError("Ray needs its package: pip install 'paceline[ray]'") from None
    return ray


class RayLauncher(EngineLauncher):
    """`paceline.train(job, launcher=RayLauncher(workers=4))` runs on a Ray cluster.

    Each worker, and each of `server_places` if servers are to have places of their own, is an actor
    of `cpus_each` processors and `gpus_each` GPUs.
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
        super().__init__(
            engine,
            workers,
            own_servers=server_places,
            threads=max(1, int(cpus_each)),
            **options,
        )


def write_dataset(dataset: Any, url: str) -> str:
    """Write a Ray Dataset as Parquet files where the workers will read it; `data=` of a Job.

    Ray's tasks write where the blocks lie. `url` is a folder that all nodes reach (a shared path,
    `hdfs://`, `s3://`), and must be empty: what lies there is never mixed with something else.
    Columns that hold arrays become lists of one length, the form in which features are read.
    """
    ray = load_ray()
    arrow = require_extra("pyarrow.fs", "data", "laying out a Ray Dataset")
    if not isinstance(dataset, require_extra("ray.data", "ray", "Ray Data").Dataset):
        raise UsageError(
            f"lay_out writes a ray.data.Dataset, and was given {type(dataset).__name__}"
        )
    if not ray.is_initialized():
        raise UsageError("lay_out needs a connection to Ray: call ray.init() first")
    store, path = open_store(url)
    if store.exists(path) and store.find(path):
        raise UsageError(f"{url} is not empty: name another folder, or remove it")
    store.makedirs(path, exist_ok=True)
    files = arrow.PyFileSystem(arrow.FSSpecHandler(store))
    dataset.map_batches(_as_lists, batch_format="pyarrow", zero_copy_batch=True).write_parquet(
        path, filesystem=files
    )
    written = [name for name in store.find(path) if name.endswith(".parquet")]
    if not written:
        raise UsageError("the Ray Dataset has no rows: there is nothing to lay out")
    return f"{url.rstrip('/')}/*.parquet"


def _as_lists(batch: Any) -> Any:
    """Ray's own kind of column for arrays, which other readers do not know, as plain lists."""
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

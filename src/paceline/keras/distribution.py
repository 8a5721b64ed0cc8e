"""Replacement of `tf.distribute` under `paceline launch`, with and without TensorFlow.

`--strategy` decides how a script trains, so scopes have no effect. What a script reads from a
strategy is answered: the number of replicas is the number of workers. Every process runs the part
of a script that trains; a resolver therefore always reports the role of the chief.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from paceline.errors import UsageError
from paceline.worker import custom_loop

LOOP_REMEDY = "use model.compile() and model.fit(), or a torch loop with paceline.prepare()"
REPLICAS = "_paceline_replicas"
"""Attribute of a dataset whose batches are those of one worker: the number of workers."""


class TpuNotSupported(UsageError, ValueError):
    """Raised for TPUs; scripts that try a TPU first catch ValueError."""


def worker_count() -> int:
    return custom_loop._session.size if custom_loop._session is not None else 1


class DistributionStrategy:
    """Replacement of any tf.distribute strategy; has no effect on the model."""

    synchronous = True
    current: DistributionStrategy | None = None
    """Strategy whose scope was entered last."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.cluster_resolver = ClusterResolver()
        self.extended = SimpleNamespace(worker_devices=("/cpu:0",), parameter_devices=("/cpu:0",))

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of workers: a script multiplies its batch by it to get the global batch."""
        return worker_count()

    @contextlib.contextmanager
    def scope(self) -> Iterator[DistributionStrategy]:
        DistributionStrategy.current = self
        yield self

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return dataset

    def distribute_datasets_from_function(
        self, make: Callable[..., Any], options: Any = None
    ) -> Any:
        """Returns the dataset of one worker. Its batch is a share of the global one.

        Parameter servers of TensorFlow apply every batch of a worker as one update. Such a batch is
        the global one here, where N pushes of N workers make up one update.
        """
        replicas = worker_count() if self.synchronous else 1
        dataset = make(InputContext(1, 0, replicas))
        setattr(dataset, REPLICAS, replicas)
        return dataset

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def run(self, *args: Any, **options: Any) -> Any:
        raise UsageError(
            f"strategy.run() of a custom training loop is not supported; {LOOP_REMEDY}"
        )

    reduce = gather = run


class ParameterServerStrategy(DistributionStrategy):
    synchronous = False


def get_strategy() -> DistributionStrategy:
    return DistributionStrategy.current or DistributionStrategy()


class InputContext:
    """The part of the input that a dataset function produces: all of it, on every worker."""

    def __init__(self, pipelines: int, index: int, replicas: int) -> None:
        self.num_input_pipelines, self.input_pipeline_id = pipelines, index
        self.num_replicas_in_sync = replicas

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        if global_batch_size % self.num_replicas_in_sync:
            raise UsageError(
                f"a global batch of {global_batch_size} cannot be divided by "
                f"{self.num_replicas_in_sync} workers; use a multiple"
            )
        return global_batch_size // self.num_replicas_in_sync


class DatasetCreator:
    """Replacement of `tf.keras.utils.experimental.DatasetCreator`, which Keras 3 lacks."""

    def __init__(self, dataset_fn: Callable[..., Any], input_options: Any = None) -> None:
        self.dataset_fn = dataset_fn

    def create(self) -> Any:
        return get_strategy().distribute_datasets_from_function(self.dataset_fn)


class ClusterCoordinator:
    """Replacement of TensorFlow's coordinator of parameter servers, for scripts that call `fit`."""

    def __init__(self, strategy: Any = None) -> None:
        self.strategy = strategy or get_strategy()

    def create_per_worker_dataset(self, dataset: Any) -> Any:
        return dataset() if callable(dataset) else dataset

    def join(self) -> None:
        """Returns at once: nothing can be scheduled."""

    def done(self) -> bool:
        return True

    def fetch(self, value: Any) -> Any:
        return value

    def schedule(self, *args: Any, **options: Any) -> Any:
        raise UsageError(
            "ClusterCoordinator.schedule() of a custom training loop is not supported; "
            f"{LOOP_REMEDY}"
        )


class ClusterSpec:
    """Replacement of tf.train.ClusterSpec: addresses by job."""

    def __init__(self, cluster: Any) -> None:
        given = cluster.as_dict() if hasattr(cluster, "as_dict") else dict(cluster)
        self._jobs = {job: list(hosts) for job, hosts in given.items()}

    @property
    def jobs(self) -> list[str]:
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str]]:
        return self._jobs

    def job_tasks(self, job: str) -> list[str]:
        return self._jobs.get(job, [])

    def num_tasks(self, job: str) -> int:
        return len(self.job_tasks(job))


class ClusterResolver:
    """The cluster that the script gives, or that of TF_CONFIG, seen by its chief."""

    task_type, task_id = "chief", 0
    rpc_layer = environment = None

    def __init__(self, cluster_spec: Any = None, *args: Any, **options: Any) -> None:
        if not hasattr(cluster_spec, "as_dict"):
            cluster_spec = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
        self._spec = ClusterSpec(cluster_spec)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    def master(self, *args: Any, **options: Any) -> str:
        return ""

    def num_accelerators(self, *args: Any, **options: Any) -> dict[str, int]:
        return {}


class TensorFlowServer:
    """Replacement of tf.distribute.Server, which a script starts in processes that do not train."""

    target = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        return

    def join(self) -> None:
        raise UsageError(
            "a tf.distribute.Server is not started: every process of `paceline launch` trains, and "
            "--strategy ps starts servers; read the role from TFConfigClusterResolver().task_type"
        )


def check_shard(num_shards: Any, index: Any, name: str | None = None) -> None:
    """Rejects dataset.shard() by the number of workers, because Paceline divides the data."""
    if isinstance(num_shards, int) and 1 < num_shards == worker_count():
        raise UsageError(
            f"dataset.shard({num_shards}, {index}) drops samples: Paceline divides the data "
            "among the workers itself; remove the call"
        )


def reject_tape(*args: Any, **options: Any) -> Any:
    """Replacement of tf.GradientTape."""
    raise UsageError(
        f"tf.GradientTape is not supported: the model computes on torch; {LOOP_REMEDY}"
    )


def reject_checkpoint(*args: Any, **options: Any) -> Any:
    """Replacement of tf.train.Checkpoint and tf.train.CheckpointManager."""
    raise UsageError(
        "tf.train.Checkpoint is not supported: the model's variables are on torch; use "
        "model.save_weights(), or the callback tf.keras.callbacks.ModelCheckpoint"
    )


def reject_graph(*args: Any, **options: Any) -> Any:
    """Replacement of tf.Session and tf.placeholder."""
    raise UsageError(
        "sessions and placeholders of TensorFlow 1 are not supported; compute with tensors "
        "directly, and train with model.compile() and model.fit()"
    )


def reject_tpu(*args: Any, **options: Any) -> Any:
    raise TpuNotSupported(
        "TPUs are not supported; use tf.distribute.MultiWorkerMirroredStrategy() on CPUs or GPUs"
    )


def distribute_names() -> dict[str, Any]:
    """Returns the names of `tf.distribute`; dicts are submodules."""
    strategies: dict[str, Any] = {
        **dict.fromkeys(
            ("MirroredStrategy", "OneDeviceStrategy", "MultiWorkerMirroredStrategy", "Strategy"),
            DistributionStrategy,
        ),
        "CentralStorageStrategy": DistributionStrategy,
        "ParameterServerStrategy": ParameterServerStrategy,
        "TPUStrategy": reject_tpu,
    }
    coordinator = {"ClusterCoordinator": ClusterCoordinator}
    resolvers = ("TFConfigClusterResolver", "SimpleClusterResolver", "ClusterResolver")
    return {
        **strategies,
        "get_strategy": get_strategy,
        "has_strategy": lambda: DistributionStrategy.current is not None,
        "InputContext": InputContext,
        "Server": TensorFlowServer,
        "coordinator": coordinator,
        "experimental": {**strategies, "coordinator": coordinator},
        "cluster_resolver": {
            **dict.fromkeys(resolvers, ClusterResolver),
            "TPUClusterResolver": reject_tpu,
        },
    }

"""Adapts an installed TensorFlow to `paceline launch`: only `tf.distribute` and `fit` are ours.

`tf.data`, `tf.io`, `tf.image`, `tf.train` and `tensorflow_datasets` are TensorFlow's. They feed a
Keras model that computes on torch, so what differentiates through TensorFlow is rejected.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from paceline.keras.distribution import (
    DatasetCreator,
    TensorFlowServer,
    check_shard,
    distribute_names,
    reject_checkpoint,
    reject_tape,
)
from paceline.keras.machine_lock import one_at_a_time
from paceline.worker import custom_loop
from paceline.worker.script import SEED


def patch_tensorflow(tf: Any) -> None:
    """Called when the script has imported TensorFlow."""
    tf.random.set_seed(SEED)
    # Torch has the GPUs, and shares the cores of this worker.
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    _replace(tf.distribute, distribute_names())
    tf.train.Server = TensorFlowServer
    tf.GradientTape = reject_tape
    shard = tf.data.Dataset.shard

    def checked_shard(dataset: Any, *args: Any, **options: Any) -> Any:
        check_shard(*args, **options)
        return shard(dataset, *args, **options)

    tf.data.Dataset.shard = checked_shard
    _separate_cache_files(tf.data.Dataset)
    tf.train.Checkpoint = tf.train.CheckpointManager = reject_checkpoint
    tf.keras.utils.experimental = SimpleNamespace(DatasetCreator=DatasetCreator)


def patch_tensorflow_datasets(tfds: Any) -> None:
    """Called when the script has imported TensorFlow Datasets."""
    plain = tfds.core.DatasetBuilder.download_and_prepare

    def prepare(builder: Any, *args: Any, **options: Any) -> None:
        plain(builder, *args, **options)
        if not builder.info.splits:
            # Another worker has prepared it since this builder was made.
            builder.info.read_from_directory(builder.data_dir)

    tfds.core.DatasetBuilder.download_and_prepare = one_at_a_time(functools.wraps(plain)(prepare))


def _separate_cache_files(dataset_type: Any) -> None:
    """Gives each worker its own file, because all of them run the whole pipeline."""
    cache = dataset_type.cache

    def cache_of_worker(dataset: Any, filename: Any = "", name: Any = None) -> Any:
        session = custom_loop._session
        if session is not None and session.size > 1 and isinstance(filename, str) and filename:
            filename = f"{filename}.worker-{session.rank}"
        return cache(dataset, filename, name)

    dataset_type.cache = cache_of_worker


def _replace(module: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        if isinstance(value, dict):
            _replace(getattr(module, name), value)
        else:
            setattr(module, name, value)

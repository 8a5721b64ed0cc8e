"""Adapts an installed TensorFlow to `paceline launch`: only `tf.distribute` and `fit` are ours.

`tf.data`, `tf.io`, `tf.image`, `tf.train` and `tensorflow_datasets` are TensorFlow's. They feed a
Keras model that computes on torch, so what differentiates through TensorFlow is rejected.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from paceline.keras.distribution import (
    DatasetCreator,
    TensorFlowServer,
    check_shard,
    distribute_names,
    reject_tape,
)
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
    tf.keras.utils.experimental = SimpleNamespace(DatasetCreator=DatasetCreator)


def _replace(module: Any, names: dict[str, Any]) -> None:
    for name, value in names.items():
        if isinstance(value, dict):
            _replace(getattr(module, name), value)
        else:
            setattr(module, name, value)

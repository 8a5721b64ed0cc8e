"""One worker of a run of TensorFlow itself, which studies are compared with.

    python -m paceline.keras.tensorflow_peer < request.json

The rows, the network and the settings are those of the job; everything else is TensorFlow's: the
input with `tf.data`, `fit` of Keras 2 and MultiWorkerMirroredStrategy with RING, as in the studies.
Workers find each other by TF_CONFIG. Needs `paceline[tensorflow]` and tf_keras.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Before TensorFlow is imported: fit() of Keras 3 fails with several workers.
os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")

import tensorflow as tf

from paceline.errors import PacelineError, UsageError
from paceline.job import JobRef
from paceline.worker.job_builder import JobData, load_job_data

Array = npt.NDArray[Any]
Layer = Callable[[Any], Any]
AUTO = -1
"""Prefetches as many batches as TensorFlow chooses."""
layers = tf.keras.layers


def read_rows(part: Any) -> tuple[Array, Array]:
    """Returns features, with channels last, and labels."""
    features, labels = part.batch(np.arange(len(part)))
    images = features.numpy()
    return images.transpose(0, 2, 3, 1) if images.ndim == 4 else images, labels.numpy()


def make_input(rows: tuple[Array, Array], batch: int, job: Any) -> Any:
    """Batches with cache and prefetch; with `prefetch: 0` without, also row by row."""
    if job.row_by_row:
        features, labels = rows

        def generate() -> Iterator[tuple[Array, Array]]:
            for index in range(len(labels)):
                yield features[index], labels[index]

        signature = (
            tf.TensorSpec(features.shape[1:], features.dtype),
            tf.TensorSpec((), labels.dtype),
        )
        data = tf.data.Dataset.from_generator(generate, output_signature=signature)
    else:
        data = tf.data.Dataset.from_tensor_slices(rows)
    ahead = job.prefetch != 0
    data = data.cache() if ahead else data
    data = data.shuffle(len(rows[1]), seed=job.seed).batch(batch, drop_remainder=True)
    options = tf.data.Options()
    # Each worker has its own rows already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return (data.prefetch(AUTO) if ahead else data).with_options(options)


def build(name: str, shape: tuple[int, ...], classes: int) -> Any:
    """Builds a network of Paceline's catalog with the layers of Keras."""
    inputs = tf.keras.Input(shape)
    if name == "cnn-small":
        x = layers.Conv2D(32, 3, activation="relu")(inputs)
        x = layers.Flatten()(layers.MaxPooling2D()(x))
        x = layers.Dense(64, activation="relu")(x)
    elif name == "cnn-keras":
        x = layers.Conv2D(32, 3, activation="relu")(inputs)
        x = layers.Conv2D(64, 3, activation="relu")(x)
        x = layers.Dropout(0.25)(layers.MaxPooling2D()(x))
        x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
        x = layers.Dropout(0.5)(x)
    elif name == "resnet56v2":
        x = resnet_v2(inputs, blocks=6, l2=1e-4)
    elif name.startswith("resnet") and name[6:].isdecimal():
        x = resnet_v1(inputs, blocks=(int(name[6:]) - 2) // 6)
    else:
        raise UsageError(f"model {name!r} has no counterpart in TensorFlow here; use cnn-keras")
    return tf.keras.Model(inputs, layers.Dense(classes)(x))


def count_classes(parts: JobData) -> int:
    if parts.dataset is None or parts.dataset.classes is None:
        raise UsageError("TensorFlow is compared on named datasets with classes; use mnist")
    return parts.dataset.classes


def make_convolution(l2: float = 0.0) -> Callable[..., Any]:
    def convolve(x: Any, filters: int, size: int = 3, stride: int = 1) -> Any:
        layer = layers.Conv2D(
            filters,
            size,
            strides=stride,
            padding="same",
            kernel_initializer="he_normal",
            kernel_regularizer=tf.keras.regularizers.l2(l2) if l2 else None,
        )
        return layer(x)

    return convolve


def normalize(x: Any) -> Any:
    return layers.BatchNormalization()(x)


def resnet_v1(inputs: Any, blocks: int) -> Any:
    convolve, relu = make_convolution(), layers.ReLU()
    x = relu(normalize(convolve(inputs, 16)))
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = relu(normalize(convolve(x, filters, stride=stride)))
            y = normalize(convolve(y, filters))
            if stride == 2:
                x = convolve(x, filters, 1, 2)
            x = relu(layers.Add()([x, y]))
    return layers.GlobalAveragePooling2D()(x)


def resnet_v2(inputs: Any, blocks: int, l2: float) -> Any:
    convolve, relu = make_convolution(l2), layers.ReLU()
    x = relu(normalize(convolve(inputs, 16)))
    filters = 16
    for stage in range(3):
        filters_out = filters * (4 if stage == 0 else 2)
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = x if stage == 0 and block == 0 else relu(normalize(x))
            y = convolve(y, filters, 1, stride)
            y = convolve(relu(normalize(y)), filters)
            y = convolve(relu(normalize(y)), filters_out, 1)
            if block == 0:
                x = convolve(x, filters_out, 1, stride)
            x = layers.Add()([x, y])
        filters = filters_out
    return layers.GlobalAveragePooling2D()(relu(normalize(x)))


def make_optimizer(spec: Any, lr: float) -> Any:
    name = spec.name
    if name == "adadelta":
        return tf.keras.optimizers.Adadelta(lr)
    if name == "adam":
        return tf.keras.optimizers.Adam(lr)
    if name == "sgd":
        return tf.keras.optimizers.SGD(lr, momentum=getattr(spec, "momentum", 0.0))
    raise UsageError(f"optimizer {name!r} has no counterpart in TensorFlow here; use adadelta")


class EpochRows(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Records a row per epoch; seconds count from the start of the run."""

    def __init__(self, began: float, samples: int, updates: int) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self._began, self._samples, self._updates = began, samples, updates

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        logs, number = logs or {}, epoch + 1
        row = {
            "epoch": number,
            "seconds": time.time() - self._began,
            "samples": self._samples * number,
            "updates": self._updates * number,
            "train_loss": logs.get("loss"),
            "train_acc": logs.get("accuracy"),
        }
        self.rows.append(row)


def iterate_seconds(data: Any) -> float:
    """Returns the seconds of preparing the batches of an epoch, without training."""
    began = time.perf_counter()
    for _ in data:
        pass
    return time.perf_counter() - began


def train(request: Mapping[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers; returns its part of the result."""
    workers, worker, began = request["workers"], request["worker"], request["began"]
    for name in ("intra", "inter"):
        getattr(tf.config.threading, f"set_{name}_op_parallelism_threads")(request["threads"])
    job = JobRef(fields=request["job"]).resolve()
    tf.keras.utils.set_random_seed(job.seed)
    communication = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    started = time.perf_counter()
    parts = load_job_data(job.model_copy(update={"row_by_row": False, "prefetch": None}))
    share = len(parts.train) // workers
    features, labels = read_rows(parts.train)
    mine = features[worker::workers][:share], labels[worker::workers][:share]
    read_s = time.perf_counter() - started
    each = max(1, job.batch // workers)
    steps = share // each
    if steps == 0:
        raise UsageError(f"--batch {job.batch} is larger than the {len(labels):,} training rows")
    with strategy.scope():
        model = build(str(job.model), features.shape[1:], count_classes(parts))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_optimizer(job.optimizer_spec, job.base_lr), loss, metrics=["accuracy"])
    progress = EpochRows(began, samples=steps * each * workers, updates=steps)
    # fit() divides the batches of a dataset by the number of workers.
    data = make_input(mine, each * workers, job)
    started = time.perf_counter()
    model.fit(data.repeat(), epochs=job.epochs, steps_per_epoch=steps, verbose=0,
              callbacks=[progress])  # fmt: skip
    train_s = time.perf_counter() - started
    found: dict[str, Any] = {}
    started = time.perf_counter()
    if parts.test is not None:
        rows = read_rows(parts.test)
        tested = tf.data.Dataset.from_tensor_slices(rows).batch(each * workers)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        found["test_loss"], found["test_acc"] = model.evaluate(
            tested.with_options(options), verbose=0
        )
    evaluate_s = time.perf_counter() - started
    return {
        **found,
        "history": progress.rows,
        "stages": {"read": read_s, "train": train_s, "evaluate": evaluate_s},
        "input": {"make_s": job.epochs * iterate_seconds(make_input(mine, each, job))},
        "parameters": int(sum(math.prod(w.shape) for w in model.trainable_weights)),
        "versions": {"tensorflow": tf.__version__, "tf_keras": metadata.version("tf_keras")},
    }


def main() -> int:
    request = json.load(sys.stdin)
    try:
        result = train(request)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 2
    Path(request["out"]).write_text(json.dumps(result), encoding="utf-8")
    # Servers of TensorFlow may wait for workers that have ended.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

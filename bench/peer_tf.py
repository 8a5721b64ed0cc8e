"""TensorFlow for comparison, with custom loops as in its guides. Prints samples per second.

PYTHON bench/peer_tf.py tf-ring|tf-ps WORKLOAD WORKERS THREADS

PYTHON is an interpreter with TensorFlow; nothing of Paceline is imported. `tf-ring` is
MultiWorkerMirroredStrategy with RING, `tf-ps` asynchronous ParameterServerStrategy with one server.
The networks equal those of Paceline's catalog, layer by layer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

SHAPES = {"mlp-300-100": (28, 28, 1), "mlp-wide": (32, 32, 3), "resnet20": (32, 32, 3)}
BATCH = {"mlp-300-100": 128, "mlp-wide": 32, "resnet20": 32}
STEPS = {"mlp-300-100": 300, "mlp-wide": 40, "resnet20": 40}
WARM_UP = 5
LIMIT_S = 500


def build(name: str):
    import tensorflow as tf

    layers = tf.keras.layers
    inputs = tf.keras.Input(SHAPES[name])
    if name == "resnet20":
        return tf.keras.Model(inputs, resnet20(inputs, layers))
    hidden = {"mlp-300-100": (300, 100), "mlp-wide": (4096, 2048)}[name]
    x = layers.Flatten()(inputs)
    for units in hidden:
        x = layers.Dense(units, activation="relu")(x)
    return tf.keras.Model(inputs, layers.Dense(10)(x))


def resnet20(x, layers):
    def conv(x, filters, stride=1):
        x = layers.Conv2D(filters, 3, strides=stride, padding="same")(x)
        return layers.BatchNormalization()(x)

    x = layers.ReLU()(conv(x, 16))
    for filters in (16, 32, 64):
        for block in range(3):
            stride = 2 if filters > 16 and block == 0 else 1
            y = layers.ReLU()(conv(x, filters, stride))
            y = conv(y, filters)
            if stride == 2:
                x = layers.Conv2D(filters, 1, strides=2)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(kind: str, name: str, workers: int, threads: int) -> None:
    """Starts one process per task; the one that prints the rate stops the others."""
    roles = ["worker"] * workers + (["ps", "chief"] if kind == "tf-ps" else [])
    ports = free_ports(len(roles))
    cluster: dict[str, list[str]] = {}
    tasks = []
    for role, port in zip(roles, ports, strict=True):
        cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
        tasks.append((role, len(cluster[role]) - 1))
    children = []
    for role, index in tasks:
        config = {"cluster": cluster, "task": {"type": role, "index": index}}
        env = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GRPC_FAIL_FAST": "use_caller",
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, __file__, kind, name, str(workers), str(threads), "task"]
        tells = role == ("chief" if kind == "tf-ps" else "worker") and index == 0
        children.append(
            (tells, subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        )
    try:
        reporter = next(child for reports, child in children if reports)
        out, _ = reporter.communicate(timeout=LIMIT_S)
        print(out.strip().split()[-1])
    finally:
        for _, child in children:
            child.kill()


def run_task(kind: str, name: str, workers: int, threads: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if kind == "tf-ring":
        ring(tf, name, workers)
    else:
        served(tf, name, workers, threads)


def make_batch(tf, name: str):
    inputs = tf.random.normal((BATCH[name], *SHAPES[name]), seed=0)
    targets = tf.random.uniform((BATCH[name],), 0, 10, dtype=tf.int64, seed=0)
    return inputs, targets


def make_step(tf, name: str, model, optimizer, scale: int):
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(targets, model(inputs, training=True))) / scale
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def ring(tf, name: str, workers: int) -> None:
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = build(name)
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
    inputs, targets = make_batch(tf, name)
    step = make_step(tf, name, model, optimizer, workers)

    @tf.function
    def train():
        strategy.run(step, args=(inputs, targets))

    for _ in range(WARM_UP):
        train()
    began = time.perf_counter()
    for _ in range(STEPS[name]):
        train()
    print(STEPS[name] * BATCH[name] * workers / (time.perf_counter() - began), flush=True)


def served(tf, name: str, workers: int, threads: int) -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            # One thread for computing; to run operations one more than workers, as the guide has
            # it: fewer can wait for each other for ever.
            config=tf.compat.v1.ConfigProto(
                intra_op_parallelism_threads=threads, inter_op_parallelism_threads=workers + 1
            ),
            start=True,
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = build(name)
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
    step = make_step(tf, name, model, optimizer, 1)

    def make_data():
        return tf.data.Dataset.from_tensors(make_batch(tf, name)).repeat()

    @tf.function
    def train(batches):
        strategy.run(step, args=next(batches))

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    batches = iter(coordinator.create_per_worker_dataset(make_data))
    for _ in range(WARM_UP * workers):
        coordinator.schedule(train, args=(batches,))
    coordinator.join()
    began = time.perf_counter()
    for _ in range(STEPS[name] * workers):
        coordinator.schedule(train, args=(batches,))
    coordinator.join()
    print(STEPS[name] * BATCH[name] * workers / (time.perf_counter() - began), flush=True)
    os._exit(0)


if __name__ == "__main__":
    kind, name, workers, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    (run_task if sys.argv[5:] == ["task"] else start)(kind, name, workers, threads)

"""Keras: optimizers by Keras's formulas, models as jobs, unchanged scripts under `launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conftest import Finished, RunCli, read_result

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip(
    "keras",
    reason="Keras is not installed (pip install 'paceline[keras]'): nothing of it is tested",
)

from paceline.data import digits as bundled_digits  # noqa: E402
from paceline.errors import UsageError  # noqa: E402
from paceline.keras import jobs  # noqa: E402
from paceline.keras.fit_data import make_fit_data  # noqa: E402
from paceline.keras.jobs import KerasSchedule  # noqa: E402
from paceline.keras.keras_2_names import accept_keras_2_names  # noqa: E402
from paceline.keras.module import KerasModule, read_module, write_keras  # noqa: E402
from paceline.keras.optimizers import make_torch_optimizer, translate  # noqa: E402
from paceline.keras.tensorflow_stub import make as make_tensorflow  # noqa: E402
from paceline.specs.optimizer import parse_optimizer  # noqa: E402

RUN_S = 240.0
"""Keras alone takes seconds to import, in every worker."""

MNIST_SCRIPT = """
import json
import sys

import numpy as np
import keras
from keras import layers

data = np.load(sys.argv[1])
x_train, y_train, x_test, y_test = (data[k] for k in ("x_train", "y_train", "x_test", "y_test"))
x_train = x_train.astype("float32")[..., None] / 255
x_test = x_test.astype("float32")[..., None] / 255

model = keras.Sequential([
    keras.Input(shape=x_train.shape[1:]),
    layers.Conv2D(32, (3, 3), activation="relu"),
    layers.MaxPooling2D((2, 2)),
    layers.Flatten(),
    layers.Dense(64, activation="relu"),
    layers.Dense(10, activation="softmax"),
])
model.compile(
    optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(x_train, y_train, batch_size=64, epochs=3, validation_data=(x_test, y_test))
scores = model.evaluate(x_test, y_test)
model.save(sys.argv[2])
np.save(sys.argv[2] + ".npy", model.predict(x_test))
print("history", json.dumps(history.history))
print("scores", json.dumps(scores))
"""

TF_SCRIPT = """
import sys
import tensorflow as tf
from tensorflow.keras import layers
from tensorflow.keras.callbacks import EarlyStopping
import numpy as np

tf.random.set_seed(3)
data = np.load(sys.argv[1])
train = tf.data.Dataset.from_tensor_slices((data["x_train"], data["y_train"]))
train = train.map(lambda x, y: (tf.cast(x, tf.float32)[..., tf.newaxis] / 255.0, y),
                  num_parallel_calls=tf.data.AUTOTUNE)
train = train.shuffle(1000).batch(50).prefetch(tf.data.AUTOTUNE)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    inputs = tf.keras.Input(shape=(8, 8, 1))
    x = layers.Conv2D(8, 3, kernel_regularizer=tf.keras.regularizers.L2(1e-3))(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.Flatten()(x)
    x = layers.Dropout(0.2)(x)
    model = tf.keras.Model(inputs, layers.Dense(10)(x))
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 20, 0.5)
    model.compile(
        optimizer=tf.keras.optimizers.Adam(schedule, global_clipnorm=5.0),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", tf.keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
    )
x_val = data["x_test"].astype("float32")[..., None] / 255


class Note(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("note", epoch, sorted(logs))


history = model.fit(
    train,
    epochs=20,
    validation_data=(x_val, data["y_test"]),
    callbacks=[
        Note(),
        EarlyStopping(monitor="val_accuracy", patience=0, min_delta=1.0),
        tf.keras.callbacks.ModelCheckpoint(sys.argv[2] + ".best.keras", save_best_only=True),
        tf.keras.callbacks.CSVLogger(sys.argv[2] + ".csv"),
    ],
)
model.save(sys.argv[2])
print("epochs", len(history.history["loss"]), float(model.optimizer.iterations))
"""


def small_model(**compiled: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(**{"optimizer": "sgd", "loss": "sparse_categorical_crossentropy", **compiled})
    return model


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    images, labels = bundled_digits.read()
    images = (images[:, 0] * 255.0 / 16).astype("uint8")
    path = tmp_path / "digits.npz"
    np.savez(
        path,
        x_train=images[:1000],
        y_train=labels[:1000],
        x_test=images[1000:1300],
        y_test=labels[1000:1300],
    )
    return path


def launch(
    run_cli: RunCli, tmp_path: Path, text: str, strategy: str, *args: object
) -> tuple[Finished, Path]:
    script = tmp_path / "train_keras.py"
    script.write_text(text)
    out = tmp_path / "run"
    finished = run_cli(
        *("launch", script, "--strategy", strategy, "--workers", 2, "--out", out, "--", *args),
        timeout=RUN_S,
    )
    return finished, out


def said(finished: Finished, word: str) -> list[str]:
    """What each worker printed behind a word."""
    mark = f"] {word} "
    return [line.split(mark, 1)[1] for line in finished.stderr.splitlines() if mark in line]


# ---- scripts ---------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("allreduce", marks=pytest.mark.slow),
        pytest.param("ps", marks=pytest.mark.slow),
        "switch(allreduce, ps, at=50%)",
    ],
)
def test_unchanged_mnist_script(
    run_cli: RunCli, tmp_path: Path, digits: Path, strategy: str
) -> None:
    saved = tmp_path / "trained.keras"
    finished, out = launch(run_cli, tmp_path, MNIST_SCRIPT, strategy, digits, saved)
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert result["status"] == "done"
    assert (result["samples"], result["epochs"]) == (3000, 3)
    assert len(result["switches"]) == (1 if strategy.startswith("switch") else 0)
    # Every worker gets the same history, over all samples, and the run folder has it too.
    first, second = (json.loads(text) for text in said(finished, "history"))
    assert first == second
    assert set(first) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert first["val_accuracy"] == pytest.approx([r["val_acc"] for r in result["history"]])
    assert first["loss"] == pytest.approx([r["train_loss"] for r in result["history"]], rel=1e-4)
    assert first["accuracy"] == pytest.approx([r["train_acc"] for r in result["history"]])
    assert result["val_acc"] > 0.5
    # The weights load back into Keras and predict the same, by every way out.
    images = np.load(digits)["x_test"].astype("float32")[..., None] / 255
    expected = np.load(f"{saved}.npy")
    for path in (saved, out / "model.keras"):
        model = keras.models.load_model(path)
        np.testing.assert_allclose(model.predict(images, verbose=0), expected, atol=1e-6)
    assert type(jobs.load(out).optimizer).__name__ == "SGD"
    weights = load_file(out / "model.safetensors")
    kept = {f"{i}/{v.name}": v.numpy() for i, v in enumerate(model.variables)}
    assert set(weights) == set(kept)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(tensor.numpy(), kept[name])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensorflow_script_without_tensorflow(
    run_cli: RunCli, tmp_path: Path, digits: Path
) -> None:
    """tf.data, scopes, callbacks, a schedule of the optimizer, regularisation, BatchNorm."""
    saved = tmp_path / "trained.keras"
    finished, out = launch(run_cli, tmp_path, TF_SCRIPT, "allreduce", digits, saved)
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    # EarlyStopping ends both workers after the second epoch, of twenty.
    assert said(finished, "epochs") == ["2 40.0", "2 40.0"]
    assert result["epochs"] == 2
    assert [row["lr"] for row in result["history"]] == pytest.approx(
        [0.01 * 0.5 ** (19 / 20), 0.01 * 0.5 ** (39 / 20)]
    )
    names = ["accuracy", "loss", "top3", "val_accuracy", "val_loss", "val_top3"]
    assert said(finished, "note")[0] == f"0 {names}"
    # Worker 0 alone writes, and what is saved knows its optimizer's slots.
    assert len((tmp_path / "trained.keras.csv").read_text().splitlines()) == 3
    assert (tmp_path / "trained.keras.best.keras").exists()
    model = keras.models.load_model(saved)
    assert int(model.optimizer.iterations) == 40
    assert float(np.abs(model.optimizer._velocities[0].numpy()).sum()) > 0
    assert float(np.abs(model.layers[2].moving_mean.numpy()).sum()) > 0


FULL_BATCH = """
import sys
import numpy as np
import keras

keras.utils.set_random_seed(5)
x = np.random.rand(40, 6).astype("float32")
y = np.random.randint(0, 3, 40)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
                          keras.layers.Dense(3, activation="softmax")])
model.compile(optimizer=keras.optimizers.{optimizer}, loss="sparse_categorical_crossentropy",
              metrics=["accuracy"])
model.fit(x[:38], y[:38], batch_size=38, epochs=4, sample_weight=np.linspace(0.5, 2, 38), verbose=0)
model.fit(x[:38], y[:38], batch_size=38, epochs=6, initial_epoch=4, verbose=0,
          sample_weight=np.linspace(0.5, 2, 38))
model.save(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("allreduce", "Adam(0.05, global_clipnorm=0.05)"),
        ("ps(sync=bsp)", "SGD(0.2, momentum=0.9, nesterov=True)"),
    ],
)
def test_two_workers_train_as_plain_keras_does(
    run_cli: RunCli, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """One batch per epoch, so that the order of samples does not matter; two calls of fit."""
    text = FULL_BATCH.format(optimizer=optimizer)
    finished, _ = launch(run_cli, tmp_path, text, strategy, tmp_path / "ours.keras")
    assert finished.code == 0, finished.stderr
    plain = subprocess.run(
        [sys.executable, tmp_path / "train_keras.py", tmp_path / "plain.keras"],
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert plain.returncode == 0, plain.stderr
    ours, theirs = (keras.models.load_model(tmp_path / f"{n}.keras") for n in ("ours", "plain"))
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        # float32, summed in another order; and clipping by norm adds 1e-6 to it, as torch does.
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5)
    for a, b in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mistakes_in_a_script_are_one_line(run_cli: RunCli, tmp_path: Path) -> None:
    finished, _ = launch(
        run_cli, tmp_path, "import tensorflow as tf\ntf.raw_ops.Conv2D\n", "allreduce"
    )
    assert finished.code == 2
    assert (
        "train_keras.py:2: `tf.raw_ops.Conv2D`: tf.raw_ops is not available without TensorFlow; "
        "pip install 'paceline[tensorflow]'" in finished.last_line
    )


# ---- a model as a job ------------------------------------------------------------------------

JOB_SCRIPT = """
import os
import sys
os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
import paceline
import paceline.keras

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    x = np.random.rand(48, 6).astype("float32")
    y = keras.utils.to_categorical(np.random.randint(0, 3, 48))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"),
                              keras.layers.Dropout(0.0),
                              keras.layers.Dense(3, activation="softmax")])
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])
    model.compile(optimizer=keras.optimizers.RMSprop(schedule), loss="categorical_crossentropy")
    job = paceline.keras.job(model, x[:40], y[:40], batch_size=40, epochs=6,
                             validation_data=(x[40:], y[40:]))
    result = paceline.train(job, sys.argv[1], workers=2, out=sys.argv[2])
    trained = paceline.keras.load(sys.argv[2])
    model.fit(x[:40], y[:40], batch_size=40, epochs=6, verbose=0)
    pairs = zip(trained.get_weights(), model.get_weights())
    apart = max(float(np.abs(a - b).max()) for a, b in pairs)
    print(result["status"], result["val_acc"] is not None, apart)
    print([row["lr"] for row in result["history"]])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["allreduce"])
def test_job_of_a_compiled_model(tmp_path: Path, strategy: str) -> None:
    script = tmp_path / "job_script.py"
    script.write_text(JOB_SCRIPT)
    done = subprocess.run(
        [sys.executable, script, strategy, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    status, counted, apart = first.split()
    assert (status, counted) == ("done", "True")
    assert float(apart) < 2e-6
    assert json.loads(second) == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05, 0.01])


def test_job_rejects_unsupported_models() -> None:
    x, y = np.zeros((8, 6), "float32"), np.zeros(8, "int64")
    for change, words in (
        ({"optimizer": "ftrl"}, "Ftrl is not supported"),
        ({"optimizer": keras.optimizers.Adam(use_ema=True)}, "moving average"),
        ({"loss": None}, "without a loss"),
    ):
        with pytest.raises(UsageError, match=words):
            jobs.job(small_model(**change), x, y)
    with pytest.raises(UsageError, match="not compiled"):
        jobs.job(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), x, y)
    with pytest.raises(UsageError, match="is not a Keras model"):
        jobs.job(torch.nn.Linear(6, 3), x, y)
    with pytest.raises(UsageError, match="one input array"):
        jobs.job(small_model(), [x, x], y)
    with pytest.raises(UsageError, match="leaves one side empty"):
        jobs.job(small_model(), x, y, validation_split=0.99)


def test_job_reads_the_model() -> None:
    model = small_model(optimizer=keras.optimizers.SGD(0.3, momentum=0.5, global_clipnorm=2.0))
    job = jobs.job(model, np.zeros((8, 6)), np.zeros((8, 1)), batch_size=4, validation_split=0.25)
    assert (job.optimizer, job.lr, job.clip) == ("keras_sgd(momentum=0.5)", pytest.approx(0.3), 2.0)
    train, val, test = job.data
    assert (train[0].shape, train[1].shape, val[0].shape, test) == ((6, 6), (6,), (2, 6), None)
    assert job.describe()["loss"] == "keras sparse_categorical_crossentropy"
    job.check()


# ---- optimizers ------------------------------------------------------------------------------

OPTIMIZERS = [
    keras.optimizers.SGD(0.1),
    keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.3),
    keras.optimizers.Adam(0.01, clipnorm=0.5),
    keras.optimizers.Adam(0.01, amsgrad=True),
    keras.optimizers.AdamW(0.01, weight_decay=0.1),
    keras.optimizers.Adamax(0.01),
    keras.optimizers.Nadam(0.01),
    keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    keras.optimizers.RMSprop(0.01),
    keras.optimizers.Adagrad(0.1),
    keras.optimizers.Adadelta(0.5),
    keras.optimizers.Lion(0.01),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_optimizers_step_as_keras_does(optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)]
    theirs = [keras.Variable(s.clone().numpy()) for s in start]
    ours = [torch.nn.Parameter(s.clone()) for s in start]
    made = make_torch_optimizer(optimizer, ours)
    for step in range(6):
        gradients = [torch.randn(s.shape, generator=generator) for s in start]
        rate = 0.1 / (step + 1)
        optimizer.learning_rate = rate
        with torch.no_grad():
            optimizer.apply([g.clone() for g in gradients], theirs)
        for group in made.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(ours, gradients, strict=True):
            parameter.grad = gradient
        made.step()
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
    # The same again from the text that travels in a job.
    assert parse_optimizer(str(translate(optimizer)[0])) == translate(optimizer)[0]


def test_schedule_counts_global_batches() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.5])
    ours = KerasSchedule(schedule, batch=10, base=1.0)
    # 25 samples are three updates an epoch: steps 0 1 2, then 3 4 5.
    factors = [ours.factor(s, per_epoch=25, total=50) for s in (0, 10, 20, 25, 35, 45)]
    assert factors == [1, 1, 1, 1, 0.5, 0.5]


# ---- the model as a module -------------------------------------------------------------------


def test_module_shares_its_tensors_with_keras() -> None:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2, trainable=False),
        ]
    )
    model.compile(optimizer="sgd", loss="mse")
    module = KerasModule(model)
    assert [n for n, _ in module.named_parameters()] == ["0/kernel", "1/bias", "2/gamma", "3/beta"]
    buffers = [n for n, _ in module.named_buffers()]
    assert buffers == ["4/moving_mean", "5/moving_variance", "7/kernel", "8/bias"]
    before = dict(module.named_buffers())["4/moving_mean"].clone()
    module.train()
    module(torch.randn(16, 6)).sum().backward()
    assert not torch.equal(before, dict(module.named_buffers())["4/moving_mean"])
    assert module.regularization().item() > 0
    again = read_module(write_keras(model))
    for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    # Other workers drop other units.
    states = [int(again.keras_model.layers[2].seed_generator.state.value[0])]
    again.set_worker(1)
    states.append(int(again.keras_model.layers[2].seed_generator.state.value[0]))
    assert states[0] != states[1]


# ---- what fit is given -----------------------------------------------------------------------


def source_of(x: Any, y: Any = None, **options: Any) -> Any:
    given = {"batch_size": 4, "steps": None, "shuffle": True, "seed": 1, **options}
    return make_fit_data(x, y, **given)


def rows_of(source: Any, epoch: int = 0) -> list[int]:
    x, _, _ = source.take(epoch, 0, source.samples)
    return [int(v) for v in x.reshape(-1)]


def test_sources_give_each_sample_once() -> None:
    x = np.arange(10, dtype="float32")[:, None]
    y = np.arange(10)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4]

    tf = make_tensorflow()
    pairs = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), 4, shuffle=True
    )
    sources = {
        "arrays": source_of(x, y),
        "tensors": source_of(torch.tensor(x), torch.tensor(y)),
        "dict": source_of({"a": x}, {"b": y}),
        "py dataset": source_of(Batches()),
        "generator": source_of(iter(pairs)),
        "tf.data": source_of(tf.data.Dataset.from_tensor_slices((x, y)).batch(4)),
        "endless": source_of(tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(5), steps=2),
        "loader": source_of(loader),
    }
    for name, source in sources.items():
        assert source.samples == 10, name
        if name == "dict":
            first, second, _ = source.take(0, 2, 5)
            assert torch.equal(first["a"].reshape(-1).long(), second["b"])
            continue
        assert sorted(rows_of(source)) == list(range(10)), name
        assert rows_of(source) == rows_of(source), name
        first, second, _ = source.take(1, 3, 9)
        assert torch.equal(first.reshape(-1).long(), second), name
    assert rows_of(sources["arrays"]) != rows_of(sources["arrays"], 1)
    assert rows_of(source_of(x, y, shuffle=False)) == list(range(10))
    assert source_of(tf.data.Dataset.from_tensor_slices((x, y)).batch(3)).batch == 4


def test_data_that_cannot_be_distributed_is_rejected() -> None:
    x, y = np.zeros((8, 2)), np.zeros(8)
    tf = make_tensorflow()
    for make, words in (
        (lambda: source_of(None), "without x"),
        (lambda: source_of(x, y[:5]), r"unequal lengths: \[5, 8\]"),
        (lambda: source_of(x, y, steps=3), "steps_per_epoch is not supported with arrays"),
        (lambda: source_of(3), "does not support a int"),
        (lambda: source_of(iter([])), "without any batch"),
        (lambda: source_of(tf.data.Dataset.from_tensor_slices(x).repeat()), "infinite data"),
    ):
        with pytest.raises(UsageError, match=words):
            make()
    assert not hasattr(tf, "raw_ops")
    with pytest.raises(UsageError, match=r"tf\.data\.Dataset\.window is not available"):
        tf.data.Dataset.from_tensor_slices(x).window(3)
    with pytest.raises(UsageError, match=r"tf\.data\.Dataset\.list_files is not available"):
        tf.data.Dataset.list_files("train-*")
    # The extra would not help.
    with pytest.raises(UsageError, match=r"tf\.GradientTape is not supported"), tf.GradientTape():
        pass
    with pytest.raises(UsageError, match="placeholders of TensorFlow 1 are not supported"):
        tf.compat.v1.Session()


def test_stub_is_used_around_fit() -> None:
    tf = make_tensorflow()
    x, y = np.arange(10, dtype="float32")[:, None], np.arange(10)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    assert data.cardinality().numpy() == 3
    both = data.concatenate(data.take(1))
    assert [labels.numpy().tolist()[0] for _, labels in both] == [0, 4, 8, 0]
    assert len(both) == 4
    lists = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [3, 4])).apply(lambda d: d.batch(2))
    ((inputs, targets),) = lists.as_numpy_iterator()
    assert (inputs.tolist(), targets.tolist()) == ([[1.0], [2.0]], [3, 4])
    assert tf.math.reduce_mean([1.0, 3.0]) == 2 == tf.clip_by_value(5.0, 0.0, 2.0)
    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.task_type == "chief"
    # Parts of tf.keras that Keras 3 itself lacks.
    assert tf.keras.losses.Reduction.NONE == "none"
    assert tf.keras.preprocessing.image.ImageDataGenerator is not None
    tf.get_logger().setLevel("ERROR")
    with tf.device("/cpu:0"):
        assert tf.executing_eagerly()


def test_optimizers_accept_names_of_keras_2(monkeypatch: pytest.MonkeyPatch) -> None:
    base = keras.optimizers.Optimizer
    monkeypatch.setattr(base, "__init__", base.__init__)
    accept_keras_2_names(keras)
    assert float(keras.optimizers.SGD(lr=0.25).learning_rate) == 0.25
    assert float(keras.optimizers.legacy.Adam(0.5).learning_rate) == 0.5


def test_class_weights() -> None:
    source = source_of(
        np.zeros((4, 1)), np.array([0, 2, 1, 2]), class_weight={2: 3.0}, shuffle=False
    )
    assert source.take(0, 0, 4)[2].tolist() == [1, 3, 1, 3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["allreduce", "ps", "switch(allreduce, ps, at=50%)"])
def test_unchanged_script_on_real_mnist(
    run_cli: RunCli, tmp_path: Path, strategy: str, mnist_files: Path
) -> None:
    saved = tmp_path / "trained.keras"
    script = tmp_path / "train_keras.py"
    script.write_text(MNIST_SCRIPT)
    out = tmp_path / "run"
    finished = run_cli(
        *("launch", script, "--strategy", strategy, "--workers", 2, "--out", out),
        *("--", mnist_files, saved),
        timeout=800,
    )
    assert finished.code == 0, finished.stderr
    assert read_result(out)["val_acc"] > 0.95
    data = np.load(mnist_files)
    images = data["x_test"].astype("float32")[..., None] / 255
    predicted = keras.models.load_model(out / "model.keras").predict(images, verbose=0)
    np.testing.assert_allclose(predicted, np.load(f"{saved}.npy"), atol=1e-5)


@pytest.fixture
def mnist_files(tmp_path: Path) -> Path:
    """MNIST in the form of Keras's own file."""
    from paceline.data import idx
    from paceline.data.catalog import find_dataset_files
    from paceline.errors import DataError

    try:
        shelf = find_dataset_files("mnist", None)
        (train, train_y), (test, test_y) = (idx.read(shelf, p) for p in idx.locate(shelf))
    except DataError as missing:
        pytest.skip(f"MNIST itself is not here, so not trained on: {missing}")
    path = tmp_path / "mnist.npz"
    # Tables hold images as (N, 1, 28, 28); Keras's file has no channel.
    train, test = (images.reshape(-1, 28, 28) for images in (train, test))
    np.savez(path, x_train=train, y_train=train_y, x_test=test, y_test=test_y)
    return path


# ---- the studies' networks -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("cnn_small", "single"),
        ("cnn_small", "local_sgd(h=4)"),
        ("cnn_keras", "allreduce"),
        ("cnn_keras", "ps(sync=ssp(3))"),
        ("resnet", "allreduce"),
        ("resnet", "ps(sync=bsp, servers=2)"),
        ("resnet", "switch(allreduce, ps, at=50%)"),
        ("densenet", "ps"),
        ("densenet", "diloco(h=4)"),
        ("densenet", "allreduce(codec=topk(0.1))"),
    ],
)
def test_networks_of_the_studies(tmp_path: Path, model: str, strategy: str) -> None:
    """Each trains; what Keras predicts with the trained model is what the run counted."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("keras_models.py"), model, strategy, "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    status, samples, val_acc, right = done.stdout.splitlines()[-1].split()
    assert (status, int(samples)) == ("done", 1800)
    assert float(val_acc) == pytest.approx(float(right))

"""Spark: training, prediction, saving, loading and clear errors on a standalone cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spark_cluster
from conftest import RunCli, read_result, wait_until
from paceline.data import digits
from paceline.errors import RunFailed, UsageError
from paceline.spark.engine import summarize_spark_error
from paceline.spark.job_archive import as_store, pack_job, read_job, write_job

MISSING = spark_cluster.why_not()
needs_spark = pytest.mark.skipif(
    MISSING is not None, reason=f"no Spark cluster can be started: {MISSING}"
)
pytestmark = pytest.mark.timeout(400)
RUN_S = 300.0


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """A new process: a Spark session keeps a JVM and state in its process."""
    return run_process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[spark_cluster.Cluster]:
    with spark_cluster.run_cluster(tmp_path_factory.mktemp("spark") / "cluster") as running:
        yield running


@pytest.fixture(scope="module")
def session(cluster: spark_cluster.Cluster) -> Iterator[Any]:
    made = cluster.open_session()
    try:
        yield made
    finally:
        made.stop()
        stop_gateway()


def stop_gateway() -> None:
    """The driver's JVM, which pyspark keeps for the next session."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(scope="module")
def frame(session: Any) -> Any:
    """The digits: images as vectors and as arrays, labels as numbers."""
    from pyspark.ml.linalg import Vectors

    images, labels = digits.read()
    rows = [
        (Vectors.dense(image / 16), [float(v) / 16 for v in image], int(label), index % 5 == 0)
        for index, (image, label) in enumerate(zip(images.reshape(-1, 64), labels, strict=True))
    ]
    columns = ["features", "image", "label", "held"]
    return session.createDataFrame(rows, columns).repartition(3).cache()


def estimator(tmp_path: Path, **params: Any) -> Any:
    from paceline.spark import PacelineEstimator

    base = {
        "model": "cnn-small",
        "num_workers": 2,
        "shape": "1x8x8",
        "epochs": 3,
        "batch": 64,
        "store": str(tmp_path / "store"),
        "verbose": 0,
    }
    return PacelineEstimator(**{**base, **params})


# ---- training --------------------------------------------------------------------------------


@needs_spark
def test_estimator_trains_predicts_saves_and_loads(
    session: Any, frame: Any, tmp_path: Path
) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    from paceline.spark import PacelineEstimator, PacelineModel

    made = estimator(tmp_path, strategy="switch(allreduce, ps, at=50%)", validation=0.2)
    model = made.fit(frame)
    result = model.result
    assert result["status"] == "done"
    assert len(result["switches"]) == 1
    assert result["val_acc"] > 0.5
    run = read_result(Path(model.run))
    assert run["samples"] == result["samples"]
    assert json.loads((Path(model.run) / "run.json").read_text())["engine"] == "spark"
    # Validation and training rows are all the rows there are.
    predicted = model.transform(frame)
    assert set(predicted.columns) == {*frame.columns, "prediction", "rawPrediction"}
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(predicted)
    assert accuracy > 0.5
    # As part of a pipeline, saved, and loaded again: the same predictions.
    whole = Pipeline(stages=[made]).fit(frame)
    assert isinstance(whole.stages[0], PacelineModel)
    path = f"file://{tmp_path}/saved"
    model.write().overwrite().save(path)
    PipelineModel(stages=[model]).write().overwrite().save(f"{path}-pipeline")
    before = predicted.select("prediction", "rawPrediction").collect()
    for loaded in (PacelineModel.load(path), PipelineModel.load(f"{path}-pipeline")):
        assert loaded.transform(frame).select("prediction", "rawPrediction").collect() == before
    made.save(f"{path}-estimator")
    assert PacelineEstimator.load(f"{path}-estimator").getOrDefault("strategy") == str(
        made.getOrDefault("strategy")
    )


@needs_spark
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_estimator_under_other_strategies(frame: Any, tmp_path: Path, strategy: str) -> None:
    """Arrays as features; rows held out by a column; a second fit finds the data written."""
    made = estimator(tmp_path, strategy=strategy, featuresCol="image", validation="held", epochs=2)
    model = made.fit(frame)
    held = frame.where("held").count()
    assert model.result["samples"] == 2 * (frame.count() - held)
    written = sorted((tmp_path / "store" / "data").rglob("*.parquet"))
    again = made.fit(frame, {made.getParam("epochs"): 1})
    assert again.result["epochs"] == 1
    assert sorted((tmp_path / "store" / "data").rglob("*.parquet")) == written


MODEL_SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(),
                                          torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)
"""


@needs_spark
@pytest.mark.slow
def test_own_model_from_a_file_as_a_regression(frame: Any, tmp_path: Path) -> None:
    source = tmp_path / "net.py"
    source.write_text(MODEL_SOURCE)
    made = estimator(
        tmp_path, model=f"{source}:Net", shape=None, loss="mse_loss", optimizer="adam", epochs=2
    )
    model = made.fit(frame)
    rows = model.transform(frame).select("prediction", "rawPrediction").take(3)
    assert all(row["prediction"] == pytest.approx(row["rawPrediction"][0]) for row in rows)


@needs_spark
@pytest.mark.slow
def test_compiled_keras_model(frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Architecture, optimizer, rate and loss are the model's own."""
    # Without it Keras asks for TensorFlow, and cannot be imported where there is none.
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # Keras sets it, and leaves it
    pytest.importorskip(
        "keras", reason="Keras is not installed: its models on Spark are not tested"
    )
    from keras_models import cnn_small

    model = cnn_small()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    made = estimator(tmp_path, model=model, strategy="ps", shape="8x8x1", epochs=2)
    fitted = made.fit(frame)
    assert fitted.result["status"] == "done"
    assert (
        json.loads((Path(fitted.run) / "run.json").read_text())["job"]["optimizer"] == "keras_adam"
    )
    predicted = fitted.transform(frame)
    right = predicted.where("prediction = label").count() / frame.count()
    assert right > 0.3


@needs_spark
@pytest.mark.slow
def test_data_written_to_hdfs_by_spark(session: Any, frame: Any, tmp_path: Path) -> None:
    """Workers read it there; run folder and saved model are kept there too."""
    from object_stores import NotHere, run_hdfs
    from paceline.spark import PacelineModel

    try:
        with run_hdfs(tmp_path / "hdfs") as store:
            made = estimator(tmp_path, store=f"{store.url}/paceline", validation=0.2)
            model = made.fit(frame)
            assert model.result["status"] == "done"
            assert model.run.startswith("hdfs://")
            model.write().overwrite().save(f"{store.url}/saved")
            loaded = PacelineModel.load(f"{store.url}/saved")
            names = ["prediction", "rawPrediction"]
            expected = model.transform(frame).select(names).collect()
            assert loaded.transform(frame).select(names).collect() == expected
            listed = session.read.format("binaryFile").load(f"{model.run}/result.json").count()
            assert listed == 1
    except NotHere as missing:
        pytest.skip(f"no HDFS can be started here: {missing}")


@pytest.mark.slow
@needs_spark
def test_run_calls_a_function_on_every_executor(session: Any) -> None:
    from paceline.spark import run

    def work(scale: float) -> dict[str, Any]:
        import os

        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo")
        value = torch.tensor([scale * (dist.get_rank() + 1)])
        dist.all_reduce(value)
        answer = {"rank": dist.get_rank(), "sum": value.item()}
        dist.destroy_process_group()
        return answer

    def fail() -> None:
        raise ValueError("the dog ate the shard")

    assert run(work, 2, args=(10.0,)) == [{"rank": 0, "sum": 30.0}, {"rank": 1, "sum": 30.0}]
    with pytest.raises(RunFailed, match=r"worker \d on \S+: ValueError: the dog ate the shard"):
        run(fail, 2)
    with pytest.raises(RunFailed, match="not JSON-compatible"):
        run(lambda: {1, 2}, 1)


@pytest.mark.slow
@needs_spark
def test_train_from_the_command_line(
    cluster: spark_cluster.Cluster, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a session of its own beside the other one."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    out = tmp_path / "run"
    finished = run_cli(
        *("train", "--model", "mlp-128", "--data", "digits", "--epochs", 2, "--workers", 2),
        *("--engine", "spark", "--master", cluster.master, "--out", out, "--quiet"),
        timeout=RUN_S,
    )
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert (result["status"], result["epochs"]) == ("done", 2)
    assert (out / "model.safetensors").exists()
    assert len(list((out / "events").glob("worker-*.jsonl"))) == 2


@pytest.mark.slow
@needs_spark
def test_comparison_and_tune_keep_the_slots(
    cluster: spark_cluster.Cluster, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    out, tuned = tmp_path / "compared", tmp_path / "tuned"
    where = ("--engine", "spark", "--master", cluster.master, "--workers", 2, "--threads", 1)
    args = ("--strategies", "allreduce; ps", "--seeds", 2, "--epochs", 1, "--out", out)
    done = run_cli("compare", *args, *where, timeout=RUN_S)
    assert done.code == 0, done.stderr
    results = [read_result(path) for path in sorted(out.glob("*-seed*"))]
    assert [result["status"] for result in results] == ["done"] * 4
    # Importing torch alone takes longer than these starts.
    assert max(result["stages"]["start"] for result in results) < 5.0
    args = ("--epochs", 2, "--tolerance", 0.5, "--out", tuned)
    done = run_cli("tune", *args, *where, timeout=RUN_S)
    assert done.code == 0, done.stderr
    assert "recommended: " in done.stdout
    assert read_result(tuned / "switch-at-0000")["stages"]["start"] < 5.0


@pytest.mark.slow
@needs_spark
def test_script_from_the_command_line(
    cluster: spark_cluster.Cluster, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    examples, out = Path(__file__).parents[1] / "examples", tmp_path / "run"
    finished = run_cli(
        *("launch", examples / "keras_digits.py", "--project", examples, "--workers", 2),
        *("--engine", "spark", "--master", cluster.master, "--strategy", "ps", "--out", out),
        timeout=RUN_S,
    )
    assert finished.code == 0, finished.stderr
    result = read_result(out)
    assert (result["status"], result["samples"]) == ("done", 5 * 1500)
    assert (out / "model.safetensors").exists()


# ---- failure ---------------------------------------------------------------------------------


KILLED = """
import sys
from pathlib import Path

import numpy as np
import spark_cluster
from paceline.errors import RunFailed
from paceline.spark import PacelineEstimator

cluster = spark_cluster.Cluster(Path(sys.argv[1]), sys.argv[2])
session = cluster.open_session()
print(session.sparkContext.applicationId, flush=True)
numbers = np.random.default_rng(0).random((400, 16))
rows = [([float(v) for v in row], int(row[0] > 0.5)) for row in numbers]
data = session.createDataFrame(rows, ["features", "label"])
estimator = PacelineEstimator(model="mlp-128", num_workers=2, epochs=100_000, timeout=60.0,
                              store=sys.argv[1], verbose=0)
try:
    estimator.fit(data)
except RunFailed as error:
    print("failed:", error, flush=True)
session.stop()
"""


@pytest.mark.slow
@needs_spark
def test_killed_executor_ends_the_run_in_words(
    cluster: spark_cluster.Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    driver = subprocess.Popen(
        [sys.executable, script, tmp_path, cluster.master],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        assert driver.stdout is not None
        application = driver.stdout.readline().strip()
        runs = tmp_path / "runs"
        wait_until(
            lambda: any("step" in p.read_text() for p in runs.rglob("events/worker-1.jsonl")),
            "the second worker trains",
            RUN_S,
        )
        victim = cluster.executors(application)[0]
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        line = driver.stdout.readline()
        # --timeout is 60 s; it takes a few, but the machine may be busy.
        assert time.monotonic() - killed < 60
        assert re.search(r"failed: worker [01]", line), line
        assert driver.wait(120) == 0
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    (run,) = runs.iterdir()
    result = read_result(run)
    assert result["status"] == "failed"
    assert re.search(r"worker [01]", result["error"])


@pytest.mark.slow
@needs_spark
def test_too_many_workers_and_wrong_columns(session: Any, frame: Any, tmp_path: Path) -> None:
    from paceline.spark import engine

    with pytest.raises(
        UsageError, match=r"3 workers need 3 simultaneous task slots, but the cluster has 2"
    ):
        engine.wait_for_slots(session, 3, 1.0)
    for change, words in (
        ({"labelCol": "lable"}, "no column 'lable'; did you mean 'label'"),
        ({"labelCol": "image"}, "labels must be numbers"),
        ({"shape": "1x9x9"}, "shape 1x9x9 has 81 values, but features have 64"),
        ({"strategy": "alreduce"}, "did you mean 'allreduce'"),
        ({"store": None}, "store is not set"),
        ({"model": "cnn-smal"}, "did you mean 'cnn-small'"),
    ):
        with pytest.raises(UsageError, match=words):
            estimator(tmp_path, **change).fit(frame)
    uneven = session.createDataFrame([([1.0], 0), ([1.0, 2.0], 1)], ["features", "label"])
    with pytest.raises(UsageError, match="features of 1 to 2 numbers"):
        estimator(tmp_path).fit(uneven)
    with pytest.raises(UsageError, match="has no parameter 'modle'; did you mean 'model'"):
        estimator(tmp_path, modle="mlp-128")


class _Settings:
    """As much of a session as the check of settings looks at."""

    def __init__(self, **settings: str) -> None:
        self.conf = self
        self._settings = {k.replace("__", "."): v for k, v in settings.items()}

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._settings.get(name, default)


def test_dynamic_allocation_is_refused() -> None:
    from paceline.spark.engine import check_session

    given: Any = _Settings(spark__dynamicAllocation__enabled="true")
    with pytest.raises(UsageError, match=r"set it to false and request enough executors"):
        check_session(given)
    check_session(_Settings())  # type: ignore[arg-type]


# ---- without Spark ---------------------------------------------------------------------------


def test_what_spark_says_becomes_one_line() -> None:
    trace = "Job aborted due to stage failure:\n  Traceback\n{}\n\tat org.apache.spark.rdd.RDD"
    for said, words in (
        ("ModuleNotFoundError: No module named 'paceline'", "package paceline is missing"),
        ("RuntimeError: paceline error: worker 1 is tired", "^worker 1 is tired$"),
        (
            "ExecutorLostFailure (executor 0 exited caused by one of the running tasks) "
            "Reason: Command exited with code 137",
            "^executor 0 was lost: Command exited with code 137$",
        ),
    ):
        line = summarize_spark_error(RuntimeError(trace.format(said)))
        assert re.search(words, line)
        assert "\n" not in line


def build_net() -> Any:
    import torch

    return torch.nn.Linear(4, 2)


def test_jobs_travel_as_text(tmp_path: Path) -> None:
    fields = {"data": "digits", "batch": 32, "epochs": 2}
    packed = pack_job(build_net, "mse_loss", fields)
    assert set(packed) == {"job.json", "source_of_model.py"}
    write_job(packed, tmp_path)
    job = read_job(tmp_path)
    assert (job.batch, job.model.__name__, job.loss.__name__) == (32, "build_net", "mse_loss")
    assert json.loads(packed["job.json"])["model"]["function"] == "build_net"
    with pytest.raises(UsageError, match="model is a Linear, but executors build it themselves"):
        pack_job(build_net(), None, fields)
    with pytest.raises(UsageError, match="define it at the top level"):
        pack_job(lambda: build_net(), None, fields)


def test_store_is_needed_on_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"executors of spark://h:1 may not have access"):
        as_store(None, "spark://h:1")
    assert as_store(None, "local[2]").folder is not None
    assert as_store(f"file://{tmp_path}/a", "spark://h:1").folder == tmp_path / "a"
    assert as_store("hdfs://h:1/a/", "spark://h:1").url == "hdfs://h:1/a"


BARE = """
import sys
from pathlib import Path

import spark_cluster
from paceline.errors import PacelineError
from paceline.spark import PacelineEstimator

place = Path(sys.argv[1])
with spark_cluster.run_cluster(place / "cluster") as cluster:
    session = cluster.open_session()
    rows = session.range(64).selectExpr(
        "array_repeat(cast(id as double), 64) as features", "cast(id % 10 as int) as label"
    )
    made = PacelineEstimator(
        model="cnn-small", num_workers=2, shape="1x8x8", store=str(place / "store"), verbose=0
    )
    try:
        made.fit(rows)
    except PacelineError as error:
        print("error:", error)
    session.stop()
"""


@needs_spark
@pytest.mark.slow
def test_package_missing_on_the_executors_is_reported(tmp_path: Path) -> None:
    """Executors on a Python that has nothing installed."""
    venv.create(tmp_path / "bare", with_pip=False)
    env = {
        **os.environ,
        "PYSPARK_PYTHON": str(tmp_path / "bare/bin/python"),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parent),
    }
    (tmp_path / "bare.py").write_text(BARE)
    done = subprocess.run(
        [sys.executable, "bare.py", str(tmp_path)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    shown = [line for line in done.stdout.splitlines() if line.startswith("error:")]
    assert len(shown) == 1, done.stderr
    assert "is missing on the executors; install paceline there, or set PYSPARK_PYTHON" in shown[0]

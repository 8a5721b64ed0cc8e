"""`paceline reproduce`: matching with published results, what is omitted, and real runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import RunCli
from paceline import models
from paceline.cluster.pool import Host, Pool
from paceline.errors import UsageError
from paceline.job import JobRef
from paceline.launch.matrix_file import list_cells
from paceline.launch.reproduction import (
    STUDIES,
    Place,
    divide_machines,
    find_study,
    prepare_study,
)
from paceline.launch.run_options import RunOptions
from paceline.launch.tensorflow_run import run_in_tensorflow
from paceline.report.reproduction.claims import CLAIMS
from paceline.report.reproduction.matching import (
    PublishedSettings,
    describe_mismatch,
    list_reproduced,
)
from paceline.report.reproduction.opening import make_opening
from paceline.report.reproduction.operators import add_up, categorize, published_operators
from paceline.report.reproduction.published_items import ITEMS, items_of
from paceline.report.reproduction.switch import interpolate_seconds
from paceline.report.runs import ReportRun, split_tasks
from paceline.report.tables import ReportTable
from paceline.strategies.registry import parse_strategy
from paceline.twin.clusters import read_cluster

TENSORFLOW = Path(__file__).parents[1] / ".peers/tensorflow/bin/python"


def make_run(published: str, **facts: Any) -> ReportRun:
    arm = published.rpartition("/")[2]
    rows = [
        {"epoch": e, "seconds": 2.0 * e, "updates": 10 * e, "samples": 640 * e,
         "train_loss": 1.0 / e, "train_acc": 0.5 + 0.1 * e, "val_loss": 1.0, "val_acc": 0.6}
        for e in (1, 2, 3)
    ]  # fmt: skip
    result = {"status": "done", "strategy": arm, "model": "m", "data": "mnist", "batch": 128,
              "workers": 2, "servers": 0, "seed": 0, "epochs": 3, "seconds": 7.0,
              "samples_per_s": 320.0, "updates": 30, "train_acc": 0.8, "val_acc": 0.6,
              "test_acc": 0.75, "train_loss": 0.3, "val_loss": 1.0, "history": rows,
              "stages": {"read": 0.5, "train": 6.0, "evaluate": 0.1},
              "input": {"worker-0": {"make_s": 0.6}, "worker-1": {"make_s": 0.9}},
              "phases": {"worker-0": {"comm_exposed": 0.3, "wait": 0.3}},
              "labels": {"task": "t", "arm": arm, "published": published}}  # fmt: skip
    return ReportRun(name=published, result={**result, **facts})


def open_study(study: str, *runs: ReportRun) -> dict[str, ReportTable]:
    opening = make_opening(study, ["stated"], split_tasks(list(runs)), ["TF: not installed"])
    assert opening.statements == ["stated", "Omitted arm: TF: not installed."]
    return {sheet.name: sheet for sheet in opening.sheets}


def read_rows(sheet: ReportTable, key: str) -> dict[Any, dict[str, Any]]:
    rows = [dict(zip(sheet.headers, row, strict=True)) for row in sheet.rows]
    return {row[key]: row for row in rows}


def test_switch_rows_stand_next_to_the_published_ones_and_a_straight_line() -> None:
    sheets = open_study(
        "switch",
        make_run(
            "resnet_cifar10/128/allreduce",
            model="resnet56",
            data="cifar10",
            workers=5,
            epochs=180,
            seconds=100.0,
        ),
        make_run("resnet_cifar10/128/ps_async", seconds=60.0),
        make_run("resnet_cifar10/128/switch_25", seconds=75.0, epochs=8, virtual=True),
    )
    rows = read_rows(sheets["published-resnet_cifar10"], "strategy")
    assert rows["allreduce"]["seconds, published"] == 27505
    assert rows["allreduce"]["differs in"] == "nothing"
    assert rows["switch_25"]["straight line, published"] == pytest.approx(23784 + 0.25 * 3721)
    assert rows["switch_25"]["straight line, here"] == pytest.approx(70.0)
    assert rows["switch_25"]["differs in"] == (
        "model m, not resnet50 or resnet56; data mnist, not CIFAR-10; 8 epochs, not 180; "
        "2 workers, not 5; simulated"
    )
    assert rows["ps_async"]["over all-reduce, here"] == pytest.approx(0.6)
    assert interpolate_seconds("ps_async", 1.0, 2.0) is None


def test_ps_rows_are_matched_by_batch_and_impossible_values_are_shown() -> None:
    run = make_run("mnist/256/ps_async", model="mlp-300-100", workers=6, batch=1536, epochs=25)
    sheets = open_study("ps-allreduce", run, make_run("mnist/128/allreduce"))
    rows = read_rows(sheets["published-mnist"], "batch")
    assert rows[256]["seconds, published"] == 107.155
    assert rows[256]["differs in"] == "nothing"
    assert rows[128]["differs in"] == (
        "model m, not mlp-300-100; 3 epochs, not 25; 2 workers, not 9; batch 64, not 128"
    )
    curves = sheets["published-mnist-epochs"]
    column = curves.headers.index("ps_async 256, published")
    assert max(row[column] for row in curves.rows) == 1.0015
    assert "error of the source" in curves.note
    metrics = {row[curves.headers.index("epoch")] for row in curves.rows}
    assert len(metrics) == 25
    printed = {(r[1], r[3]): r[5] for r in sheets["published-resources"].rows}
    assert printed[256, "CPU busy, %"] == 9.5


def test_spark_rows_have_ratios_of_input_and_exchange() -> None:
    slow = {"worker-0": {"make_s": 6.0}, "worker-1": {"make_s": 9.0}}
    sheets = open_study(
        "spark-tensorflow",
        make_run("mnist/96/tensorflow", batch=96),
        make_run("mnist/96/generator", batch=96, input=slow),
        make_run("mnist/96/none", batch=96),
    )
    (ratios,) = read_rows(sheets["published-mnist-ratios"], "batch, published").values()
    assert ratios["batch preparation, Spark / TensorFlow"] == 16.56
    assert ratios["here: row by row / batches"] == pytest.approx(10.0)
    assert ratios["all-reduce, Horovod / TensorFlow"] == 0.0044
    assert "here: exchange, on Spark / plain" not in ratios
    times = read_rows(sheets["published-mnist"], "arm")
    assert times["generator"]["batch preparation per epoch"] == pytest.approx(2.5)
    assert times["tensorflow"]["ms/step, here"] == pytest.approx(300.0)
    assert times["tensorflow"]["seconds, published"] == "not legible"


def test_published_operators_are_complete_by_category() -> None:
    for workload, batch in (("mnist", 96), ("cifar10", 512)):
        sums = published_operators(workload, batch, "spark_horovod")
        assert "other" not in sums
        assert {"convolution, backward", "all-reduce", "optimizer", "input"} <= set(sums)
    assert published_operators("mnist", 1536, "tensorflow")["all-reduce"] == 5845230.2
    ours = ("aten::convolution_backward", "c10d::allreduce_", "aten::mkldnn_convolution")
    assert [categorize(name) for name in ours] == [
        "convolution, backward", "all-reduce", "convolution, forward"]  # fmt: skip
    assert add_up({"PyFunc": None, "Dataset": 2.0}) == {"input": 2.0}


def test_pool_rows_say_what_is_derived_and_not_legible() -> None:
    sheets = open_study(
        "pool",
        make_run("mnist/64/single_a", workers=1, batch=64),
        make_run("mnist/64/cpu", model="cnn-small", workers=3, batch=192),
    )
    rows = read_rows(sheets["published-pool"], "selection")
    assert rows["single_a"]["steps per epoch, published"] == "938 (derived)"
    assert rows["cpu"]["training accuracy, published"] == "not legible"
    assert rows["cpu"]["differs in"] == "nothing"
    epochs = sheets["published-pool-epochs"]
    assert [row[epochs.headers.index("ms/step, here")] for row in epochs.rows[:3]] == [200.0] * 3


@pytest.mark.parametrize("study", STUDIES)
def test_machines_and_software_of_the_study_are_shown(study: str) -> None:
    rows = {row[0]: row[1] for row in open_study(study)["published-cluster"].rows}
    assert len(rows) >= 4
    assert any("TensorFlow" in str(v) or n == "tensorflow" for n, v in rows.items())
    if study == "switch":
        assert "157.1 GB" in rows["contradictions"]


def test_runs_without_a_published_counterpart_are_left_out() -> None:
    run = make_run("mnist/64/single_a")
    del run.result["labels"]
    assert list_reproduced(split_tasks([run])) == []
    (row,) = list_reproduced(split_tasks([make_run("a/1/b", status="failed")]))
    settings = PublishedSettings("mnist", 3, 2, 128)
    assert describe_mismatch(row, settings) == "no run finished"


def test_every_published_item_is_matched_or_has_a_reason() -> None:
    assert {item.study for item in ITEMS} == {claim.study for claim in CLAIMS} == set(STUDIES)
    assert all(item.ours or item.reason for item in ITEMS)
    assert any("no result" in item.reason for item in items_of("pool"))


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize(
    ("scale", "real", "place"),
    [("small", False, Place()), ("small", True, Place()), ("full", True, Place()),
     ("full", True, Place(twin=True)), ("small", False, Place(engine="ray"))],
)  # fmt: skip
def test_studies_can_be_prepared(study: str, scale: str, real: bool, place: Place) -> None:
    prepared = prepare_study(find_study(study), scale, place, real=real)
    cells = list_cells(prepared.matrix, {})
    assert all(cell.published for cell in cells)
    data = {cell.job["data"] for cell in cells}
    assert ("digits" in data) == (not real)
    if place.twin:
        assert all(cell.twin for cell in cells)
        assert not any(cell.where.get("engine") for cell in cells)


def test_a_pool_is_divided_as_in_the_study(tmp_path: Path) -> None:
    def make_pool(count: int) -> Pool:
        return Pool(hosts=tuple(Host(host=f"h{n}") for n in range(count)))

    assert divide_machines(make_pool(9)) == ([f"h{n}" for n in range(1, 7)], ["h7", "h8"])
    assert divide_machines(make_pool(3)) == (["h0", "h1"], ["h2"])
    with pytest.raises(UsageError, match="at least 2"):
        divide_machines(make_pool(1))
    path = tmp_path / "pool.yaml"
    path.write_text(make_pool(3).to_yaml(), encoding="utf-8")
    prepared = prepare_study(find_study("ps-allreduce"), "small", Place(pool=path), real=False)
    ps, allreduce = prepared.matrix.strategies
    assert ps.strategy == "ps(servers=1, lr_scale=1)"
    assert (ps.where["select"], ps.where["servers_on"]) == (["h0,h1"], ["h2"])
    assert "select" not in allreduce.where
    prepared = prepare_study(find_study("pool"), "small", Place(pool=path), real=False)
    assert [arm.arm for arm in prepared.matrix.strategies] == ["single", "cpu"]
    assert prepared.omitted == [
        "energy: the pool has no such machine", "gpu: the pool has no such machine"]  # fmt: skip


def test_arms_of_tensorflow_need_its_environment() -> None:
    study, arm = find_study("spark-tensorflow"), "TensorFlow, row by row"
    without = prepare_study(study, "small", Place(), real=False)
    assert arm not in [each.arm for each in without.matrix.strategies]
    assert f"{arm}: TensorFlow has no environment here; run `make peers`" in "\n".join(
        without.omitted
    )
    place = Place(tensorflow=Path("python"))
    cells = list_cells(prepare_study(study, "small", place, real=False).matrix, {})
    found = [cell for cell in cells if cell.arm == arm]
    assert [cell.published for cell in found] == [
        "mnist/96/tensorflow_generator",
        "mnist/384/tensorflow_generator",
        "mnist/1536/tensorflow_generator",
        "cifar10/256/tensorflow_generator",
    ]
    assert all(cell.peer == "tensorflow" and cell.is_local and not cell.is_here for cell in found)


def test_clusters_of_the_studies_are_bundled() -> None:
    for study in STUDIES.values():
        for name in study.clusters.values():
            assert len(read_cluster(name).slots) in (3, 5, 9)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("swich",), "unknown study 'swich'; did you mean 'switch'"),
        (("pool", "--scale", "full"), "--scale full requires --data-dir"),
        (("pool", "--twin", "--engine", "ray"), "--twin and --engine cannot be combined"),
        (("pool", "--master", "x"), "--master requires --engine spark"),
        (("pool", "--seeds", "0"), "--seeds must be at least 1"),
        (("pool", "--tensorflow", "no/python"), "--tensorflow no/python does not run"),
        (("pool", "--tensorflow", sys.executable), "or install paceline[tensorflow] and tf_keras"),
    ],
)
def test_mistakes_are_told_in_one_line(run_cli: RunCli, args: tuple[str, ...], words: str) -> None:
    done = run_cli("reproduce", *args)
    assert done.code == 2
    assert words in done.last_line


def test_a_study_in_virtual_time_is_printed_and_resumed(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("reproduce", "pool", "--twin", "--out", "pool")
    assert done.code == 0, done.stderr
    assert "scale small, in virtual time" in done.stdout
    assert "938 (derived)" in done.stdout
    assert "the study prints no result for all five machines" in done.stdout
    text = (tmp_path / "pool" / "report.md").read_text(encoding="utf-8")
    assert "Selections of machines: published and here" in text
    assert "smaller networks than in the study" in text
    assert (tmp_path / "pool" / "tables" / "published-pool.csv").exists()
    again = run_cli("reproduce", "pool", "--twin", "--out", "pool")
    assert again.code == 0
    runs = json.loads((tmp_path / "pool" / "matrix.json").read_text())["runs"]
    assert [run["where"]["select"] for run in runs] == [["a"], ["energy"], ["cpu"], ["gpu"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TENSORFLOW.exists(), reason="no TensorFlow: run `make peers`")
@pytest.mark.parametrize("model", ["cnn-small", "cnn-keras", "resnet8", "resnet56v2"])
def test_tensorflow_trains_the_same_network(model: str, tmp_path: Path) -> None:
    """TensorFlow's network has as many trained numbers as the one of the catalog."""
    train = run_in_tensorflow(TENSORFLOW)
    fields = {"model": model, "data": "digits", "epochs": 2, "batch": 96, "limit": 192, "lr": 0.1,
              "optimizer": "adadelta", "validation": "none", "prefetch": 0,
              "row_by_row": model == "cnn-small"}  # fmt: skip
    options = RunOptions(out=tmp_path / "run", workers=2, threads=1)
    result = train(JobRef(fields=fields), parse_strategy("allreduce"), options)
    assert (result["status"], result["samples"], result["updates"]) == ("done", 2 * 192, 4)
    assert [row["epoch"] for row in result["history"]] == [1, 2]
    assert set(result["input"]) == {"worker-0", "worker-1"}
    ours = models.build(model, input_shape=(1, 8, 8), classes=10)
    trained = sum(p.numel() for p in ours.parameters())
    assert result["parameter_bytes"] == 4 * trained
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("study", "words"),
    [
        ("switch", ("published-resnet_cifar10", "published-densenet_fashion_mnist-monitor")),
        ("ps-allreduce", ("published-mnist", "published-resources")),
        ("spark-tensorflow", ("published-mnist-operators", "published-cifar10-ratios")),
        ("pool", ("published-pool", "published-pool-epochs")),
    ],
)
def test_small_studies_run_with_real_processes(
    run_cli: RunCli, tmp_path: Path, study: str, words: tuple[str, ...]
) -> None:
    done = run_cli("reproduce", study, "--out", "out", "--threads", 1)
    assert done.code == 0, done.stderr
    for name in words:
        assert (tmp_path / "out" / "tables" / f"{name}.csv").stat().st_size > 100
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Published tables and figures" in html
    assert "Machines over time" in html

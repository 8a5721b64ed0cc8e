"""Tasks, tables, targets, frontier, published figures, and every form they are written in."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from paceline.errors import UsageError
from paceline.report.charts import draw_frontier
from paceline.report.document import make_content
from paceline.report.published_results import (
    draw_published,
    find_curve,
    find_published,
    list_published_runs,
    make_published_tables,
    read_published_json,
    strategy_family,
)
from paceline.report.runs import ReportRun, RunGroup, fastest, load_runs, split_tasks
from paceline.report.stats import mean_and_std, welch_test
from paceline.report.study_tables import list_tables
from paceline.report.tables import Column, ReportTable, escape_latex
from paceline.report.writer import write_report


def make_run(name: str, *, seed: int = 0, **facts: Any) -> ReportRun:
    pace, best = facts.pop("pace", 1.0), facts.pop("best", 0.95)
    task, arm = facts.pop("task", None), facts.pop("arm", None)
    history = [
        {
            "epoch": e,
            "seconds": pace * e,
            "samples": 1000 * e,
            "updates": 10 * e,
            "train_loss": 2.0 / e,
            "train_acc": 1 - 0.5 / e,
            "val_loss": 2.1 / e,
            "val_acc": best - 0.4 / e**2 + 0.001 * seed,
        }
        for e in range(1, 11)
    ]
    result = {
        "status": "done",
        "error": None,
        "strategy": name,
        "model": "mlp-128",
        "data": "fashion-mnist",
        "batch": 128,
        "workers": 2,
        "servers": 0,
        "seed": seed,
        "epochs": 10,
        "samples": 10_000,
        "updates": 100,
        "seconds": 10 * pace + 0.1 * seed,
        "samples_per_s": 1000 / pace,
        "train_loss": 0.2,
        "train_acc": 0.95,
        "val_loss": 0.21,
        "val_acc": history[-1]["val_acc"],
        "test_loss": 0.3,
        "test_acc": best - 0.01 + 0.001 * seed,
        "history": history,
        "switches": [],
        "labels": {k: v for k, v in (("task", task), ("arm", arm)) if v},
        "resources": {
            "worker-0": {"seconds": 10.0, "cpu_mean": 0.5, "cpu_peak": 0.9, "rss_mean": 100,
                         "rss_peak": 200, "net_in": 1000, "net_in_peak": 300, "net_out": 2000,
                         "net_out_peak": 400},
            "worker-1": {"seconds": 10.0, "cpu_mean": 0.7, "cpu_peak": 1.0, "rss_mean": 300,
                         "rss_peak": 250, "net_in": 3000, "net_in_peak": 600, "net_out": 2000,
                         "net_out_peak": 500},
        },
        "verdicts": [],
    }  # fmt: skip
    return ReportRun(name=f"{name}-{seed}", result={**result, **facts}, label="")


def make_task(*runs: ReportRun) -> RunGroup:
    (task,) = split_tasks(runs)
    return task


def seeds_of(name: str, count: int = 3, **facts: Any) -> list[ReportRun]:
    return [make_run(name, seed=seed, **facts) for seed in range(count)]


# ---- tasks


def test_runs_are_parted_by_what_they_train() -> None:
    runs = [
        make_run("allreduce", task="A", arm="all"),
        make_run("ps", task="B"),
        make_run("ps", data="mnist"),
        make_run("ps", model="cnn-small"),
    ]
    tasks = split_tasks(runs)
    assert [task.name for task in tasks] == [
        "A",
        "B",
        "mlp-128 on mnist",
        "cnn-small on fashion-mnist",
    ]
    assert tasks[0].entries[0]["label"] == "all"
    # Within a task nothing is said about what all of its runs share.
    assert tasks[2].entries[0]["label"] == "ps"


def test_an_arm_keeps_its_own_batch_apart() -> None:
    task = make_task(make_run("allreduce", batch=128), make_run("allreduce", batch=1152))
    labels = [entry["label"] for entry in task.entries]
    assert labels == ["allreduce [batch 128]", "allreduce [batch 1152]"]


# ---- targets


def test_time_to_target_is_read_off_the_epochs() -> None:
    task = make_task(*seeds_of("allreduce", pace=2.0), *seeds_of("ps", pace=1.0, best=0.93))
    target = task.choose_target_accuracy()
    assert target == pytest.approx(0.925)
    found = {row.label: row for row in task.time_to_accuracy(0.9)}
    # 0.95 - 0.4/e² reaches 0.9 at the third epoch, 0.93 - 0.4/e² at the fourth.
    assert found["allreduce"].seconds["mean"] == pytest.approx(2.0 * 3)
    assert found["ps"].seconds["mean"] == pytest.approx(1.0 * 4)
    assert [row.label for row in fastest(list(found.values()))] == ["ps", "allreduce"]
    none = {row.label: row for row in task.time_to_accuracy(0.94)}
    assert (none["ps"].reached, none["ps"].seconds["mean"]) == (0, None)
    assert [row.label for row in fastest(list(none.values()))] == ["allreduce"]


# ---- frontier


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=8, unique=True)
)
def test_nothing_on_the_frontier_is_beaten(points: list[tuple[int, int]]) -> None:
    runs = [
        make_run(f"s{i}", seconds=float(s), test_acc=a / 100) for i, (s, a) in enumerate(points)
    ]
    front = make_task(*runs).find_frontier()
    kept = {(entry["seconds"]["mean"], round(entry["test_acc"]["mean"] * 100)) for entry in front}
    for s, a in points:
        is_beaten = any((s2 <= s and a2 >= a) and (s2, a2) != (s, a) for s2, a2 in points)
        assert ((s, a) in kept) == (not is_beaten)


def test_frontier_is_valid_plotly() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figure = draw_frontier(make_task(*seeds_of("allreduce"), *seeds_of("ps", pace=0.5)))
    graph_objects.Figure(figure)
    assert draw_frontier(make_task(make_run("ps"))) is None


# ---- tables


def test_tables_hold_the_figures() -> None:
    task = make_task(*seeds_of("allreduce", pace=2.0), *seeds_of("ps", best=0.90))
    sheets = {sheet.name: sheet for sheet in list_tables(task)}
    assert set(sheets) == {"accuracy", "time", "target", "resources", "claims"}
    time = sheets["time"]
    assert time.rows[1][time.headers.index("time vs. first")] == pytest.approx(0.5, abs=0.01)
    less = time.formatted_rows()[1][time.headers.index("difference to first")]
    assert less.startswith("−10.0")  # noqa: RUF001
    assert "below 1 is faster" in time.note
    used = sheets["resources"]
    row = dict(zip(used.headers, used.rows[0], strict=True))
    assert row["CPU cores, mean"] == pytest.approx(0.6)
    assert row["CPU cores, peak"] == 1.0
    assert row["received/s, mean"] == pytest.approx(200)
    assert row["memory, peak"] == 250
    claims = sheets["claims"].formatted_rows()
    assert any(line == "significant" for row in claims for line in row)


def test_stages_are_shown_with_what_they_held_and_waited() -> None:
    parts = {
        f"worker-{stage}": {
            "stage": stage,
            "stages": 2,
            "cut": ["layers.2"],
            "weight_bytes": 1_000_000,
            "bubble": 0.21,
            "bubble_formula": 0.2,
        }
        for stage in (0, 1)
    }
    sheets = {s.name: s for s in list_tables(make_task(make_run("pipeline", parts=parts)))}
    shown = [
        dict(zip(sheets["parts"].headers, row, strict=True))
        for row in sheets["parts"].formatted_rows()
    ]
    assert [row["worker"] for row in shown] == ["worker 0", "worker 1"]
    assert shown[1]["cut before"] == "layers.2"
    assert (shown[1]["waited"], shown[1]["expected"]) == ("21.00%", "20.00%")


def test_one_seed_claims_nothing() -> None:
    sheets = {s.name: s for s in list_tables(make_task(make_run("a"), make_run("b", pace=9.0)))}
    assert all(row[-1].startswith("unknown") for row in sheets["claims"].formatted_rows())


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=8),
    st.lists(st.floats(-5, 5), min_size=2, max_size=8),
)
def test_chance_agrees_with_scipy(one: list[float], other: list[float]) -> None:
    a, b = mean_and_std(one), mean_and_std(other)
    if a["std"] < 1e-3 or b["std"] < 1e-3:
        return
    difference, chance, sure = welch_test(a, b)
    expected = float(stats.ttest_ind(one, other, equal_var=False).pvalue)
    assert difference == pytest.approx(a["mean"] - b["mean"])
    assert chance == pytest.approx(expected, abs=1e-3)
    assert sure is (chance < 0.05)
    assert welch_test(a, b, comparisons=4)[1] == pytest.approx(min(1.0, 4 * expected), abs=4e-3)


def test_a_table_in_every_form() -> None:
    sheet = ReportTable(
        name="t",
        title="50 % & more_than_that",
        columns=(
            Column(title="strategy"),
            Column(title="acc", kind="fraction_spread"),
            Column(title="empty", kind="count"),
        ),
        rows=[["=cmd|x", mean_and_std([0.5, 0.7]), None]],
    ).without_empty_columns()
    assert sheet.headers == ["strategy", "acc"]
    rows = list(csv.reader(io.StringIO(sheet.to_csv())))
    assert rows[0] == ["strategy", "acc mean", "acc std", "acc n"]
    assert rows[1][0] == "'=cmd|x"
    assert float(rows[1][1]) == pytest.approx(0.6)
    latex = sheet.to_latex()
    assert r"50 \% \& more\_than\_that" in latex
    assert r"60.00 $\pm$ 14.14\%" in latex
    assert "\\|" in sheet.to_markdown()


@given(st.text(max_size=30))
def test_no_text_breaks_out_of_latex(text: str) -> None:
    escaped = escape_latex(text)
    for mark in "%&#":
        assert escaped.count(mark) == escaped.count("\\" + mark)


# ---- published


def test_published_facts_are_whole() -> None:
    rows = list_published_runs()
    assert len([r for r in rows if r.study == "ps_vs_allreduce_mlp"]) == 12
    assert len([r for r in rows if r.study == "strategy_switch_cpu_cluster"]) == 10
    assert all(math.isfinite(r.figures["seconds"]) for r in rows)
    assert len(find_curve("fashion-mnist", "allreduce", 256)) == 25
    assert "compare ratios" in read_published_json("results")["about"]
    assert strategy_family("ps(servers=2, lr_scale=1)") == "ps"
    assert strategy_family("switch(allreduce, ps, at=50%)") == "switch(allreduce, ps, at=50%)"


def test_ours_stand_beside_the_published_of_the_same_kind() -> None:
    name = "mlp-128 on fashion-mnist, batch 128 per worker"
    task = make_task(
        *seeds_of("ps(lr_scale=1)", task=name, arm="ps", best=0.89),
        *seeds_of("allreduce", task=name, arm="all", best=0.86, pace=2.0),
        *seeds_of("local_sgd", task=name),
    )
    pairs = find_published(task)
    assert [(entry["label"], row.arm, row.batch) for entry, row in pairs] == [
        ("ps", "ps", 128),
        ("all", "allreduce", 128),
    ]
    (sheet,) = make_published_tables(task)
    row = dict(zip(sheet.headers, sheet.rows[1], strict=True))
    assert row["over the first, published"] == pytest.approx(259.300 / 121.245)
    assert row["over the first, here"] == pytest.approx(2.0, abs=0.02)
    assert row["minus the first, published"] == pytest.approx(0.8577 - 0.8862)
    assert row["minus the first, here"] == pytest.approx(-0.03)
    assert "never the seconds" in sheet.note
    figure = draw_published(task)
    assert figure is not None
    assert len(figure["data"]) == 4
    assert max(max(trace["y"]) for trace in figure["data"]) <= 1.0


def test_nothing_published_is_invented() -> None:
    task = make_task(make_run("ps", data="digits"), make_run("allreduce", data="digits"))
    assert make_published_tables(task) == []
    assert draw_published(task) is None


# ---- written out


def write_folder(root: Path, runs: list[ReportRun]) -> Path:
    for run in runs:
        folder = root / run.name
        (folder / "events").mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(run.result), encoding="utf-8")
    return root


def test_findings_say_when_updates_were_unequal() -> None:
    runs = [*seeds_of("ps", updates=900), *seeds_of("allreduce", updates=100)]
    (section,) = make_content(runs, title="t").sections
    text = " ".join(section.findings)
    assert "100 to 900, 9.0 times as many" in text
    assert "Pareto-optimal in time and" in text


def test_findings_tell_the_verdicts_of_runs() -> None:
    verdict = {"rule": "straggler", "who": "worker-1", "text": "worker 1 computes 2.9x slower"}
    runs = seeds_of("ps", verdicts=[verdict])
    (section,) = make_content(runs, title="t").sections
    assert any("worker 1 computes 2.9x slower" in text for text in section.findings)


def test_every_form_is_written(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="pictures are not drawn: pip install paceline[figures]"
    )
    runs = [*seeds_of("allreduce", task="A"), *seeds_of("ps", task="A", pace=0.5),
            *seeds_of("ps", task="B")]  # fmt: skip
    root = write_folder(tmp_path / "runs", [
        ReportRun(name=f"{i}", result=run.result) for i, run in enumerate(runs)
    ])  # fmt: skip
    write_report(
        [root],
        tmp_path / "r.html",
        tmp_path / "r.md",
        title="Both",
        figures=tmp_path / "pictures",
        tables=tmp_path / "tables",
        published=True,
    )
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    for words in ("Accuracy and loss", "Time and work", "Time to a validation accuracy"):
        assert words in html
        assert words in text
    assert "## A" in text
    assert "](pictures/a-frontier.svg)" in text
    for name in ("a-frontier", "a-val-acc-epochs", "b-val-acc-seconds"):
        assert (tmp_path / "pictures" / f"{name}.png").stat().st_size > 5000
        assert "<svg" in (tmp_path / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert (tmp_path / "tables" / "a-accuracy.csv").exists()
    assert "\\toprule" in (tmp_path / "tables" / "b-time.tex").read_text(encoding="utf-8")


def test_a_matrix_keeps_its_order(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "runs", [
        ReportRun(name="a", result=make_run("second").result),
        ReportRun(name="b", result=make_run("first").result),
    ])  # fmt: skip
    (root / "matrix.json").write_text(json.dumps({"runs": [{"name": "b"}, {"name": "a"}]}))
    assert [run.label for run in load_runs([root])] == ["first", "second"]
    (root / "matrix.json").write_text('{"runs": 3')
    assert [run.label for run in load_runs([root])] == ["second", "first"]


def test_mistakes_of_the_user(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "runs", [make_run("ps")])
    with pytest.raises(UsageError, match=r"\.html or \.md"):
        write_report([root], tmp_path / "r.pdf", title="t")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be"):
        write_report([root], tmp_path / "r.md", title="t", tables=tmp_path / "file" / "below")

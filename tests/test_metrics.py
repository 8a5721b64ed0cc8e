"""The metric table: one row reaches every view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.dashboard.run_index import RunSummary
from paceline.dashboard.server import render_page
from paceline.report.comparison import compare_results
from paceline.report.runs import load_runs, make_task
from paceline.report.study_tables import (
    make_accuracy_table,
    make_run_table,
    make_summary_table,
    make_time_table,
    results_table,
)
from paceline.telemetry import metrics
from paceline.telemetry.events import RunProgress
from paceline.telemetry.live_run import LiveRun, expose
from paceline.telemetry.metrics import METRICS, Metric, Unit, View, render_docs
from paceline.telemetry.schema import RunConfig, RunResult

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "runs"

LAG = Metric(
    key="max_lag",
    title="max lag",
    description="Largest lag of any worker, in pushes.",
    unit=Unit.COUNT,
    source=lambda result: result.get("lag", {}).get("max"),
    views=frozenset(View),
    live=lambda progress: float(progress.epoch),
)


def test_docs_are_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == render_docs()


def test_keys_titles_and_families_are_unique() -> None:
    for names in (
        [m.key for m in METRICS],
        [m.title for m in METRICS],
        [m.family or m.key for m in METRICS if m.live is not None],
    ):
        assert len(names) == len(set(names))
    assert all((m.live is not None) == (View.PROMETHEUS in m.views) for m in METRICS)


def test_a_new_metric_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, LAG))
    runs = load_runs([GOLDEN / "ps"])
    (run,) = runs
    result: RunResult = run.result
    result["lag"] = {"max": 7}

    comparison = compare_results([result])
    entry: Any = comparison["strategies"][0]
    assert entry["max_lag"]["mean"] == 7
    assert "max lag" in [c.header for c in results_table(comparison, width=200).columns]
    assert "max lag" in make_summary_table(comparison).headers
    task = make_task("golden", runs)
    for sheet in (make_accuracy_table(task), make_time_table(task)):
        assert sheet.formatted_rows()[0][sheet.headers.index("max lag")] == "7"
    assert "max lag" in make_run_table(runs).headers

    assert '"key":"max_lag","title":"max lag","unit":"COUNT"' in render_page("folder", [], "n")
    summary = RunSummary(GOLDEN / "ps", "ps")
    summary.poll()
    assert "max_lag" in summary.payload()

    live = LiveRun(RunConfig())
    live.progress = RunProgress(t=1.0, epoch=3, samples=10, updates=2, loss=0.5)
    assert (
        "# HELP paceline_max_lag Largest lag of any worker, in pushes.\n"
        "# TYPE paceline_max_lag gauge\npaceline_max_lag 3.0\n"
    ) in expose(live)
    assert "| `max_lag` | max lag | count |" in render_docs()

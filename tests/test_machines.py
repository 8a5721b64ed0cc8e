"""Machines in reports: what counts as one, when training was, and what all of them add up to."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.report.document import make_content
from paceline.report.html import render_report
from paceline.report.machine_series import METRICS, add_up, read_machines
from paceline.report.machines import CLUSTER, draw_machines, make_machine_table
from paceline.report.runs import load_runs, split_tasks
from paceline.telemetry import events as ev
from paceline.telemetry.proc_stats import host_metrics_between, network_namespace, read_machine
from paceline.telemetry.reader import read_run
from paceline.telemetry.run_folder import EventWriter, RunFolder, write_json
from paceline.telemetry.steps import merge_metrics

RESULT = {"status": "done", "strategy": "ps", "model": "m", "data": "d", "seed": 0, "batch": 50,
          "samples_per_s": 1000.0, "seconds": 20.0}  # fmt: skip


def make_window(t: float, **facts: Any) -> ev.HostMetrics:
    plain = {"host": "vm", "namespace": 1, "dt": 1.0, "cpu_user": 1.0, "cpu_system": 0.5,
             "cpu_idle": 2.5, "memory_used": 2_000_000_000, "memory_total": 8_000_000_000,
             "load": 1.5, "net_in": 3_000_000}  # fmt: skip
    return ev.HostMetrics(t=t, **{**plain, **facts})


def write_run(path: Path) -> RunFolder:
    """Two machines of one host name, in their own networks, and the coordinator's machine."""
    folder = RunFolder(path)
    folder.prepare(force=True, resume=False)
    write_json(folder.config, {"workers": 2, "servers": 0, "job": {}})
    write_json(folder.result, RESULT)
    run = EventWriter(folder.events("run"))
    run.write(ev.StrategyStarted(t=5.0, strategy="ps", samples=0, lr="x1"))
    run.write(ev.EpochEnded(t=15.0, row=ev.EpochRow(epoch=1)))
    for t in range(1, 20):
        run.write(make_window(float(t), namespace=9))
    for number in (0, 1):
        log = EventWriter(folder.events(f"worker-{number}"))
        start = ev.WorkerStarted(
            t=0.1, worker=number, host="vm", pid=1, threads=1, namespace=number + 1
        )
        log.write(start)
        for t in range(1, 20):
            busy = {"cpu_user": 3.0, "cpu_idle": 0.5} if 5 < t < 15 else {}
            log.write(make_window(float(t), namespace=number + 1, **busy))
        log.write(make_window(19.01, dt=0.01, namespace=number + 1, net_in=9_000_000))
    return folder


def test_a_machine_is_a_host_in_a_network(tmp_path: Path) -> None:
    cluster = read_machines(read_run(write_run(tmp_path / "run").path))
    assert [(m.name, m.trains) for m in cluster.machines] == [
        ("vm, worker-0", True),
        ("vm, worker-1", True),
        ("vm, coordinator", False),
    ]
    assert (cluster.from_s, cluster.to_s) == (5.0, 15.0)
    assert all(5.5 <= w.t <= 15.5 for w in cluster.machines[0].between(5.0, 15.0))


def test_a_cluster_has_mean_percentages_and_summed_amounts(tmp_path: Path) -> None:
    cluster = read_machines(read_run(write_run(tmp_path / "run").path))
    by_title = {metric.title: metric for metric in METRICS}
    assert max(add_up(by_title["CPU user, %"], cluster)) == pytest.approx(75.0)
    assert max(add_up(by_title["CPU busy, %"], cluster)) == pytest.approx(87.5)
    assert set(add_up(by_title["network in, MB/s"], cluster)) == {6.0}
    assert set(add_up(by_title["memory used, GB"], cluster)) == {4.0}


def test_tables_and_charts_show_every_machine(tmp_path: Path) -> None:
    runs = load_runs([write_run(tmp_path / "run").path])
    (task,) = split_tasks(runs)
    table = make_machine_table(task)
    rows = {(row[1], row[2]): row[3:] for row in table.rows}
    assert rows["vm, worker-0", "CPU user, %"] == pytest.approx([25.0, 70.0, 75.0], abs=0.1)
    # Short windows at the end of a process are not a peak.
    assert rows["vm, worker-0", "network in, MB/s"] == [3.0, 3.0, 3.0]
    assert rows[CLUSTER, "load"] == [3.0, 3.0, 3.0]
    assert not any("disk" in metric for _, metric in rows)
    lines = list(csv.reader(io.StringIO(table.to_csv())))
    assert lines[0] == ["strategy", "machine", "metric", "min", "mean", "max"]
    figures = {name: figure for name, _, figure in draw_machines(task)}
    assert set(figures) == {"machines-cpu", "machines-load", "machines-memory", "machines-network"}
    assert len(figures["machines-cpu"]["data"]) == 3
    content = make_content(runs, title="t")
    assert {"machines", "runs"} <= set(content.sheets)
    page = render_report(content)
    assert "Machines over time" in page
    assert json.dumps("vm, worker-1")[1:-1] in page


def test_steps_are_milliseconds_of_a_global_batch(tmp_path: Path) -> None:
    (task,) = split_tasks(load_runs([write_run(tmp_path / "run").path]))
    assert task.entries[0]["step_ms"]["mean"] == pytest.approx(50.0)


def test_this_machine_is_read() -> None:
    first = read_machine(1.0)
    between = host_metrics_between(first, read_machine(2.0))
    assert between.namespace == network_namespace() > 0
    assert between.load >= 0
    assert 0 < between.memory_cached < between.memory_total
    assert between.swap_used >= 0
    merged = merge_metrics([between, between])
    assert (merged.load, merged.namespace) == (between.load, between.namespace)
    assert merged.dt == pytest.approx(2 * between.dt)

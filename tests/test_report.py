"""Progress, comparison, tables and the HTML report, over folders written as a run writes them."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import paceline.report as report_package
from paceline.errors import UsageError
from paceline.report.charts import draw_curves, draw_phases, draw_staleness
from paceline.report.comparison import compare_results, write_comparison
from paceline.report.findings import list_findings
from paceline.report.progress import Progress
from paceline.report.runs import ReportRun, load_runs, make_task, normalise_phases
from paceline.report.stats import mean_and_std, student_t_tail, welch_test
from paceline.report.study_tables import make_summary_table, results_table
from paceline.report.writer import write_report as write_report_files
from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import EventWriter, RunFolder, write_json

HOSTILE = 'ps"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>&amp;[bold]'
SAMPLES_PER_EPOCH = 1440


def make_result(strategy: str = "allreduce", *, seed: int = 0, **given: Any) -> dict[str, Any]:
    """A result with every field of the contract; time and accuracy vary by seed."""
    epochs, pace_s = given.pop("epochs", 8), given.pop("pace_s", 2.0) * (1 + 0.02 * seed)
    workers = given.pop("workers", 3)
    history = [
        {
            "epoch": e,
            "seconds": 1.5 + pace_s * e,
            "samples": SAMPLES_PER_EPOCH * e,
            "updates": 45 * e,
            "lr": 0.1 * 0.9**e,
            "train_loss": 2.3 * math.exp(-0.5 * e) + 0.01 * seed,
            "train_acc": 1 - 0.85 * math.exp(-0.65 * e),
            "val_loss": 2.3 * math.exp(-0.45 * e) + 0.05,
            "val_acc": 1 - 0.9 * math.exp(-0.6 * e) - 0.02 - 0.003 * seed,
        }
        for e in range(1, epochs + 1)
    ]
    asynchronous = "ps" in strategy
    switches = []
    if strategy.startswith("switch"):
        switches = [
            {
                "samples": SAMPLES_PER_EPOCH * epochs // 2,
                "from": "allreduce",
                "to": "ps",
                "pause_s": 0.21,
                "drain_s": 0.04,
                "reason": "half of the samples seen (at=50%)",
            }
        ]
    last = history[-1]
    phases = {
        f"worker-{k}": {
            "startup": 1.1,
            "input": 0.3,
            "forward": 0.25 * pace_s * epochs * (1 + 0.4 * k) / 2,
            "backward": 0.45 * pace_s * epochs * (1 + 0.4 * k) / 2,
            "comm_exposed": 0.9,
            "optimizer": 0.4,
            "wait": 0.2 if asynchronous else 0.3 * pace_s * epochs * (2 - k) / 2,
            "eval": 0.6,
            "switch": 0.25 if switches else 0.0,
            "other": 0.15,
        }
        for k in range(workers)
    }
    result = {
        "status": "done",
        "error": None,
        "strategy": strategy,
        "model": "mlp",
        "data": "digits",
        "workers": workers,
        "servers": 1 if asynchronous else 0,
        "seed": seed,
        "epochs": epochs,
        "samples": last["samples"],
        "updates": last["updates"],
        "seconds": last["seconds"] + 0.7,
        "samples_per_s": SAMPLES_PER_EPOCH / pace_s,
        **{k: last[k] for k in ("train_loss", "train_acc", "val_loss", "val_acc")},
        "test_loss": 0.12,
        "test_acc": 0.96 - 0.004 * seed,
        "stages": {"start": 1.1, "read": 0.2, "prepare": 0.2, "train": pace_s * epochs,
                   "evaluate": 0.6, "save": 0.1},
        "history": history,
        "switches": switches,
        "staleness": {"mean": 1.6, "max": 4, "histogram": {"0": 60, "1": 110, "2": 130, "4": 60}}
        if asynchronous
        else {"mean": 0.0, "max": 0, "histogram": {"0": 360}},
        "lag": {"max": 2},
        "phases": phases,
        "bytes_sent": 123_456_789,
        "peak_rss_bytes": 312_000_000,
        "virtual": False,
        "versions": {"paceline": "0.1.0", "torch": "2.8.0", "python": "3.11.9"},
    }  # fmt: skip
    return result | given


def write_run(path: Path, result: dict[str, Any], *, with_result: bool = True) -> Path:
    """A run folder as a run leaves it: run.json, events of coordinator and workers, result.json."""
    folder = RunFolder(path)
    folder.prepare(force=False, resume=False)
    write_json(
        folder.config,
        {
            k: result[k]
            for k in ("strategy", "model", "data", "workers", "seed", "epochs", "versions")
        }
        | {"batch": 32, "optimizer": "sgd(lr=0.1, momentum=0.9)"},
    )
    run = EventWriter(folder.events("run"))
    run.write(
        ev.RunStarted(t=0.0, strategy=result["strategy"], workers=result["workers"], servers=0)
    )
    run.write(ev.StrategyStarted(t=1.0, strategy=result["strategy"], samples=0, lr="0.1"))
    for row in result["history"]:
        for switch in result["switches"]:
            if row["samples"] - SAMPLES_PER_EPOCH < switch["samples"] <= row["samples"]:
                run.write(
                    ev.StrategySwitched(
                        t=row["seconds"] + 0.3, row=ev.from_plain(ev.SwitchRow, switch)
                    )
                )
        run.write(
            ev.RunProgress(
                t=row["seconds"] - 0.5,
                epoch=row["epoch"],
                samples=row["samples"] - 100,
                updates=row["updates"] - 3,
                loss=row["train_loss"],
            )
        )
        run.write(ev.EpochEnded(t=row["seconds"], row=ev.from_plain(ev.EpochRow, row)))
    run.write(ev.RunEnded(t=result["seconds"], status=result["status"], error=result["error"]))
    run.close()
    for k in range(result["workers"]):
        worker = EventWriter(folder.events(f"worker-{k}"))
        worker.write(ev.WorkerStarted(t=0.9, worker=k, host="localhost", pid=100 + k, threads=1))
        worker.write(
            ev.StepWindow(
                t=3.0,
                first_step=0,
                epoch=[1, 1],
                lo=[0, 32],
                hi=[32, 64],
                loss=[2.3, 2.2],
                staleness=[0, 1],
                input=[900, 800],
                forward=[400_000, 500_000],
                backward=[800_000, 700_000],
                comm_exposed=[100, 120],
                optimizer=[90, 80],
                wait=[0, 5],
            )
        )
        worker.write(
            ev.WorkerEnded(
                t=result["seconds"],
                phases=result["phases"].get(f"worker-{k}", {}),
                bytes_sent=1000,
                peak_rss_bytes=2000,
            )
        )
        worker.close()
    if with_result:
        write_json(folder.result, result)
    return path


STRATEGIES = {"allreduce": 2.4, "ps": 1.5, "switch(allreduce, ps, at=50%)": 1.9}


def write_matrix(root: Path, *, seeds: int) -> list[Path]:
    paths = []
    for number, (strategy, pace_s) in enumerate(STRATEGIES.items()):
        for seed in range(seeds):
            name = f"{number}-{strategy.split('(')[0]}-seed{seed}"
            result = make_result(strategy, seed=seed, pace_s=pace_s)
            paths.append(write_run(root / name, result))
    return paths


def label_runs(results: list[dict[str, Any]]) -> list[ReportRun]:
    return [ReportRun(name=str(i), result=r, label=r["strategy"]) for i, r in enumerate(results)]


def write_report(folders: list[Path], out: Path, *, title: str) -> Path:
    (path,) = write_report_files(folders, out, title=title)
    return path


def read_page(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """The page without its scripts, and the figures in it."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"const figures = (.*?);\n", text)
    figures = json.loads(found.group(1)) if found else []
    return re.sub(r"<script>.*?</script>", "", text, flags=re.S), figures


class Loads(HTMLParser):
    """Collects everything in a page that could load or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts = 0
        self.handlers: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        self.loads += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]


# ---- comparison


def test_comparison_measures_known_values() -> None:
    results = [
        make_result("a", seed=s, seconds=seconds, test_acc=acc)
        for s, (seconds, acc) in enumerate([(10.0, 0.90), (12.0, 0.92), (14.0, 0.94)])
    ]
    results += [make_result("b", seed=0, seconds=6.0), make_result("b", seed=1, seconds=6.0)]
    comparison = compare_results(results)
    a, b = comparison["strategies"]
    assert [a["strategy"], b["strategy"]] == ["a", "b"]
    assert a["seconds"] == {"mean": 12.0, "std": 2.0, "min": 10.0, "max": 14.0, "n": 3}
    assert a["test_acc"]["mean"] == pytest.approx(0.92)
    assert a["test_acc"]["std"] == pytest.approx(0.02)
    assert a["seconds_over_first_strategy_seconds"] == 1.0
    assert b["seconds_over_first_strategy_seconds"] == 0.5
    assert b["seconds_minus_first_strategy_seconds"] == -6.0
    assert b["first_strategy_seconds"] == 12.0
    assert b["seconds"]["std"] == 0.0
    assert [run["seed"] for run in a["runs"]] == [0, 1, 2]


def test_one_seed_has_no_spread() -> None:
    assert mean_and_std([3.0]) == {"mean": 3.0, "std": None, "min": 3.0, "max": 3.0, "n": 1}
    assert mean_and_std([None, math.nan, math.inf, "x", True])["n"] == 0


def test_failures_are_kept_and_counted_but_not_averaged(tmp_path: Path) -> None:
    results = [
        make_result("ps", seed=0, seconds=10.0, dir="runs/0"),
        make_result(
            "ps", seed=1, seconds=1.0, status="failed", error="worker 2 died", dir="runs/1"
        ),
        make_result("ps", seed=2, seconds=2.0, status="diverged", train_loss=math.nan),
    ]
    comparison = write_comparison(tmp_path / "comparison.json", results)
    entry = comparison["strategies"][0]
    assert (entry["runs_total"], entry["runs_done"], entry["runs_failed"]) == (3, 1, 2)
    assert comparison["runs_failed"] == 2
    assert entry["seconds"]["mean"] == 10.0
    assert [run["status"] for run in entry["runs"]] == ["done", "failed", "diverged"]
    assert entry["runs"][1]["error"] == "worker 2 died"
    text = (tmp_path / "comparison.json").read_text()
    assert json.loads(text) == comparison
    assert "NaN" not in text


def test_order_is_as_given_and_first_may_have_failed() -> None:
    results = [make_result("z", status="failed", seconds=None), make_result("a")]
    comparison = compare_results(results)
    assert [entry["label"] for entry in comparison["strategies"]] == ["z", "a"]
    assert comparison["strategies"][1]["seconds_over_first_strategy_seconds"] is None
    assert compare_results([])["strategies"] == []


def test_runs_that_differ_in_workers_are_not_averaged_together() -> None:
    comparison = compare_results([make_result(workers=2), make_result(workers=4)])
    labels = [entry["label"] for entry in comparison["strategies"]]
    assert labels == ["allreduce [2 workers]", "allreduce [4 workers]"]


# ---- statistics


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [(12.706, 1, 0.025), (4.303, 2, 0.025), (2.776, 4, 0.025), (2.042, 30, 0.025), (0.0, 7, 0.5)],
)
def test_t_tail_matches_the_tables(t: float, freedom: float, tail: float) -> None:
    assert student_t_tail(t, freedom) == pytest.approx(tail, abs=1e-4)


def test_difference_is_claimed_only_beyond_the_spread() -> None:
    far = mean_and_std([10.0, 10.1, 9.9]), mean_and_std([20.0, 20.2, 19.8])
    near = mean_and_std([10.0, 12.0, 14.0]), mean_and_std([11.0, 13.0, 15.0])
    assert welch_test(*far)[2] is True
    difference, _, sure = welch_test(*near)
    assert difference == pytest.approx(-1.0)
    assert sure is False
    assert welch_test(mean_and_std([1.0]), far[1])[2] is None


# ---- findings


def test_findings_claim_nothing_with_one_seed() -> None:
    results = [make_result("allreduce", pace_s=2.4), make_result("ps", pace_s=1.0, test_acc=0.99)]
    text = " ".join(list_findings(make_task("", label_runs(results))))
    assert "one seed" in text
    assert "significance is unknown" in text
    assert "faster" not in text
    assert "higher" not in text


def test_findings_with_seeds_claim_what_the_spread_allows() -> None:
    results = [
        make_result(name, seed=s, pace_s=pace_s)
        for name, pace_s in (("allreduce", 4.0), ("ps", 1.5))
        for s in range(3)
    ]
    text = " ".join(list_findings(make_task("", label_runs(results))))
    assert "ps was faster than allreduce" in text
    assert "does not differ significantly" in text  # the same accuracies for both
    assert "Idle time of the workers" in text


def test_findings_say_when_the_work_was_not_equal() -> None:
    results = [make_result("a", epochs=4), make_result("b", epochs=8, virtual=True)]
    text = " ".join(list_findings(make_task("", label_runs(results))))
    assert "different numbers of samples" in text
    assert "simulated" in text


# ---- tables


def test_table_and_markdown_show_every_strategy() -> None:
    results = [make_result(s, seed=k, pace_s=p) for s, p in STRATEGIES.items() for k in range(2)]
    results.append(make_result("codec[bold]x[/bold]|y", status="failed", error="no"))
    console = Console(file=io.StringIO(), width=200)
    console.print(results_table(compare_results(results), width=200))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "switch(allreduce, ps, at=50%)" in shown
    assert "codec[bold]x[/bold]|y" in shown
    assert "±" in shown
    assert "0 of 1" in shown
    markdown = make_summary_table(compare_results(results)).to_markdown()
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_table_fits_its_terminal_with_numbers_whole(width: int) -> None:
    results = [make_result(s, seed=k, pace_s=p) for s, p in STRATEGIES.items() for k in range(2)]
    out = io.StringIO()
    Console(file=out, width=width).print(results_table(compare_results(results), width=width))
    shown = out.getvalue()
    for cell in ("95.80 ± 0.28%", "21.6 ± 0.3 s", "0.210 s"):
        assert cell in shown
    assert ("Hidden columns (terminal too narrow): updates" in shown) == (width < 120)


# ---- charts


def test_figures_are_valid_plotly() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    runs = label_runs([make_result(s, seed=k) for s in STRATEGIES for k in range(2)])
    figures = [
        draw_curves(runs, measure, against=against)
        for measure in ("val_acc", "train_loss")
        for against in ("epochs", "seconds")
    ]
    figures += [draw_staleness(runs), *(figure for _, _, figure in draw_phases(runs))]
    for figure in figures:
        assert figure is not None
        graph_objects.Figure(figure)  # raises for a property that Plotly does not know


def test_switches_are_marked_where_they_happened() -> None:
    run = label_runs([make_result("switch(allreduce, ps, at=50%)")])
    by_epoch = draw_curves(run, "val_acc", against="epochs")
    assert by_epoch is not None
    assert [shape["x0"] for shape in by_epoch["layout"]["shapes"]] == [4.0]
    assert "allreduce → ps" in by_epoch["layout"]["annotations"][0]["text"]
    run[0].switch_times_s = {4 * SAMPLES_PER_EPOCH: 9.75}
    by_time = draw_curves(run, "val_acc", against="seconds")
    assert by_time is not None
    assert [shape["x0"] for shape in by_time["layout"]["shapes"]] == [9.75]


def test_phases_are_read_in_every_form() -> None:
    phases = {"forward": 1.0, "wait": 2.0}
    assert normalise_phases({"worker-0": phases}) == {"worker-0": phases}
    assert normalise_phases([phases, phases]) == {"worker-0": phases, "worker-1": phases}
    assert normalise_phases({"0": phases}) == {"worker-0": phases}
    assert normalise_phases(phases) == {"all workers": phases}
    assert normalise_phases(None) == {}


# ---- report


def test_report_of_many_runs_has_every_part(tmp_path: Path) -> None:
    write_matrix(tmp_path / "compare", seeds=2)
    out = write_report([tmp_path / "compare"], tmp_path / "out" / "report.html", title="Three ways")
    body, figures = read_page(out)
    for heading in ("Summary", "Findings", "Accuracy and loss", "Time categories", "Staleness",
                    "Switches", "Stages", "Runs", "Configuration and versions"):  # fmt: skip
        assert f"<h2>{heading}</h2>" in body
    assert len(figures) == 8 + 1 + 3 + 1
    assert all(len(figure["layout"]["shapes"]) == 2 for figure in figures[:4])
    assert "half of the samples seen (at=50%)" in body
    assert "2.8.0" in body
    assert "sgd(lr=0.1, momentum=0.9)" in body
    assert str(tmp_path) not in body
    assert out.read_text(encoding="utf-8").count("plotly.js v") == 1


def test_report_loads_nothing(tmp_path: Path) -> None:
    out = write_report(
        [write_run(tmp_path / "run", make_result("ps"))], tmp_path / "r.html", title="One"
    )
    loads = Loads()
    loads.feed(out.read_text(encoding="utf-8"))
    assert loads.loads == []
    assert not loads.tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert "default-src &#x27;none&#x27;" in out.read_text(encoding="utf-8")


def test_report_escapes_hostile_text(tmp_path: Path) -> None:
    done = make_result(HOSTILE, model=HOSTILE)
    done["switches"] = [{"samples": 5000, "from": HOSTILE, "to": HOSTILE, "pause_s": 0.1,
                         "drain_s": 0.1, "reason": HOSTILE}]  # fmt: skip
    done["versions"] = {HOSTILE: HOSTILE}
    failed = make_result(HOSTILE, seed=1, status="failed", error=f"worker 1: {HOSTILE}")
    paths = [write_run(tmp_path / "a", done), write_run(tmp_path / "b", failed)]
    out = write_report(paths, tmp_path / "r.html", title=HOSTILE)
    text = out.read_text(encoding="utf-8")
    loads = Loads()
    loads.feed(text)
    assert loads.scripts == 2
    assert loads.handlers == []
    assert loads.loads == ["#task-0", "#task-1"]  # Places in the page itself.
    assert "<script>alert" not in text
    _, figures = read_page(out)
    names = [trace["name"] for figure in figures for trace in figure["data"]]
    assert not any("<" in name for name in names)


def test_failed_run_shows_its_error(tmp_path: Path) -> None:
    failed = make_result("ps", status="failed", error="worker-2 died at step 41: out of memory")
    failed |= {"test_acc": None, "history": [], "phases": {}, "staleness": None, "switches": None}
    out = write_report([write_run(tmp_path / "x", failed)], tmp_path / "r.html", title="Failed")
    body, _ = read_page(out)
    assert "worker-2 died at step 41: out of memory" in body
    assert "ended as failed" in body
    assert "there are no curves" in body


def test_virtual_runs_are_marked(tmp_path: Path) -> None:
    path = write_run(tmp_path / "x", make_result("ps", virtual=True))
    body, _ = read_page(write_report([path], tmp_path / "r.html", title="Twin"))
    assert '<span class="badge">virtual time</span>' in body
    assert "done, virtual" in body


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.6, 0.85, 0.99])
def test_cut_off_events_still_give_a_report(tmp_path: Path, share: float) -> None:
    path = write_run(tmp_path / "cut", make_result("ps"), with_result=False)
    for events in (path / "events").iterdir():
        text = events.read_bytes()
        events.write_bytes(text[: int(len(text) * share)])
    body, figures = read_page(write_report([path], tmp_path / "r.html", title="Cut"))
    assert "result.json is missing" in body
    assert "is unfinished" in body
    assert "events/run.jsonl " in body  # truncated, or empty
    assert "has no totals" in body or "events/worker-0.jsonl is missing or empty" in body
    assert "1 of 1 run of ps did not finish" in body
    assert bool(figures) == (share >= 0.35)


@pytest.mark.parametrize("name", ["result.json", "run.json"])
@pytest.mark.parametrize("kept_bytes", [0, 1, 40, 300])
def test_cut_off_json_still_gives_a_report(tmp_path: Path, name: str, kept_bytes: int) -> None:
    path = write_run(tmp_path / "cut", make_result("allreduce"))
    text = (path / name).read_bytes()
    (path / name).write_bytes(text[: min(kept_bytes, len(text) - 3)])
    body, figures = read_page(write_report([path], tmp_path / "r.html", title="Cut"))
    assert f"{name} is truncated or not valid JSON" in body
    assert len(figures) >= 5


def test_whole_run_reports_nothing_missing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "whole", make_result())
    assert load_runs([path])[0].missing == []
    body, _ = read_page(write_report([path], tmp_path / "r.html", title="Whole"))
    assert 'class="problem">The charts' in body
    assert body.count('class="problem"') == 1


def test_a_folder_without_runs_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no run"):
        write_report([tmp_path], tmp_path / "r.html", title="Nothing")
    with pytest.raises(UsageError, match="contains no run"):
        write_report([tmp_path / "absent"], tmp_path / "r.html", title="Nothing")


# ---- progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_progress(console: Console, *, quiet: bool = False) -> None:
    clock = Clock()
    progress = Progress("ps [seed 0]\x1b[31m", quiet=quiet, console=console, clock=clock)
    progress.set_totals(2, 1000)
    for second in range(20):
        clock.now = second
        progress.update(
            epoch=1 + second // 10, samples=100 * second, loss=1.5,
            strategy="allreduce", samples_per_s=100.0,
        )  # fmt: skip
        if second % 10 == 9:
            row = make_result(epochs=2)["history"][second // 10]
            progress.epoch_row(ev.from_plain(ev.EpochRow, row))
    progress.print_line("switch allreduce -> ps,\npause 0.2 s")
    progress.close()
    progress.close()


def test_progress_without_a_terminal_is_plain_and_sparse() -> None:
    out = io.StringIO()
    run_progress(Console(file=out, force_terminal=False, width=60))
    text = out.getvalue()
    lines = text.splitlines()
    assert all(c == "\n" or c.isprintable() for c in text)
    assert len(lines) == 3 + 2 + 1  # at 5, 10 and 15 s; two epochs; the note
    assert all(line.startswith("ps [seed 0]") for line in lines)
    assert "5 s left" in lines[-3]
    assert "val acc" in lines[1]
    assert lines[-1].endswith("switch allreduce -> ps, pause 0.2 s")


def test_progress_on_a_terminal_keeps_one_live_line() -> None:
    out = io.StringIO()
    run_progress(Console(file=out, force_terminal=True, width=150, _environ={"TERM": "xterm"}))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()[-1]
    for part in ("epoch 2/2", "100 samples/s", "loss 1.5", "val acc", "1 s left", "allreduce"):
        assert part in last


def test_quiet_progress_says_nothing() -> None:
    for terminal in (False, True):
        out = io.StringIO()
        run_progress(Console(file=out, force_terminal=terminal), quiet=True)
        assert out.getvalue() == ""


def test_progress_survives_figures_that_are_none() -> None:
    out = io.StringIO()
    clock = Clock()
    progress = Progress("x", console=Console(file=out, force_terminal=False), clock=clock)
    clock.now = 6.0
    progress.update(epoch=1, samples=0, loss=math.nan, samples_per_s=math.nan)
    progress.epoch_row(ev.EpochRow(epoch=1, val_acc=None, train_loss=math.nan))
    progress.close()
    assert len(out.getvalue().splitlines()) == 2


def test_progress_after_the_last_epoch_repeats_its_last_figures() -> None:
    out = io.StringIO()
    clock = Clock()
    progress = Progress("x", console=Console(file=out, force_terminal=False), clock=clock)
    progress.show(ev.RunLengthKnown(t=0.0, epochs=2, samples_per_epoch=100))
    progress.show(ev.RunProgress(t=1.0, epoch=1, samples=150, updates=3, loss=0.5))
    clock.now = 6.0
    progress.show(ev.RunProgress(t=2.0, epoch=2, samples=200, updates=4, loss=None))
    assert out.getvalue() == "x: epoch 2/2, 50 samples/s, loss 0.5, 0 s left\n"
    progress.close()


def test_time_left_follows_the_recent_rate() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=False)
    progress = Progress("x", epochs=1, samples_total=10_000, console=console, clock=clock)
    assert progress.estimate_left_s() is None
    for second in range(100):
        clock.now = second
        progress.update(samples=second * 10 if second < 50 else 500 + (second - 50) * 100)
    assert progress.estimate_left_s() == pytest.approx((10_000 - 5400) / 100)


def test_progress_forced_to_colour_stays_plain_without_a_terminal() -> None:
    code = (
        "from paceline.report.progress import Progress\n"
        "p = Progress('x', epochs=1, samples_total=10)\n"
        "p.update(epoch=1, samples=5, loss=1.0)\np.print_line('hello')\np.close()\n"
    )
    done = run_python(code, FORCE_COLOR="1")
    assert done.stderr == "x: hello\n"


# ---- imports


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(report_package.__file__).parents[2])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_report_never_imports_torch() -> None:
    modules = sorted(p.stem for p in Path(report_package.__file__).parent.glob("*.py"))
    names = ", ".join(f"paceline.report.{m}" for m in modules if m != "__init__")
    run_python(f"import sys, {names}\nassert 'torch' not in sys.modules")

"""Events and their parser: every line parses back into the type that wrote it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.telemetry.events import (
    EVENT_TYPES,
    EpochEnded,
    EpochRow,
    Event,
    ProcessMetrics,
    RunProgress,
    StepWindow,
    StrategySwitched,
    SwitchRow,
    parse_event,
)
from paceline.telemetry.reader import RunReader, RunRecord
from paceline.telemetry.verdicts import RULES, Verdict, verdict_rule, verdicts

GOLDEN = Path(__file__).parent / "golden" / "runs"
LINES = [
    line
    for path in sorted(GOLDEN.glob("*/events/*.jsonl"))
    for line in path.read_text().splitlines()
]

NEWER_FIELDS = {"namespace", "load", "memory_cached", "swap_used"}
"""Fields that the golden folders do not have."""


def test_golden_events_parse_and_serialize_to_the_same_bytes() -> None:
    assert len(LINES) > 300
    for line in LINES:
        event = parse_event(json.loads(line))
        assert event is not None, line
        known = {k: v for k, v in event.to_plain().items() if k not in NEWER_FIELDS}
        assert json.dumps(known, separators=(",", ":")) == line


def test_kinds_are_a_file_format() -> None:
    assert sorted(EVENT_TYPES) == [
        "checkpoint", "decision", "ended", "epoch", "fault", "input", "machine", "phase",
        "profile", "progress", "server", "server_ended", "started", "steps", "steps_sum",
        "switch", "totals", "verdict", "view", "vitals", "worker", "worker_ended",
    ]  # fmt: skip


def test_missing_fields_take_defaults_and_unknown_ones_are_ignored() -> None:
    event = parse_event({"kind": "vitals", "t": 1, "dt": 0.5, "invented": [1]})
    assert event == ProcessMetrics(t=1, dt=0.5)
    row = {"samples": 3, "from": "allreduce", "to": "ps", "later": 1}
    switched = parse_event({"kind": "switch", "t": 1.0, "row": row})
    assert isinstance(switched, StrategySwitched)
    assert switched.row == SwitchRow(samples=3, before="allreduce", after="ps")
    assert switched.row.to_plain()["from"] == "allreduce"


@pytest.mark.parametrize(
    "plain",
    [
        None,
        7,
        [],
        {},
        {"kind": []},
        {"kind": "future", "t": 1.0},
        {"kind": "progress"},
        {"kind": "progress", "t": 1.0, "epoch": "one", "samples": 1, "updates": 1, "loss": 1},
        {"kind": "progress", "t": 1.0, "epoch": True, "samples": 1, "updates": 1, "loss": 1},
        {"kind": "progress", "t": float("nan"), "epoch": 1, "samples": 1, "updates": 1, "loss": 1},
        {"kind": "epoch", "t": 1.0, "row": 3},
        {"kind": "epoch", "t": 1.0, "row": {"epoch": 1.5}},
        {"kind": "vitals", "t": 1.0, "dt": 1.0, "phases": 7},
        {"kind": "steps", "t": 1.0, "first_step": 0, "staleness": ["a"]},
        {"kind": "machine", "t": 1.0, "dt": 1.0, "host": "h", "gpus": [3]},
    ],
)
def test_malformed_events_are_refused(plain: object) -> None:
    assert parse_event(plain) is None


@given(line=st.sampled_from(LINES), data=st.data())
@settings(max_examples=300)
def test_no_value_makes_the_parser_raise(line: str, data: st.DataObject) -> None:
    plain = json.loads(line)
    name = data.draw(st.sampled_from(sorted(plain)))
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    plain[name] = data.draw(junk | st.lists(junk, max_size=2) | st.dictionaries(st.text(), junk))
    event = parse_event(plain)
    assert event is None or isinstance(event, Event)


def test_a_reader_skips_types_unparsed(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    window, end = StepWindow(t=1.0, first_step=0), EpochEnded(t=2.0, row=EpochRow(epoch=1))
    path = tmp_path / "events" / "run.jsonl"
    path.write_text(f"{window.to_line()}\n{end.to_line()}\n")
    assert list(RunReader(tmp_path).poll()) == [("run", window), ("run", end)]
    assert list(RunReader(tmp_path, skip={StepWindow}).poll()) == [("run", end)]
    assert list(RunReader(tmp_path, processes=("worker-0",)).poll()) == []


def test_a_reader_follows_a_run_that_starts_later(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert list(reader.poll()) == []
    (tmp_path / "events").mkdir()
    progress = RunProgress(t=1.0, epoch=0, samples=1, updates=1, loss=None)
    (tmp_path / "events" / "run.jsonl").write_text(progress.to_line() + "\n")
    assert list(reader.poll()) == [("run", progress)]
    assert list(reader.poll()) == []


def test_a_new_verdict_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_verdicts import make_run

    monkeypatch.setattr("paceline.telemetry.verdicts.RULES", list(RULES))

    @verdict_rule
    def judge_small_memory(window: Any, found: list[Verdict]) -> list[Verdict]:
        """A toy rule."""
        return [
            Verdict(rule="toy", who=worker.who, text="toy", suggestion="none", share=0.1)
            for worker in window.workers
        ]

    run: RunRecord = make_run()
    assert [v.key for v in verdicts(run)] == [("toy", "worker-0"), ("toy", "worker-1")]


def test_rows_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EpochRow(epoch=1).epoch = 2  # type: ignore[misc]


def test_only_the_parser_tests_kinds() -> None:
    source = Path(__file__).parents[1] / "src" / "paceline"
    pattern = re.compile(r"""(\["kind"\]|get\("kind"\)|event\.kind)\s*(==|!=|in\b|not in\b)""")
    for package in ("telemetry", "report", "dashboard", "launch", "twin"):
        for path in (source / package).rglob("*.py"):
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert found is None, f"{path.relative_to(source)}: {found}; dispatch on event types"

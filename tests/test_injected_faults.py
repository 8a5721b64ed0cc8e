"""Injected faults (--fault): their text form, and their effect on simulated runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RunCli, read_events, read_result
from paceline.errors import SpecError
from paceline.specs.fault import InjectedFault, parse_fault
from paceline.specs.point import RunPoint


def test_text_form() -> None:
    assert parse_fault("kill worker=1 at=30%", 2, 0) == InjectedFault(
        "kill", "worker", 1, RunPoint(fraction=0.3), None, 1.0, "kill worker=1 at=30%"
    )
    found = parse_fault("slow, coordinator, at=epoch(2), factor=3, for=500ms", 2, 0)
    assert (found.process, found.factor, found.for_s) == ("coordinator", 3.0, 0.5)
    assert found.at == RunPoint(epoch=2)
    assert parse_fault("stop server=1 at=samples(40) for=2min", 1, 2).for_s == 120.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil worker=1 at=30%", "did you mean 'kill'"),
        ("", "begins with the kind of fault"),
        ("kill worker=2 at=30%", "worker must be 0 to 1, got 2"),
        ("kill server=0 at=30%", "the strategy has no servers"),
        ("kill worker=1", "at=... are required"),
        ("kill worker=1 coordinator at=30%", "one of worker=K, server=K and coordinator"),
        ("kill worker=1 at=30% for=3s", "unknown 'for' for kill"),
        ("stop worker=1 at=30% for=soon", "for=soon is not a duration"),
        ("slow worker=1 at=30%", "factor=... between 1 and 1000 is required"),
        ("slow worker=1 at=30% factor=1", "is required, got 1"),
        ("cut coordinator=1 at=30%", "'coordinator' takes no value"),
        ("cut worker at=30%", "'worker' has no value"),
        ("cut worker=0 at=often", "is not a point of a run"),
    ],
)
def test_bad_text_is_one_line(text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_fault(text, 2, 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_simulated_faults(run_cli: RunCli, tmp_path: Path) -> None:
    options = ("twin", "--cluster", 3, "--epochs", 4, "--depth", "cost", "--quiet", "--force")
    seconds = {}
    for name, faults in (
        ("none", ()),
        ("stop", ("--fault", "stop worker=1 at=50% for=7s")),
        ("slow", ("--fault", "slow worker=1 at=50% factor=3")),
    ):
        finished = run_cli(*options, *faults, "--out", tmp_path / name)
        assert finished.code == 0, finished.stderr
        texts = [e["text"] for e in read_events(tmp_path / name, "run") if e["kind"] == "fault"]
        assert texts == list(faults[1:])
        seconds[name] = read_result(tmp_path / name)["seconds"]
    assert seconds["stop"] - seconds["none"] == pytest.approx(7.0, abs=0.2)
    assert 1.2 * seconds["none"] < seconds["slow"] < 3 * seconds["none"]
    finished = run_cli(*options, "--fault", "kill worker=2 at=25%", "--out", tmp_path / "kill")
    assert finished.code == 1
    assert "worker 2 was killed (injected: --fault 'kill worker=2 at=25%')" in finished.last_line
    finished = run_cli(*options, "--fault", "stop coordinator at=25%", "--out", tmp_path / "bad")
    assert (finished.code, "stops and slows only workers" in finished.last_line) == (2, True)

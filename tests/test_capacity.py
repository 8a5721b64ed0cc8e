"""A run with more processes than this machine can have is rejected before anything starts."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from conftest import RunCli
from paceline.errors import UsageError
from paceline.launch import capacity
from paceline.launch.capacity import check_capacity, free_threads


def test_too_many_workers_are_refused(run_cli: RunCli, tmp_path: Path) -> None:
    for command in (
        ("train", "--batch", 90_000, "--workers", 90_000),
        ("compare", "--batch", 90_000, "--workers", 90_000, "--strategies", "allreduce"),
    ):
        finished = run_cli(*command, "--out", tmp_path / "run")
        assert (finished.code, len(finished.lines)) == (2, 1), finished.stderr
        assert "--workers 90000: 90000 processes need about" in finished.last_line
        assert "use at most" in finished.last_line
        assert not (tmp_path / "run").exists()


def test_the_tightest_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 1e9)
    with pytest.raises(UsageError, match=r"1\.0 GB are available; use at most 41 workers, or"):
        check_capacity(50)
    monkeypatch.setattr(capacity, "free_threads", lambda: 100)
    with pytest.raises(UsageError, match="allows 100 more; use at most 10 workers, or"):
        check_capacity(48, servers=2)
    check_capacity(10, servers=2)


def test_open_files_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 1e12)
    monkeypatch.setattr(capacity, "free_threads", lambda: 100_000)
    with pytest.raises(UsageError, match=r"its limit is 100; .* raise the limit \(ulimit -n\)"):
        check_capacity(40)
    check_capacity(4)


def test_threads_are_counted() -> None:
    assert 0 < free_threads() < 1 << 30

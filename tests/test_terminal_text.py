"""Commands on terminals without Unicode."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.report.terminal_text import HANDLER, fit_terminal, never_fail_on_characters

ASCII = {
    "LC_ALL=C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "PYTHONIOENCODING=ascii": {"PYTHONIOENCODING": "ascii"},
}


def test_symbols_have_ascii_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    never_fail_on_characters()
    assert "3 ± 1 – × → ü €".encode("ascii", HANDLER) == b"3 +/- 1 - x -> ? ?"  # noqa: RUF001
    assert b"n\xc3\xb6".decode("ascii", "surrogateescape").encode("ascii", HANDLER) == b"n\xc3\xb6"
    assert fit_terminal("3 ± 1") == "3 ± 1"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert fit_terminal("3 ± 1") == "3 +/- 1"


@pytest.mark.parametrize("environment", ASCII.values(), ids=ASCII)
def test_commands_with_an_ascii_locale(environment: dict[str, str], tmp_path: Path) -> None:
    """Spreads, borders and a path that is not ASCII."""
    out = "läufe"
    job = ["--model", "mlp-128", "--data", "digits", "--epochs", "1"]
    for command in (
        ["twin", *job, "--strategy", "allreduce; ps", "--seeds", "2", "--cluster", "2"],
        ["report", out, "-o", "ergebnis-ü.html"],
        ["report", "--help"],
    ):
        where = ["--out", out] if command[0] == "twin" else []
        done = subprocess.run(
            [sys.executable, "-m", "paceline.cli.main", *command, *where],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert done.stdout.decode("ascii")
        if command[0] == "twin":
            assert b"+/-" in done.stdout
    assert (tmp_path / out / "comparison.json").exists()
    assert (tmp_path / "ergebnis-ü.html").exists()

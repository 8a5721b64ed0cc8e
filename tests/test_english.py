"""The prose linter: its rules, and a check of the whole repository."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lint_english", ROOT / "tools/lint_english.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lint_english"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Threads a worker.", "per"),
        ("It is told before the run.", "told"),
        ("The run goes on.", "go on"),
        ("Says what mends it.", "mend"),
        ("The gradient lies ready.", "lies"),
        ("Columns, parted by commas.", "parted by"),
        ('"""What a batch is worth."""', "question"),
        ("Everyone waits: nobody computes.", "nobody"),
        ("Stop after so many epochs.", "so many"),
        ("The value is no optimizer.", "is no"),
        ("Use asp, or leave one out.", "leave out"),
        ("Trouble on purpose.", "story"),
        ("--a and --b exclude each other", "passive"),
        ("a message with odd values", "register"),
        ("10 % of the rows", "percent"),
        ("# The run goes\n    # on after a loss.", "go on"),
    ],
)
def test_rule_matches_its_example(lint: ModuleType, text: str, rule: str) -> None:
    assert rule in {finding.rule for finding in lint.check_text(text, "docs/example.md")}


@pytest.mark.parametrize(
    "text",
    [
        "Threads per worker. The worker is no longer needed; there is no server.",
        '"""Returns the seed, or None if there is none."""',
        "Samples are assigned to a worker; 10% of a batch goes on to the next stage.",
    ],
)
def test_standard_english_passes(lint: ModuleType, text: str) -> None:
    assert list(lint.check_text(text, "docs/example.md")) == []


def test_repository_has_no_findings(lint: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = lint.main()
    assert status == 0, capsys.readouterr().out

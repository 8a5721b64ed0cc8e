"""README and docs: commands parse, and cited tests, files and strategies exist."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from paceline.strategies.registry import parse_strategies

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *PAGES,
    *sorted(p for p in (ROOT / "examples").rglob("*") if p.is_file() and p.suffix != ".pyc"),
]
# Kept equal to the command line by test_golden.py.
COMMANDS = json.loads((ROOT / "tests/golden/options.json").read_text())
# An indented line belongs to an example's docstring or comment.
COMMAND_LINE = re.compile(r"^[ #$]*(paceline [a-z].*)$")
RESULT_KEYS = {"test_acc", "test_loss"}
INLINE = re.compile(r"`(paceline [a-z][^`]*)`")


def find_commands(path: Path) -> list[str]:
    """Returns the command lines of a page: in code blocks and between backticks."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    found, fenced = [], path.suffix != ".md"
    for line in text.splitlines():
        if line.startswith("```") and path.suffix == ".md":
            fenced = not fenced
        elif fenced and (match := COMMAND_LINE.match(line)):
            found.append(match[1])
        elif not fenced:
            found += INLINE.findall(line)
    return found


def check_command(line: str) -> None:
    """Raises AssertionError or UsageError if a command, an option or a strategy does not exist."""
    words = shlex.split(line, comments=True)[1:]
    if "--" in words:
        words = words[: words.index("--")]
    if "..." in words or words == ["--help"]:
        return
    name = " ".join(words[:2]) if words[0] in ("pool", "data") else words[0]
    if name in ("pool", "data"):
        return
    assert name in COMMANDS, f"no command {name!r}"
    for word, value in zip(words, [*words[1:], ""], strict=True):
        option = word.partition("=")[0]
        if option.startswith("-") and option != "--help":
            known = COMMANDS[name]["options"]
            assert option in known, f"paceline {name} has no option {option}"
        if option in ("--strategy", "--strategies") and value not in ("S", "auto"):
            parse_strategies(value.replace("; ...", ""))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_parse(path: Path) -> None:
    for line in find_commands(path):
        try:
            check_command(line)
        except Exception as error:
            pytest.fail(f"{path.relative_to(ROOT)}: {line}\n{error}")


def test_commands_are_found_and_mistakes_are_not_missed() -> None:
    assert sum(len(find_commands(path)) for path in SOURCES) > 100
    assert any("--strategy" in line for line in find_commands(ROOT / "README.md"))
    for wrong in (
        "paceline trian --epochs 3",
        "paceline train --epoch 3",
        "paceline train --strategy allreduse",
        "paceline pool convrt a.json",
    ):
        with pytest.raises(Exception, match=r"no command|no option|unknown"):
            check_command(wrong)


def test_cited_tests_exist() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", text))
    defined |= {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    for path in PAGES:
        cited = set(re.findall(r"\b(test_\w+)", path.read_text())) - RESULT_KEYS
        assert cited <= defined, f"{path.relative_to(ROOT)} cites {sorted(cited - defined)}"


def test_cited_files_exist() -> None:
    file = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9-]+\.(?:py|md|yaml|json))`")
    roots = (ROOT, ROOT / "src/paceline", ROOT / "docs")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PAGES
        for name in file.findall(path.read_text())
        if not any((root / name).exists() for root in roots)
    ]
    assert missing == []


def test_docs_cited_in_code_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for tree in ("src", "tests", "bench", "examples")
        for path in (ROOT / tree).rglob("*.py")
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
        if not (ROOT / name).exists() and name != "docs/example.md"
    ]
    assert missing == []


def test_every_command_and_example_is_executed_by_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # Importing spark_cluster sets it.
    import docs_commands
    import scripts

    listed = docs_commands.list_commands()
    examples = {command.page for command in listed}
    for path in (ROOT / "examples").iterdir():
        assert path.is_dir() or f"examples/{path.name}" in examples, f"no command runs {path.name}"
    written = {path.stem for path in (ROOT / "examples/scripts").glob("*.py")}
    assert written == {*scripts.KINDS, "tpu", "write_data"}
    assert len(listed) > 100


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150

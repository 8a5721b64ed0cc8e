"""Rules for the whole source tree: size of modules, unique class names, no strategy type tests."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "paceline"
MAX_LINES = 450


@cache
def modules() -> dict[str, str]:
    """The text of each module, by its path below `paceline`."""
    return {
        str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCE.rglob("*.py"))
    }


@cache
def classes() -> dict[str, list[str]]:
    """The modules that define each class at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, text in modules().items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return dict(found)


def strategy_classes() -> set[str]:
    """`Strategy` and the classes in `strategies/` that derive from it, by name."""
    bases: dict[str, set[str]] = {}
    for text in modules().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {b.id for b in node.bases if isinstance(b, ast.Name)}
    found = {"Strategy"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def type_tests(text: str) -> Iterator[tuple[int, str]]:
    """Line and class name of each class that an `isinstance` call tests for."""
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id != "isinstance" or len(node.args) != 2:
            continue
        for part in ast.walk(node.args[1]):
            if isinstance(part, ast.Name):
                yield node.lineno, part.id
            elif isinstance(part, ast.Attribute):
                yield node.lineno, part.attr


def test_modules_are_short() -> None:
    long = {name for name, text in modules().items() if text.count("\n") >= MAX_LINES}
    assert not long


def test_class_names_are_unique() -> None:
    same = {name: where for name, where in classes().items() if len(where) > 1}
    assert not same


def test_no_strategy_type_tests_outside_the_slices() -> None:
    strategies = strategy_classes()
    assert {"AllReduce", "ParameterServer", "Switch"} <= strategies
    found = [
        (name, line, kind)
        for name, text in modules().items()
        if not name.startswith("strategies/")
        for line, kind in type_tests(text)
        if kind in strategies
    ]
    assert not found


def test_the_check_finds_type_tests() -> None:
    text = "isinstance(spec, AllReduce)\nisinstance(x, (int, specs.Switch))\n"
    assert list(type_tests(text)) == [(1, "AllReduce"), (2, "int"), (2, "Switch"), (2, "specs")]

"""constraints.txt pins everything that pyproject.toml requires."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins() -> dict[str, str]:
    """Returns the pinned versions by normalized name; every line must be a pin or a comment."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.!+]*)", line.strip())
            assert match, f"not an exact version: {line}"
            pins[normalize(match[1])] = match[2]
    return pins


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required = {
        normalize(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
        for group in groups
        for requirement in group
    } - {"paceline"}
    assert required - read_pins().keys() == set()


def test_scikit_learn_is_not_required() -> None:
    assert "scikit-learn" not in read_pins()
    assert "scikit-learn" not in (ROOT / "pyproject.toml").read_text()

"""Records name what exists: every facet can be imported, every example can be parsed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import paceline
from paceline.codecs.registry import CODECS, codec_record
from paceline.strategies.registry import StrategyRecord, parse_strategy, records

SOURCE = Path(paceline.__file__).parent
REFERENCE = re.compile(r'"(paceline(?:\.\w+)+):(\w+)"')


def facets(record: StrategyRecord) -> list[str]:
    workers = [record.worker] if isinstance(record.worker, str) else (record.worker or {}).values()
    others = (record.pace, record.simulate, record.cost, record.policy)
    return [*workers, *(path for path in others if path is not None)]


@pytest.mark.parametrize("name", records())
def test_every_facet_of_a_strategy_exists(name: str) -> None:
    record = records()[name]
    assert record.name == name
    for path in facets(record):
        module, _, attribute = path.partition(":")
        assert hasattr(importlib.import_module(module), attribute), path
    for text in record.examples:
        assert parse_strategy(text).name == name
    for template in record.memory_saving:
        assert parse_strategy(template.format(workers=2)).state_fraction(2).slots < 1
    # Only what is never active itself, because it has phases, lacks pace and worker.
    assert (record.pace is None) == (record.worker is None) == (record.policy is not None)


@pytest.mark.parametrize("name", CODECS)
def test_every_coder_of_a_codec_exists(name: str) -> None:
    module, _, attribute = codec_record(name).coder.partition(":")
    assert hasattr(importlib.import_module(module), attribute)


def test_every_reference_by_import_path_exists() -> None:
    """A rename must not miss a string: all of them are tried."""
    found = 0
    for path in SOURCE.rglob("*.py"):
        for module, attribute in REFERENCE.findall(path.read_text(encoding="utf-8")):
            found += 1
            assert hasattr(importlib.import_module(module), attribute), f"{path}: {module}"
    assert found > 20

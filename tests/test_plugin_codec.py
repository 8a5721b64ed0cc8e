"""A codec from a user's own file, in workers and in servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from jobs import Plain, largest_difference, read_weights, synthetic_job, train_plainly
from paceline.codecs import registry
from paceline.codecs.registry import codec_record, parse_codec, register_codec
from paceline.errors import SpecError
from paceline.strategies.registry import parse_strategy, plugins_of

TOY = Path(__file__).with_name("toy_codec.py")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "CODECS", dict(registry.CODECS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("toy_codec", None)


def test_it_trains_in_collectives_and_through_servers(tmp_path: Path) -> None:
    job = synthetic_job(Plain, optimizer="adam", samples=115, epochs=2)
    phases = "allreduce(codec=pruned), ps(sync=bsp, servers=2, codec=pruned)"
    text = f"{TOY}:switch({phases}, at=50%)"
    result = paceline.train(job, text, 3, out=tmp_path / "run", timeout_s=60)
    assert result["strategy"] == f"switch({phases}, at=50%)"
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9


def test_processes_import_the_file_of_a_codec() -> None:
    spec = parse_strategy(f"{TOY}:switch(ps, allreduce(codec=pruned), at=50%)")
    (plugin,) = plugins_of(spec)
    assert (plugin.module, plugin.file) == ("toy_codec", TOY.resolve())
    assert parse_codec("pruned").encoded_bytes([(3, 4), (5,)], 4) == 68.0


def test_names_are_taken_once() -> None:
    parse_strategy(f"{TOY}:ps(codec=pruned)")
    record = codec_record("pruned")
    register_codec(record)  # The same module: imported twice.
    for name in ("pruned", "int8"):
        other = type("Other", (record.spec,), {"name": name, "__module__": "elsewhere"})
        with pytest.raises(SpecError, match=f"a codec named '{name}' already exists"):
            register_codec(paceline.CodecRecord(spec=other, coder="x:y"))

"""allreduce(shares=S): the same bits for any number of workers."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import paceline
from conftest import RunCli
from jobs import (
    Plain,
    Remembering,
    largest_difference,
    read_weights,
    synthetic_job,
    train_plainly,
)
from paceline.errors import SpecError
from paceline.state import list_checkpoints
from paceline.strategies.allreduce.share_tree import (
    children,
    cut_batch,
    held_nodes,
    most_held_nodes,
    sum_tree,
    worker_shares,
)
from paceline.strategies.registry import parse_strategy

FIELDS: dict[str, Any] = {
    "samples": 110,
    "batch": 22,
    "dtype": "float32",
    "optimizer": "sgd(momentum=0.9)",
    "lr": 0.05,
    "held_out": 12,
    "clip": 1.0,
}


def model_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def train(out: Path, workers: int, *, shares: int = 5, resume: bool = False, **fields: Any) -> str:
    job = synthetic_job(Remembering, **{**FIELDS, **fields})
    result = paceline.train(
        job, f"allreduce(shares={shares})", workers, out=out, resume=resume, timeout_s=60
    )
    assert result["samples"] == 110 * fields.get("epochs", 2)
    return model_digest(out)


def test_weights_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    """Dropout, BatchNorm, momentum, clipping; shares of 5 and 4 samples, and unequal workers."""
    digests = {
        train(tmp_path / str(workers), workers, epochs=2, shares=5) for workers in (1, 2, 3, 5)
    }
    assert len(digests) == 1


def test_resumed_run_may_have_other_workers(tmp_path: Path) -> None:
    """From a checkpoint in mid-epoch, and one at the end of an epoch."""
    every = {"checkpoint_every": "samples(150)"}
    whole = train(tmp_path / "whole", 1, epochs=3, shares=8, **every)
    cut = tmp_path / "cut"
    train(cut, 3, epochs=2, shares=8, **every)
    newest = list_checkpoints(cut / "checkpoints")
    assert [c.name for c in newest] == ["000000000154", "000000000220"]
    for file in newest[-1].iterdir():
        file.unlink()
    newest[-1].rmdir()
    assert train(cut, 2, epochs=3, shares=8, resume=True, **every) == whole


def test_resnet_on_images(tmp_path: Path) -> None:
    """A network with many BatchNorm layers."""
    job = paceline.Job(model="resnet8", data="digits", batch=64, epochs=1, seed=2)
    digests = set()
    for workers in (1, 3):
        out = tmp_path / str(workers)
        paceline.train(job, "allreduce(shares=4)", workers, out=out, timeout_s=120)
        digests.add(model_digest(out))
    assert len(digests) == 1


def test_more_shares_than_samples_equal_one_process(tmp_path: Path) -> None:
    """Empty shares, and a last batch that is smaller."""
    job = synthetic_job(Plain, optimizer="adam")
    paceline.train(job, "allreduce(shares=32)", 2, out=tmp_path / "run", timeout_s=60)
    assert largest_difference(read_weights(tmp_path / "run"), train_plainly(job)) <= 1e-9


def test_tree_covers_every_share_once() -> None:
    for shares in range(1, 18):
        for workers in range(1, shares + 1):
            offsets = worker_shares(shares, workers)
            known: dict[tuple[int, int], tuple[int, ...]] = {}
            for first, last in itertools.pairwise(offsets):
                nodes = list(held_nodes((0, shares), first, last))
                assert [lo for lo, _ in nodes] == [first, *(hi for _, hi in nodes[:-1])]
                assert nodes[-1][1] == last
                known |= {node: tuple(range(*node)) for node in nodes}
            total = sum_tree((0, shares), known.get, known.__contains__, lambda a, b: (*a, *b))
            assert total == tuple(range(shares))
            assert cut_batch(100, shares, workers)[-1] == 100
    assert children((0, 6)) == ((0, 4), (4, 6))
    assert (most_held_nodes(8, 4), most_held_nodes(8, 3)) == (1, 2)


def test_tree_has_one_order_of_additions() -> None:
    """The parentheses are the same, whoever adds."""

    def expression(node: tuple[int, int], known: dict[tuple[int, int], str]) -> str:
        found = sum_tree(node, known.get, known.__contains__, "({}+{})".format)
        assert found is not None
        return found

    shares = 7
    leaves = {(s, s + 1): str(s) for s in range(shares)}
    whole = expression((0, shares), leaves)
    for workers in range(1, shares + 1):
        offsets = worker_shares(shares, workers)
        known = {
            node: expression(node, leaves)
            for first, last in itertools.pairwise(offsets)
            for node in held_nodes((0, shares), first, last)
        }
        assert expression((0, shares), known) == whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("allreduce(shares=4, codec=int8)", "shares and codec cannot be combined"),
        ("allreduce(shares=4, balance=auto)", "shares and balance=auto cannot be combined"),
        ("allreduce(shares=4, shard=optimizer)", "shares and shard=optimizer cannot be combined"),
        ("allreduce(shares=4, via=shared)", "shares and via=shared cannot be combined"),
        ("allreduce(shares=-1)", "must be at least 0"),
    ],
)
def test_what_shares_cannot_do(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        parse_strategy(text)


def test_more_workers_than_shares(run_cli: RunCli) -> None:
    finished = run_cli("train", "--strategy", "allreduce(shares=2)", "--workers", 3, "--out", "run")
    assert (finished.code, len(finished.lines)) == (2, 1)
    assert "allreduce(shares=2) does not support 3 workers" in finished.last_line
    assert "use at most 2 workers, or more shares" in finished.last_line


def test_simulated_shares_equal_real_ones(run_cli: RunCli, tmp_path: Path) -> None:
    """The twin computes the same shares in the same order."""
    options = ("--strategy", "allreduce(shares=6)", "--epochs", 1, "--quiet")
    for command in (("train", "--workers", 2), ("twin", "--cluster", 4)):
        finished = run_cli(*command, *options, "--out", tmp_path / str(command[0]))
        assert finished.code == 0, finished.stderr
    assert model_digest(tmp_path / "twin") == model_digest(tmp_path / "train")

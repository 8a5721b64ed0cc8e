"""The real data sets, from the folder that PACELINE_TEST_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import data
from paceline.errors import DataError

FOLDER = os.environ.get("PACELINE_TEST_DATA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER, reason="PACELINE_TEST_DATA names no folder with the real data sets"
    ),
]

ROWS = {
    "mnist": (54_000, 6_000, 10_000, (1, 28, 28), 10),
    "fashion-mnist": (54_000, 6_000, 10_000, (1, 28, 28), 10),
    "cifar10": (45_000, 5_000, 10_000, (3, 32, 32), 10),
    "adult": (29_305, 3_256, 16_281, (108,), 2),
    "tinyshakespeare": (15_685, 871, 871, (64,), 65),
}


def open_set(name: str) -> data.DatasetSplits:
    assert FOLDER
    try:
        data.locate(name, Path(FOLDER))
    except DataError as error:
        if "not found" in str(error):
            pytest.skip(str(error))
        raise
    return data.load(name, data_dir=Path(FOLDER))


def count_labels(*tables: data.MapDataset) -> list[int]:
    labels = [table.batch(np.arange(len(table)))[1] for table in tables]
    return torch.cat(labels).bincount().tolist()


@pytest.mark.parametrize("name", ROWS)
def test_counts(name: str) -> None:
    found = open_set(name)  # Sizes and MD5s of all files are compared on the way.
    *counts, shape, classes = ROWS[name]
    assert [len(found.train), len(found.val), len(found.test)] == counts
    assert (found.input_shape, found.classes, found.notes) == (shape, classes, ())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_pixels_are_normalised(name: str) -> None:
    x, _ = open_set(name).train.batch(np.arange(0, 40_000, 8))
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02


def test_labels() -> None:
    mnist = open_set("mnist")
    assert count_labels(mnist.test) == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert count_labels(mnist.train, mnist.val)[:3] == [5923, 6742, 5958]
    fashion = open_set("fashion-mnist")
    assert count_labels(fashion.train, fashion.val) == [6000] * 10


def test_cifar_labels() -> None:
    cifar10 = open_set("cifar10")
    assert count_labels(cifar10.train, cifar10.val) == [5000] * 10
    assert count_labels(cifar10.test) == [1000] * 10


def test_adult_labels() -> None:
    adult = open_set("adult")
    assert count_labels(adult.train, adult.val)[1] == 7_841
    assert count_labels(adult.test)[1] == 3_846


def test_kmnist_says_if_it_is_a_part() -> None:
    kmnist = open_set("kmnist")
    assert len(kmnist.test) == 10_000
    total = len(kmnist.train) + len(kmnist.val)
    if total == 60_000:
        assert kmnist.notes == ()
    else:
        assert f"only {total:,} of 60,000 training images" in kmnist.notes[0]
        assert len(kmnist.val) == total // 10


def test_one_set_is_not_taken_for_another() -> None:
    open_set("mnist")
    assert FOLDER
    with pytest.raises(DataError, match="not the published file"):
        data.locate("fashion-mnist", Path(FOLDER) / "mnist")

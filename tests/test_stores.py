"""Data on real stores: an S3 server, HDFS with two DataNodes and SFTP, all started here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import object_stores
from conftest import RUN_S
from object_stores import NotHere, Store
from paceline.data import read, stores
from paceline.data.conversion import convert
from paceline.data.dataset import FeatureOptions
from paceline.data.dataset_builder import build_dataset, build_splits
from paceline.data.pipeline import check_source
from paceline.data.streaming import PipelinedDataset
from paceline.errors import DataError
from paceline.job import Job
from paceline.launch.run import train
from test_data_url import write_set

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * RUN_S)]


def use(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    stores._open_store.cache_clear()


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    try:
        with object_stores.run_s3(tmp_path / "s3") as store:
            use(store, monkeypatch)
            yield store
    except NotHere as error:
        pytest.skip(f"data on S3 is not tested: {error}")
    finally:
        stores._open_store.cache_clear()


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    try:
        with object_stores.run_hdfs(tmp_path / "hdfs", 2) as store:
            use(store, monkeypatch)
            yield store
    except NotHere as error:
        pytest.skip(f"data on HDFS is not tested: {error}")
    finally:
        stores._open_store.cache_clear()


def train_on(url: str, out: Path, **fields: Any) -> dict[str, Any]:
    job = Job(model="mlp-128", data=url, epochs=2, batch=64, lr=0.05, **fields)
    return train(job, "allreduce", 2, out=out)


@pytest.mark.parametrize("form", ["parquet", "tfrecord"])
def test_a_set_on_s3_is_trained_on(s3: Store, tmp_path: Path, form: str) -> None:
    url = f"{s3.url}/digits"
    convert("digits", url, form=form, files=3)
    here = train_on("digits", tmp_path / "here")
    there = train_on(url, tmp_path / "there")
    # By sample, the order is that of seed and epoch alone: the same weights come out.
    assert there["test_loss"] == pytest.approx(here["test_loss"], rel=1e-6)
    dealt = train_on(f"{url}/train-*", tmp_path / "dealt", shard="row_group", cache="none")
    assert (dealt["status"], dealt["samples"]) == ("done", 2 * 1297)


def test_what_is_wrong_with_s3_is_one_line(
    s3: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_set(tmp_path / "set", [20])
    content = (tmp_path / "set" / "part-00.parquet").read_bytes()
    stores.write_bytes(f"{s3.url}/x.parquet", content)
    check_source(read(f"{s3.url}/x.parquet"))

    def message(url: str) -> str:
        stores._open_store.cache_clear()
        with pytest.raises(DataError) as caught:
            check_source(read(url))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "bucket 'nowhere' does not exist" in message("s3://nowhere/x.parquet")
    assert "no data files found" in message(f"{s3.url}/y.parquet")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert "access denied" in message(f"{s3.url}/x.parquet")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "check AWS_ACCESS_KEY_ID" in message(f"{s3.url}/x.parquet")


def test_hdfs_goes_on_when_a_datanode_dies(hdfs: Store, tmp_path: Path) -> None:
    images, labels = write_set(tmp_path / "set", [3000], group=100)
    url = f"{hdfs.url}/set/part-00.parquet"
    stores.write_bytes(url, (tmp_path / "set" / "part-00.parquet").read_bytes())
    table = build_dataset(read(url).shard("row_group"), FeatureOptions()).train
    assert isinstance(table, PipelinedDataset)
    assert table.blocks is not None
    x, _ = table.batch(np.arange(50))
    assert np.allclose(x.numpy() * 255, images[:50], atol=1e-3)
    hdfs.kill("datanode-0")
    began = time.monotonic()
    for start in range(0, 3000, 500):
        rows = np.arange(start, start + 500)
        x, y = table.batch(rows)
        assert np.allclose(x.numpy() * 255, images[rows], atol=1e-3)
        assert y.tolist() == labels[rows].tolist()
    assert time.monotonic() - began < RUN_S
    table.blocks.close()


def test_a_set_on_hdfs_is_trained_on(hdfs: Store, tmp_path: Path) -> None:
    url = f"{hdfs.url}/digits"
    convert("digits", url, form="parquet", files=3)
    here = train_on("digits", tmp_path / "here")
    there = train_on(url, tmp_path / "there")
    assert there["test_loss"] == pytest.approx(here["test_loss"], rel=1e-6)
    hdfs.kill("datanode-1")
    dealt = train_on(f"{url}/train-*", tmp_path / "dealt", shard="file", cache="none")
    assert (dealt["status"], dealt["samples"]) == ("done", 2 * 1297)
    with pytest.raises(DataError, match="no data files found"):
        build_splits("x", read(f"{hdfs.url}/none"), None, FeatureOptions())

"""Formats other than Parquet: reading, writing and errors."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import read
from paceline.data import tfrecord as records
from paceline.data.conversion import convert
from paceline.data.dataset import FeatureOptions
from paceline.data.dataset_builder import build_dataset, build_splits
from paceline.data.pipeline import check_source, list_splits, open_source
from paceline.data.tf_example import decode, encode
from paceline.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes and copies stay in the test's folder."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def rows_of(url: Path, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    table = build_dataset(read(str(url), **options), FeatureOptions(dtype="float64")).train
    x, y = table.batch(np.arange(len(table)))
    return x.numpy(), y.numpy()


# ---- TFRecord --------------------------------------------------------------------------------


def make_rows(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {
            "image": rng.integers(0, 256, 12, dtype=np.uint8),
            # Numbers of one, two and ten bytes: records are of several lengths.
            "label": np.array([(0, 5, 300, -1)[i % 4]]),
            "weight": rng.random(3).astype(np.float32),
        }
        for i in range(count)
    ]


@given(
    st.lists(
        st.tuples(
            st.binary(min_size=4, max_size=4),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(width=32, allow_nan=False),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_examples_come_back(values: list[tuple[bytes, int, float]]) -> None:
    content = b""
    starts, lengths = [], []
    for raw, number, real in values:
        record = encode(
            {
                "b": np.frombuffer(raw, np.uint8),
                "i": np.array([number, 7]),
                "f": np.array([real], np.float32),
            }
        )
        starts.append(len(content))
        lengths.append(len(record))
        content += record
    columns = decode(
        np.frombuffer(content, np.uint8), np.array(starts), np.array(lengths), ("b", "i", "f")
    )
    assert [bytes(row) for row in columns[0]] == [v[0] for v in values]
    assert columns[1].tolist() == [[v[1], 7] for v in values]
    assert columns[2][:, 0].tolist() == [v[2] for v in values]


@pytest.mark.parametrize("packing", ["none", "gzip", "zlib"])
def test_tfrecords_are_read(tmp_path: Path, packing: str) -> None:
    rows = make_rows(200)
    content = records.write_records(rows)
    if packing == "gzip":
        content = gzip.compress(content)
    elif packing == "zlib":
        content = zlib.compress(content)
    write(tmp_path / "a.tfrecord", content)
    x, y = rows_of(tmp_path / "a.tfrecord", features="image", label="label", shape=(3, 2, 2))
    assert x.shape == (200, 3, 2, 2)
    assert np.allclose(x.reshape(200, -1) * 255, np.stack([row["image"] for row in rows]))
    assert y.tolist() == [int(row["label"][0]) for row in rows]
    x, _ = rows_of(tmp_path / "a.tfrecord", features="weight")
    assert np.allclose(x, np.stack([row["weight"] for row in rows]))


def test_a_large_tfrecord_file_is_cut_into_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(records, "READ_BYTES", 333)
    rows = make_rows(100)
    path = write(tmp_path / "a.tfrecord", records.write_records(rows))
    pipeline, parts = list_splits(read(str(path), features="image", label="label"))
    source = open_source(pipeline, parts["train"])
    assert len(source.blocks) > 5
    assert sum(block.rows for block in source.blocks) == 100
    joined = np.concatenate([source.read(block)[0] for block in reversed(source.blocks)][::-1])
    assert np.array_equal(joined, np.stack([row["image"] for row in rows]))
    # The second time the index is at hand, and says the same.
    assert open_source(pipeline, parts["train"]).blocks == source.blocks


def test_checksums_are_those_of_the_format() -> None:
    """The empty record, as TensorFlow writes it."""
    assert records.frame(b"") == bytes.fromhex("000000000000000029039807d8ea82a2")


def damage(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 0xFF
    return bytes(changed)


def test_damaged_tfrecords_are_named(tmp_path: Path) -> None:
    rows = make_rows(8)
    content = records.write_records(rows)
    first = struct.unpack("<Q", content[:8])[0] + 16

    def check(broken: bytes, words: str) -> None:
        # Another size or time, another index: a test may be faster than the clock's grain.
        path = write(tmp_path / "x.tfrecord", broken)
        stamp = path.stat().st_mtime_ns + check.turn * 10**9  # type: ignore[attr-defined]
        check.turn += 1  # type: ignore[attr-defined]
        os.utime(path, ns=(stamp, stamp))
        with pytest.raises(DataError, match=words):
            rows_of(path, features="image", label="label")

    check.turn = 1  # type: ignore[attr-defined]
    check(damage(content, first + 20), rf"x\.tfrecord \(at byte {first}\): .*checksum of a record:")
    check(
        damage(content, first), rf"x\.tfrecord \(at byte {first}\): .*checksum of a record's length"
    )
    check(content[: first + 30], rf"x\.tfrecord \(at byte {first}\): is truncated: a record of")
    check(content[: first + 5], rf"x\.tfrecord \(at byte {first}\): is truncated: 5 bytes")
    check(b"", "is empty")
    check(gzip.compress(b""), "contains no records")
    check(gzip.compress(content)[:-20], "truncated or damaged")
    other = records.write_records([*rows[:4], {"picture": np.zeros(3), "label": np.array([1])}])
    check(
        other, r"at byte [\d,]+\): a record that has no feature 'image' \(it has: label, picture\)"
    )
    longer = {"image": np.zeros(13, np.uint8), "label": np.array([1])}
    check(records.write_records([*rows[:4], longer]), "feature 'image' has 13 values, others")
    mixed = {"image": np.zeros(12, np.float32), "label": np.array([1])}
    check(records.write_records([*rows[:4], mixed]), "has the type float32, others have uint8")
    check(records.frame(b"\xff\xff\xff"), "not a tf.train.Example")


TENSORFLOW = os.environ.get("PACELINE_TENSORFLOW_PYTHON")
"""A Python that has TensorFlow, in an environment of its own."""


@pytest.mark.slow
@pytest.mark.skipif(
    TENSORFLOW is None,
    reason="files of and for TensorFlow are not exchanged: set PACELINE_TENSORFLOW_PYTHON to a "
    "Python that has it",
)
def test_tensorflow_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    assert TENSORFLOW is not None
    rows = make_rows(50)
    write(tmp_path / "ours.tfrecord", records.write_records(rows))
    write(tmp_path / "ours.tfrecord.gz", records.write_records(rows, compress=True))
    code = """
import json, sys, numpy as np, tensorflow as tf
folder = sys.argv[1]
spec = {"image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([1], tf.int64),
        "weight": tf.io.FixedLenFeature([3], tf.float32)}
seen = []
for name, kind in (("ours.tfrecord", ""), ("ours.tfrecord.gz", "GZIP")):
    for raw in tf.data.TFRecordDataset(f"{folder}/{name}", compression_type=kind):
        row = tf.io.parse_single_example(raw, spec)
        weight = row["weight"].numpy().tolist()
        seen.append([list(row["image"].numpy()), int(row["label"][0]), weight])
for name, options in (("theirs.tfrecord", None), ("theirs.tfrecord.gz", "GZIP")):
    with tf.io.TFRecordWriter(f"{folder}/{name}", options=options) as out:
        for i in range(40):
            out.write(tf.train.Example(features=tf.train.Features(feature={
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes([i] * 12)])),
                "weight": tf.train.Feature(float_list=tf.train.FloatList(value=[i, 0.5, -1])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i * 7 - 3])),
            })).SerializeToString())
print(json.dumps(seen))
"""
    done = subprocess.run(
        [TENSORFLOW, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [
        [row["image"].tolist(), int(row["label"][0]), row["weight"].tolist()] for row in rows
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == expected * 2
    for name in ("theirs.tfrecord", "theirs.tfrecord.gz"):
        x, y = rows_of(tmp_path / name, features="image", label="label")
        assert np.allclose(x * 255, np.arange(40)[:, None].repeat(12, 1))
        assert y.tolist() == [i * 7 - 3 for i in range(40)]
        x, _ = rows_of(tmp_path / name, features="weight", label="label")
        assert x.tolist() == [[i, 0.5, -1.0] for i in range(40)]


# ---- CSV -------------------------------------------------------------------------------------


def test_csv_is_read_in_ranges_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.data import arrow_sources

    monkeypatch.setattr(arrow_sources, "CSV_BLOCK_BYTES", 200)
    lines = "".join(f"{i},{i / 2},{i % 3}\r\n" + ("\r\n" if i == 40 else "") for i in range(90))
    write(tmp_path / "a.csv", b"a,b,label\r\n" + lines.encode())
    write(tmp_path / "b.csv.gz", gzip.compress(b"a,b,label\n1000,2.5,1"))
    x, y = rows_of(tmp_path)
    assert x.tolist() == [*([i, i / 2] for i in range(90)), [1000, 2.5]]
    assert y.tolist() == [*(i % 3 for i in range(90)), 1]
    found = build_splits("s", read(str(tmp_path)), None, FeatureOptions())
    assert (found.classes, found.input_shape) == (3, (2,))


def test_csv_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"a,label\n1,0\nx,1\n")
    with pytest.raises(
        DataError,
        match=r"a\.csv \(at byte 0\): column 'a' contains values of the unsupported type string",
    ):
        rows_of(path)
    write(path, b"a,label\n1,0\n2\n")
    with pytest.raises(DataError, match=r"a\.csv \(at byte 0\): .*columns"):
        rows_of(path)
    write(path, b"a,label\n1,0\n,1\n")
    with pytest.raises(DataError, match=r"a\.csv .*row 1 of the block: column 'a' contains a null"):
        rows_of(path)
    assert rows_of(path, fill=5.0)[0].tolist() == [[1.0], [5.0]]
    write(path, b"a,label\n")
    with pytest.raises(DataError, match="contains no rows"):
        rows_of(path)
    write(path, b"a,label\n1,0\n")
    write(tmp_path / "b.csv", b"c,label\n1,0\n")
    with pytest.raises(DataError, match=r"b\.csv: has the columns 'c,label', but .*a\.csv"):
        rows_of(tmp_path)


# ---- records of one length -------------------------------------------------------------------


def test_idx_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.data import idx

    monkeypatch.setattr(idx, "BLOCK_BYTES", 100)
    images = np.arange(20 * 9, dtype=np.uint8).reshape(20, 3, 3)
    labels = np.arange(20, dtype=np.uint8) % 4
    head = struct.pack(">4B3I", 0, 0, 8, 3, 20, 3, 3)
    write(tmp_path / "train-images-idx3-ubyte", head + images.tobytes())
    tail = struct.pack(">4BI", 0, 0, 8, 1, 20)
    label_file = write(tmp_path / "train-labels-idx1-ubyte", tail + labels.tobytes())
    x, y = rows_of(tmp_path / "train-images-idx3-ubyte")
    assert x.shape == (20, 1, 3, 3)
    assert np.allclose(x[:, 0] * 255, images)
    assert y.tolist() == labels.tolist()
    assert np.array_equal(rows_of(tmp_path)[1], y)
    found = build_splits("s", read(str(tmp_path)), None, FeatureOptions())
    assert found.classes == 4

    packed = tmp_path / "packed"
    write(packed / "train-images-idx3-ubyte.gz", gzip.compress(head + images.tobytes()))
    write(packed / "train-labels-idx1-ubyte.gz", gzip.compress(tail + labels.tobytes()))
    assert np.array_equal(rows_of(packed)[0], x)

    write(label_file, struct.pack(">4BI", 0, 0, 8, 1, 19) + labels[:19].tobytes())
    with pytest.raises(DataError, match=r"images-idx3-ubyte: 20 images, but 19 labels in .*labels"):
        rows_of(tmp_path / "train-images-idx3-ubyte")
    write(tmp_path / "train-images-idx3-ubyte", (head + images.tobytes())[:-5])
    write(label_file, tail + labels.tobytes())
    with pytest.raises(DataError, match=r"images-idx3-ubyte \(at byte 191\): has 191 bytes, but"):
        rows_of(tmp_path / "train-images-idx3-ubyte")


def test_cifar_by_url(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    record = rng.integers(0, 256, (30, 3073), dtype=np.uint8)
    record[:, 0] %= 10
    path = write(tmp_path / "data_batch_1.bin", record.tobytes())
    x, y = rows_of(path)
    assert x.shape == (30, 3, 32, 32)
    assert np.allclose(x.reshape(30, -1) * 255, record[:, 1:])
    assert y.tolist() == record[:, 0].tolist()
    write(path, record.tobytes()[:-7])
    with pytest.raises(DataError, match=r"batch_1\.bin \(at byte 89,117\): has .* truncated"):
        rows_of(path)


# ---- pictures and text -----------------------------------------------------------------------


def test_a_folder_of_pictures_is_a_data_set(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        folder = tmp_path / ("dog" if number % 2 else "cat")
        folder.mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    found = build_splits("s", read(str(tmp_path)), None, FeatureOptions())
    assert (found.input_shape, found.classes) == ((3, 5, 7), 2)
    check_source(read(str(tmp_path)))
    x, y = rows_of(tmp_path)
    assert sorted(y.tolist()) == [0, 0, 0, 1, 1, 1]
    for picture, label in zip(np.moveaxis(x, 1, 3) * 255, y, strict=True):
        (number,) = [n for n in range(6) if np.allclose(picture, pixels[n])]
        assert label == number % 2
    assert rows_of(tmp_path, shape=(1, 4, 4))[0].shape == (6, 1, 4, 4)
    Image.fromarray(pixels[0, :4]).save(tmp_path / "dog" / "9.png")
    with pytest.raises(DataError, match=r"\.png: contains an image of 3x[45]x7, others have 3x"):
        rows_of(tmp_path)
    (tmp_path / "dog" / "9.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"dog/9\.png: contains a value that is not an image"):
        rows_of(tmp_path)
    with pytest.raises(DataError, match="in one directory"):
        check_source(read(str(tmp_path / "cat")))


def test_text_by_url(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", ("abcd" * 200).encode())
    found = build_splits("s", read(str(path)), None, FeatureOptions())
    assert (found.kind, found.classes, found.input_shape) == ("text", 4, (64,))
    assert found.val is not None
    x, y = found.train.batch(np.array([0]))
    assert x[0, :5].tolist() == [0, 1, 2, 3, 0]
    assert y[0, :4].tolist() == [1, 2, 3, 0]
    with pytest.raises(UsageError, match="--val-data is not supported for text"):
        build_splits("s", read(str(path)), read(str(path)), FeatureOptions())
    write(path, b"abc\xff")
    with pytest.raises(DataError, match=r"a\.txt \(at byte 3\): is not UTF-8"):
        build_splits("s", read(str(path)), None, FeatureOptions())


# ---- writing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "tfrecord"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_named_set_is_laid_out_and_read_back(tmp_path: Path, form: str, compress: bool) -> None:
    from paceline.data import load

    url = str(tmp_path / "set")
    facts = convert("digits", url, form=form, files=3, compress=compress)
    assert facts["parts"] == {"train": 1297, "val": 200, "test": 300}
    assert len(list((tmp_path / "set").glob("train-*"))) == 3
    with pytest.raises(UsageError, match="already contains a dataset"):
        convert("digits", url, form=form)
    original = load("digits")
    found = build_splits("set", read(url), None, FeatureOptions())
    assert (found.input_shape, found.classes) == ((1, 8, 8), 10)
    for part in ("train", "val", "test"):
        ours, theirs = getattr(found, part), getattr(original, part)
        assert ours is not None
        everything = np.arange(len(theirs))
        for mine, other in zip(ours.batch(everything), theirs.batch(everything), strict=True):
            assert mine.equal(other)


def test_what_cannot_be_converted_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--files 0: must be"):
        convert("digits", str(tmp_path / "a"), files=0)
    with pytest.raises(UsageError, match="--format 'csv'"):
        convert("digits", str(tmp_path / "a"), form="csv")


def test_the_command_line_converts_and_shows(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline.cli.main", "data", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
        )

    done = run("convert", "digits", str(tmp_path / "set"), "--format", "tfrecord", "--files", "2")
    assert done.returncode == 0, done.stderr
    assert "train 1,297, val 200, test 300 rows" in done.stdout
    done = run("show", str(tmp_path / "set"))
    assert "train: 2 files" in done.stdout
    assert "1,297 rows in 2 blocks" in done.stdout
    done = run("show", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1

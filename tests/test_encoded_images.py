"""Encoded images in TFRecord and Parquet files, and datasets of other libraries."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from paceline import Job, train
from paceline.data import as_dataset, read, webdataset
from paceline.data.dataset import DatasetSplits, FeatureOptions, parse_validation
from paceline.data.dataset_builder import build_splits
from paceline.data.encoded_images import ImageDecoder, is_encoded
from paceline.data.pipeline import check_source, list_splits, open_source
from paceline.data.tfrecord import write_records
from paceline.errors import DataError, UsageError

TFDS = os.environ.get("PACELINE_TFDS_PYTHON")


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def make_images(count: int, side: int = 28, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Gray images whose brightness follows the class, with labels 0 to 9."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 10
    noise = rng.integers(0, 32, (count, side, side))
    return (labels[:, None, None] * 20 + noise).astype(np.uint8), labels


def encode_image(pixels: np.ndarray, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def example(image: bytes, label: int, name: str = "") -> dict[str, np.ndarray]:
    as_bytes = {"image": image, "id": name.encode()}
    return {
        "label": np.array([label]),
        **{key: np.frombuffer(value, np.uint8) for key, value in as_bytes.items()},
    }


def write_tfds(folder: Path, parts: dict[str, Sequence[dict[str, np.ndarray]]], shards: int = 1):
    """Writes what tensorflow_datasets 4.9 writes for MNIST, with an `id` like CIFAR-10's."""
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        for shard in range(shards):
            name = f"mnist-{part}.tfrecord-{shard:05}-of-{shards:05}"
            (folder / name).write_bytes(write_records(rows[shard::shards]))
    keys = {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}}
    info = {"name": "mnist", "version": "3.0.1", "fileFormat": "tfrecord", "supervisedKeys": keys}
    image = {"image": {"dtype": "uint8", "shape": {"dimensions": ["28", "28", "1"]}}}
    kinds = {"image": image, "label": {"classLabel": {"numClasses": "10"}}, "id": {"text": {}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": kinds}}))
    (folder / "label.labels.txt").write_text("\n".join(map(str, range(10))))


def open_url(url: Path, **options: Any) -> DatasetSplits:
    return build_splits("s", read(str(url), **options), None, FeatureOptions(dtype="float64"))


def all_rows(table: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = table.batch(np.arange(len(table)))
    return x.numpy(), y.numpy()


def test_encoded_images_are_recognized() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        assert is_encoded(encode_image(pixels, form)), form
    for raw in (b"", b"BM" + bytes(782), bytes([255] * 784), b"\x89PNX" + bytes(80)):
        assert not is_encoded(raw)


def test_modes_and_sizes() -> None:
    gray, color = np.full((4, 6), 77, np.uint8), np.full((4, 6, 3), 77, np.uint8)
    assert ImageDecoder(None).decode([encode_image(gray)]).shape == (1, 1, 4, 6)
    mixed = ImageDecoder(None).decode([encode_image(color), encode_image(gray)])
    assert mixed.shape == (2, 3, 4, 6)
    assert (mixed == 77).all()
    assert ImageDecoder((1, 2, 2)).decode([encode_image(color)]).tolist() == [[[[77] * 2] * 2]]
    with pytest.raises(ValueError, match="an image of 3x4x6, others have 1x4x6; use --shape"):
        ImageDecoder(None).decode([encode_image(gray), encode_image(color)])
    with pytest.raises(ValueError, match="more than 8 bits"):
        ImageDecoder(None).decode([encode_image(gray.astype(np.uint16))])
    with pytest.raises(UsageError, match="must have the form 1x28x28"):
        ImageDecoder((784,))


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_tfds_directory_needs_nothing_else(tmp_path: Path, form: str) -> None:
    images, labels = make_images(120)
    rows = [
        example(encode_image(image, form), int(label), f"row_{n}")
        for n, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    write_tfds(tmp_path / "mnist" / "3.0.1", {"train": rows[:100], "test": rows[100:]}, shards=2)
    for folder in (tmp_path, tmp_path / "mnist", tmp_path / "mnist" / "3.0.1"):
        found = open_url(folder)
        assert (found.input_shape, found.classes) == ((1, 28, 28), 10)
        assert found.val is not None
        assert found.test is not None
        assert [len(part) for part in (found.train, found.val, found.test)] == [90, 10, 20]
    x, y = all_rows(found.test)
    # Scaled as the named dataset is.
    pixels = np.rint((x[:, 0] * 0.3081 + 0.1307) * 255)
    order = [*range(100, 120, 2), *range(101, 120, 2)]
    assert y.tolist() == labels[order].tolist()
    assert np.abs(pixels - images[order]).max() <= (0 if form == "PNG" else 40)
    only = open_url(tmp_path / "mnist" / "3.0.1" / "mnist-train*")
    assert only.test is None
    (tmp_path / "mnist" / "3.0.1" / "mnist-train.tfrecord-00001-of-00002").unlink()
    with pytest.raises(DataError, match=r"mnist-train\.tfrecord-00001-of-00002 is missing"):
        open_url(tmp_path)


def test_tfds_versions_and_formats_are_refused(tmp_path: Path) -> None:
    images, labels = make_images(20)
    rows = [example(encode_image(i), int(label)) for i, label in zip(images, labels, strict=True)]
    for version in ("3.0.0", "3.0.1"):
        write_tfds(tmp_path / "mnist" / version, {"train": rows})
    with pytest.raises(UsageError, match=r"several datasets or versions \(mnist/3.0.0, mnist/3"):
        check_source(read(str(tmp_path)))
    info = tmp_path / "mnist" / "3.0.1" / "dataset_info.json"
    info.write_text(json.dumps({"fileFormat": "array_record"}))
    with pytest.raises(UsageError, match="written as array_record, which is not supported"):
        check_source(read(str(info.parent)))


def test_a_tfds_directory_trains(tmp_path: Path) -> None:
    images, labels = make_images(200)
    rows = [example(encode_image(i), int(label)) for i, label in zip(images, labels, strict=True)]
    write_tfds(tmp_path / "set", {"train": rows[:160], "test": rows[160:]})
    job = Job(model="mlp-128", data=str(tmp_path / "set"), epochs=2, batch=32)
    result = train(job, "allreduce", 2, out=tmp_path / "run")
    assert result["samples"] == 2 * 144
    assert result["test_acc"] is not None


def test_errors_name_the_file_and_the_record(tmp_path: Path) -> None:
    images, labels = make_images(9)
    good = [example(encode_image(i), int(n)) for i, n in zip(images, labels, strict=True)]

    def check(rows: list[dict[str, np.ndarray]], match: str) -> None:
        (tmp_path / "a.tfrecord").write_bytes(write_records(rows))
        with pytest.raises(DataError, match=match):
            open_url(tmp_path / "a.tfrecord")

    where = r"a\.tfrecord \(record 7, at byte [\d,]+\): a record that contains "
    whole = encode_image(images[7])
    for image, what in (
        (whole[:60], "a damaged image"),
        (b"nothing", r"a value that is not an image \(7 bytes that begin with 6e6f7468\)"),
        (bytes(784), r"a value that is not an image"),
        (encode_image(images[7][:9]), "an image of 1x9x28, others have 1x28x28; use --shape"),
    ):
        check([*good[:7], example(image, 1), good[8]], where + what)
    missing = {"label": np.array([1]), "id": np.zeros(0, np.uint8)}
    check([*good[:7], missing], r"\(record 7, at byte [\d,]+\): a record that has no feature 'im")
    number = {**example(b"", 1), "image": np.array([3])}
    check([*good[:7], number], r"\(record 7, .*\): a record that has no image in feature 'image'")


def write_hub_file(path: Path, images: Sequence[bytes | None], labels: Any, **more: Any) -> None:
    """Writes a file as `Dataset.to_parquet` does."""
    names = {"label": {"names": [f"c{n}" for n in range(12)], "_type": "ClassLabel"}}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [None if image is None else {"bytes": image, "path": "a.png"} for image in images]
    table = pa.table({"image": pa.array(rows, kind), "label": pa.array(labels), **more})
    features = {"info": {"features": {"image": {"_type": "Image"}, **names}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(features)}), path, row_group_size=8
    )


def test_parquet_of_hugging_face(tmp_path: Path) -> None:
    images, labels = make_images(40)
    encoded = [encode_image(image) for image in images]
    ids = pa.array([f"row {n}" for n in range(30)])
    data = tmp_path / "data"
    write_hub_file(data / "train-00000-of-00001.parquet", encoded[:30], labels[:30], id=ids)
    write_hub_file(data / "test-00000-of-00001.parquet", encoded[30:], labels[30:])
    found = open_url(tmp_path)
    assert (found.input_shape, found.classes, len(found.train)) == ((1, 28, 28), 12, 27)
    assert found.test is not None
    x, y = all_rows(found.test)
    assert np.array_equal(np.rint(x[:, 0] * 255), images[30:])
    assert y.tolist() == labels[30:].tolist()
    streamed = build_splits(
        "s", read(str(tmp_path / "data")).shard("row_group"), None, FeatureOptions()
    )
    assert len(streamed.train) == 30
    broken = tmp_path / "broken.parquet"
    for images_of, what in (
        (
            [*encoded[:13], encoded[13][:50], *encoded[14:20]],
            r"row 5: column 'image' contains a d",
        ),
        ([*encoded[:13], None, *encoded[14:20]], r"row 5: column 'image' contains no image"),
    ):
        write_hub_file(broken, images_of, labels[:20])
        with pytest.raises(DataError, match=rf"broken\.parquet, row group 1, {what}"):
            open_url(broken)


def test_parquet_column_of_image_bytes(tmp_path: Path) -> None:
    images, labels = make_images(20)
    encoded = pa.array([encode_image(image, "BMP") for image in images], pa.binary())
    pq.write_table(pa.table({"picture": encoded, "label": labels}), tmp_path / "a.parquet")
    x, _ = all_rows(build_splits("s", read(str(tmp_path)), None, FeatureOptions()).train)
    assert x.shape[1:] == (1, 28, 28)
    resized = open_url(tmp_path, shape=(3, 14, 14))
    assert resized.input_shape == (3, 14, 14)


@pytest.mark.slow
@pytest.mark.skipif(
    TFDS is None,
    reason="nothing is written by the real package: set PACELINE_TFDS_PYTHON to a Python that has "
    "tensorflow-datasets and TensorFlow",
)
def test_the_real_tensorflow_datasets_writes_what_we_read(tmp_path: Path) -> None:
    assert TFDS is not None
    images, labels = make_images(300)
    arrays = tmp_path / "arrays.npz"
    parts = {"train": slice(0, 240), "test": slice(240, 300)}
    np.savez(
        arrays,
        **{f"{part}_images": images[rows, :, :, None] for part, rows in parts.items()},
        **{f"{part}_labels": labels[rows] for part, rows in parts.items()},
    )
    script = Path(__file__).parent / "scripts" / "write_tfds.py"
    subprocess.run([TFDS, script, arrays, tmp_path / "tfds"], check=True, timeout=150)
    found = open_url(tmp_path / "tfds")
    assert found.test is not None
    x, y = all_rows(found.test)
    pixels = np.rint((x[:, 0] * 0.3081 + 0.1307) * 255).astype(np.uint8)
    rows = {(image.tobytes(), int(label)) for image, label in zip(pixels, y, strict=True)}
    assert rows == {
        (image.tobytes(), int(label))
        for image, label in zip(images[240:], labels[240:], strict=True)
    }
    result = train(
        Job(model="mlp-128", data=str(tmp_path / "tfds"), epochs=1),
        "allreduce",
        2,
        out=tmp_path / "run",
    )
    assert result["samples"] == 216


def test_validation_and_scaling_of_a_directory(tmp_path: Path) -> None:
    images, labels = make_images(120)
    rows = [example(encode_image(i), int(label)) for i, label in zip(images, labels, strict=True)]
    write_tfds(tmp_path / "set", {"train": rows[:100], "test": rows[100:]})

    def open_with(**options: Any) -> DatasetSplits:
        return build_splits("s", read(str(tmp_path / "set")), None, FeatureOptions(**options))

    for text, sizes in (("none", (100, None)), ("test", (100, 20)), ("30", (70, 30))):
        found = open_with(validation=parse_validation(text))
        assert (len(found.train), found.val and len(found.val)) == sizes
    assert float(open_with(scaling="unit").train.batch(np.arange(90))[0].max()) <= 1
    assert float(open_with(scaling="none").train.batch(np.arange(90))[0].max()) > 100
    assert float(open_with(scaling="standard").train.batch(np.arange(90))[0].min()) < 0
    (tmp_path / "set" / "dataset_info.json").write_text('{"name": "mine"}')
    with pytest.raises(UsageError, match="scaling standard requires means and deviations"):
        open_with(scaling="standard")
    (tmp_path / "set" / "mnist-test.tfrecord-00000-of-00001").unlink()
    with pytest.raises(UsageError, match="validation test requires test data"):
        open_with(validation=parse_validation("test"))


# ---- archives and objects of other libraries ---------------------------------------------------


def test_npz_as_keras_stores_it(tmp_path: Path) -> None:
    images, labels = make_images(50)
    parts = {"x_train": images[:40], "y_train": labels[:40], "x_test": images[40:]}
    np.savez_compressed(tmp_path / "mnist.npz", **parts, y_test=labels[40:])
    found = open_url(tmp_path / "mnist.npz")
    assert (found.input_shape, found.classes, len(found.train)) == ((1, 28, 28), 10, 36)
    assert found.test is not None
    x, y = all_rows(found.test)
    assert np.array_equal(np.rint(x[:, 0] * 255), images[40:])
    assert y.tolist() == labels[40:].tolist()
    color = np.repeat(images[..., None], 3, axis=3)
    np.savez(tmp_path / "plain.npz", images=color, labels=labels[:, None])
    assert open_url(tmp_path / "plain.npz").input_shape == (3, 28, 28)
    np.savez(tmp_path / "other.npz", a=images, b=labels)
    assert len(open_url(tmp_path / "other.npz", features="a", label="b").train) == 45
    with pytest.raises(DataError, match=r"other\.npz: has no array '' \(it has: a, b\); use --fea"):
        open_url(tmp_path / "other.npz")
    np.savez(tmp_path / "short.npz", x=images, y=labels[:-1])
    with pytest.raises(DataError, match=r"short\.npz: 50 rows in 'x', but 49 in 'y'"):
        open_url(tmp_path / "short.npz")
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], object), y=labels[:1])
    with pytest.raises(DataError, match=r"pickled\.npz: is not a readable archive"):
        open_url(tmp_path / "pickled.npz")


def test_arrow_files_of_save_to_disk(tmp_path: Path) -> None:
    images, labels = make_images(40)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for part, rows in (("train", range(30)), ("test", range(30, 40))):
        values = [{"bytes": encode_image(images[row]), "path": None} for row in rows]
        table = pa.table({"image": pa.array(values, kind), "label": labels[list(rows)]})
        folder = tmp_path / "set" / part
        folder.mkdir(parents=True)
        path = str(folder / "data-00000-of-00001.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=8)
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text("{}")
    (tmp_path / "set" / "dataset_dict.json").write_text("{}")
    found = open_url(tmp_path / "set")
    assert (found.input_shape, len(found.train)) == ((1, 28, 28), 27)
    assert found.test is not None
    x, _ = all_rows(found.test)
    assert np.array_equal(np.rint(x[:, 0] * 255), images[30:])
    cut = tmp_path / "set" / "train" / "data-00000-of-00001.arrow"
    cut.write_bytes(cut.read_bytes()[:-900])
    with pytest.raises(DataError, match=r"train/data-00000-of-00001\.arrow: is truncated"):
        open_url(tmp_path / "set")


def test_hugging_face_objects(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    images, labels = make_images(60)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    )
    rows = {"image": [Image.fromarray(image) for image in images], "label": labels.tolist()}
    table = datasets.Dataset.from_dict(rows, features=features)
    x, y = all_rows(as_dataset(table.select(range(59, -1, -1)), dtype="float64"))
    assert np.array_equal(np.rint(x[:, 0] * 255), images[::-1])
    assert y.tolist() == labels[::-1].tolist()
    parts = datasets.DatasetDict(train=table.select(range(50)), test=table.select(range(50, 60)))
    parts.save_to_disk(tmp_path / "saved")
    found = open_url(tmp_path / "saved")
    assert (found.classes, len(found.train), found.test and len(found.test)) == (10, 45, 10)
    result = train(Job(model="mlp-128", data=parts, epochs=1), "single", 1, out=tmp_path / "run")
    assert result["samples"] == 50


def write_tar(path: Path, samples: Sequence[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for number, parts in enumerate(samples):
            for suffix, content in parts.items():
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def test_webdataset_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "BLOCK_BYTES", 8192)
    images, labels = make_images(40)
    samples = [
        {"png": encode_image(image), "cls": str(label).encode(), "txt": b"a caption"}
        for image, label in zip(images, labels, strict=True)
    ]
    (tmp_path / "set").mkdir()
    write_tar(tmp_path / "set" / "train-000000.tar", samples[:20])
    write_tar(tmp_path / "set" / "train-000001.tar", samples[20:])
    source = open_source(*_files(tmp_path / "set"))
    assert len(source.blocks) > 4
    parts = [source.read(block) for block in source.blocks]
    assert np.array_equal(np.concatenate([x for x, _ in parts])[:, 0], images)
    assert np.concatenate([y for _, y in parts]).tolist() == labels.tolist()
    assert len(open_url(tmp_path / "set").train) == 36
    as_json = [{"png": s["png"], "json": b'{"label": 3}'} for s in samples]
    write_tar(tmp_path / "json.tar", as_json)
    assert set(all_rows(open_url(tmp_path / "json.tar").train)[1].tolist()) == {3}
    for parts_of, what in (
        ({"png": samples[7]["png"][:60], "cls": b"1"}, "contains a damaged image"),
        ({"cls": b"1"}, "contains no image"),
        ({"png": samples[7]["png"]}, "has no label: cls is missing, or is not a number"),
    ):
        write_tar(tmp_path / "bad.tar", [*samples[:7], parts_of, *samples[8:]])
        with pytest.raises(DataError, match=rf"bad\.tar, sample 000007: {what}"):
            open_url(tmp_path / "bad.tar")
    cut = tmp_path / "set" / "train-000001.tar"
    cut.write_bytes(cut.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"train-000001\.tar: is truncated"):
        open_url(tmp_path / "set")


def _files(url: Path) -> tuple[Any, Any]:
    pipeline, parts = list_splits(read(str(url)))
    return pipeline, parts["train"]


def describe_features(table: pa.Table, label: str, names: int) -> pa.Table:
    """Adds the metadata that Hugging Face's datasets writes."""
    facts = {label: {"_type": "ClassLabel", "names": [str(n) for n in range(names)]}}
    described = {"info": {"features": {"img": {"_type": "Image"}, **facts}}}
    return table.replace_schema_metadata({b"huggingface": json.dumps(described).encode()})


def test_the_only_column_of_classes_is_the_label(tmp_path: Path) -> None:
    images, labels = make_images(40)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    stored = [{"bytes": encode_image(image), "path": None} for image in images]
    columns = {"img": pa.array(stored, kind), "fine_label": labels, "note": labels * 2}
    table = describe_features(pa.table(columns), "fine_label", 12)
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "README.md").write_text("As in a downloaded repository.")
    found = open_url(tmp_path)
    assert found.classes == 12
    assert set(all_rows(found.train)[1].tolist()) <= set(range(10))
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(UsageError) as error:
        open_url(tmp_path)
    assert str(error.value).endswith(
        "no column is named label; choose one of img, fine_label, note with --label"
    )
    assert open_url(tmp_path, label="fine_label").classes == 10


def test_only_documents_next_to_data_are_ignored(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": [0, 1]}), tmp_path / "a.parquet")
    for name in ("README.md", "LICENSE", "readme.txt"):
        (tmp_path / name).write_text("text")
    assert len(open_url(tmp_path).train) == 2
    (tmp_path / "b.dat").write_text("text")
    with pytest.raises(UsageError, match=r"cannot infer the format of b\.dat; use --format"):
        open_url(tmp_path)

"""Data by URL: columns, files that are not what they should be, and how rows are held."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data import as_dataset, read, stores
from paceline.data.arrow_sources import to_array
from paceline.data.blocks import RowError
from paceline.data.dataset import FeatureOptions
from paceline.data.dataset_builder import build_dataset, build_splits
from paceline.data.pipeline import check_source
from paceline.data.streaming import PipelinedDataset
from paceline.errors import DataError, UsageError

SIDE = 4


def make_images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows that can be told apart: their number is in their pixels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, SIDE * SIDE), dtype=np.uint8)
    numbers = np.arange(count)
    images[:, 0], images[:, 1] = numbers % 256, numbers // 256
    return images, (numbers % 10).astype(np.int64)


def write_parquet(path: Path, images: np.ndarray, labels: np.ndarray, group: int = 50) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    column = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), images.shape[1])
    pq.write_table(pa.table({"image": column, "label": labels}), path, row_group_size=group)


def write_set(folder: Path, sizes: list[int], group: int = 50) -> tuple[np.ndarray, np.ndarray]:
    images, labels = make_images(sum(sizes))
    start = 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        write_parquet(folder / f"part-{number:02}.parquet", images[part], labels[part], group)
        start += size
    return images, labels


def row_numbers(features: torch.Tensor) -> list[int]:
    pixels = (features.reshape(len(features), -1)[:, :2] * 255).round().to(torch.int64)
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


# ---- columns ---------------------------------------------------------------------------------


def test_columns_share_the_buffers_of_arrow() -> None:
    values = pa.array(np.arange(24, dtype=np.float32))
    column = pa.FixedSizeListArray.from_arrays(values, 6)
    array = to_array(column)
    assert array.shape == (4, 6)
    assert array.__array_interface__["data"][0] == values.buffers()[1].address
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(values, 3), 2)
    assert to_array(nested).shape == (4, 2, 3)
    assert np.array_equal(to_array(column[1:3]), array[1:3])


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, 2, 3], pa.int16()), [1, 2, 3]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (pa.array([b"ab", b"cd"]), [[97, 98], [99, 100]]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), [[97, 98], [99, 100]]),
        (pa.array([b"xx", b"ab", b"cd"])[1:], [[97, 98], [99, 100]]),
        (pa.array(["1.50", "2.25"]).cast(pa.decimal128(5, 2)), [1.5, 2.25]),
        (pa.array([5, 7, 5]).dictionary_encode(), [5, 7, 5]),
        (pa.chunked_array([[1, 2], [3]]), [1, 2, 3]),
        (
            pa.array(
                [{"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]}],
                pa.struct(
                    [
                        ("type", pa.int8()),
                        ("size", pa.int32()),
                        ("indices", pa.list_(pa.int32())),
                        ("values", pa.list_(pa.float64())),
                    ]
                ),
            ),
            [[1.0, 2.0]],
        ),
    ],
)
def test_columns_become_arrays(column: Any, expected: list[Any]) -> None:
    assert to_array(column).tolist() == expected


def test_nulls_are_refused_or_filled() -> None:
    with pytest.raises(RowError, match="a null") as caught:
        to_array(pa.array([1.0, None, 3.0]))
    assert caught.value.row == 1
    assert to_array(pa.array([1.0, None, 3.0]), fill=-1.0).tolist() == [1, -1, 3]
    with pytest.raises(RowError, match="a null") as caught:
        to_array(pa.array([[1.0, 2.0], [3.0, None]], pa.list_(pa.float64(), 2)))
    assert caught.value.row == 1
    with pytest.raises(RowError, match=r"a null; remove such rows$"):
        to_array(pa.array([[1.0], None]), fill=0.0)


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array(["a", "b"]), "type string"),
        (pa.array([[1, 2], [3]]), "1 values where others have 2"),
        (pa.array([b"a", b"bc"]), "2 values where others have 1"),
    ],
)
def test_columns_without_numbers_are_refused(column: Any, text: str) -> None:
    with pytest.raises(RowError, match=text):
        to_array(column)


# ---- Parquet ---------------------------------------------------------------------------------


def test_parquet_rows_and_their_hold_out(tmp_path: Path) -> None:
    images, labels = write_set(tmp_path, [120, 30, 50])
    pipeline = read(str(tmp_path), features="image", label="label", shape=(1, SIDE, SIDE))
    found = build_splits("set", pipeline, None, FeatureOptions())
    assert (found.input_shape, found.classes, found.kind) == ((1, SIDE, SIDE), 10, "image")
    assert found.val is not None
    assert (len(found.train), len(found.val)) == (180, 20)
    numbers = []
    for table in (found.train, found.val):
        x, y = table.batch(np.arange(len(table)))
        assert x.dtype == torch.float32
        numbers += row_numbers(x)
        for number, row, label in zip(row_numbers(x), x, y, strict=True):
            assert np.allclose(row.reshape(-1) * 255, images[number], atol=1e-3)
            assert int(label) == labels[number]
    assert sorted(numbers) == list(range(200))


@pytest.mark.parametrize("shard", ["sample", "off", "row_group", "file"])
@pytest.mark.parametrize("cache", ["auto", "disk"])
def test_every_way_of_holding_rows_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: Any, cache: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    images, labels = write_set(tmp_path / "set", [60, 45])
    pipeline = read(str(tmp_path / "set")).shard(shard).cache(cache)
    table = build_dataset(pipeline, FeatureOptions(dtype="float64")).train
    assert isinstance(table, PipelinedDataset)
    wanted = np.array([104, 0, 61, 59, 60, 3])
    for _ in range(2):
        x, y = table.batch(wanted)
        assert np.allclose(x.numpy() * 255, images[wanted])
        assert y.tolist() == labels[wanted].tolist()
    with pytest.raises(IndexError):
        table.batch(np.array([105]))
    if table.blocks is not None:
        table.blocks.close()


def test_maps_and_batches_change_rows(tmp_path: Path) -> None:
    write_set(tmp_path, [60])
    pipeline = (
        read(str(tmp_path))
        .map(lambda x, y: (x.float() / 2, y + 1))
        .batch(lambda x, y: (x * 10, y * 2))
    )
    x, y = build_dataset(pipeline, FeatureOptions()).train.batch(np.arange(3))
    assert x[:, 0].tolist() == [0.0, 5.0, 10.0]
    assert y.tolist() == [2, 4, 6]


def test_scale_is_of_bytes(tmp_path: Path) -> None:
    write_set(tmp_path, [20])
    pipeline = read(str(tmp_path), scale=(1.0, (2.0,), (4.0,)))
    x, _ = build_dataset(pipeline, FeatureOptions()).train.batch(np.arange(3))
    assert x[:, 0].tolist() == [-0.5, -0.25, 0.0]


def check(folder: Path, **options: Any) -> None:
    build_splits("set", read(str(folder), **options), None, FeatureOptions())


def test_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    write_set(tmp_path, [100, 100])
    second = tmp_path / "part-01.parquet"
    whole = second.read_bytes()

    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        DataError, match=r"part-01\.parquet \(at byte [\d,]+\): ends with .* truncated"
    ):
        check(tmp_path)
    second.write_bytes(b"")
    with pytest.raises(DataError, match=r"part-01\.parquet: is empty"):
        check(tmp_path)
    damaged = bytearray(whole)
    damaged[8:400] = bytes(392)
    second.write_bytes(bytes(damaged))
    with pytest.raises(DataError, match=r"part-01\.parquet, row group 0 \(at byte 4\): .*damaged"):
        check(tmp_path)

    images, labels = make_images(20)
    write_parquet(second, images[:0], labels[:0])
    with pytest.raises(DataError, match=r"part-01\.parquet: contains no rows"):
        check(tmp_path)
    assert (
        len(build_splits("set", read(str(tmp_path), skip_empty=True), None, FeatureOptions()).train)
        == 90
    )

    write_parquet(second, images.astype(np.float32), labels)
    with pytest.raises(
        DataError, match=r"part-01\.parquet: column 'image' has the type .*float.* uint8"
    ):
        check(tmp_path)
    pq.write_table(pa.table({"picture": labels, "label": labels}), second)
    with pytest.raises(DataError, match=r"part-01\.parquet: has no column 'image', unlike"):
        check(tmp_path)
    write_parquet(second, images[:, :9], labels)
    with pytest.raises(
        DataError, match=r"part-01\.parquet: column 'image' has the type fixed_size_list"
    ):
        check(tmp_path)


def test_columns_that_are_missing_or_null_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.0, None, 2.0], "label": [0, 1, 0]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no column 'lable': did you mean 'label'"):
        check(tmp_path, label="lable")
    with pytest.raises(
        DataError, match=r"x\.parquet, row group 0, row 1: column 'a' contains a null"
    ):
        check(tmp_path)
    x, _ = build_dataset(read(str(tmp_path), fill=9.0), FeatureOptions()).train.batch(np.arange(3))
    assert x.tolist() == [[1.0], [9.0], [2.0]]
    with pytest.raises(DataError, match="1 values per row do not match"):
        check(tmp_path, fill=0.0, shape=(2, 2))


def test_rows_of_other_lengths_are_named(tmp_path: Path) -> None:
    for name, length in (("a", 3), ("b", 4)):
        table = pa.table({"v": [[1.0] * length] * 5, "label": [0] * 5})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=r"b\.parquet \(at 0\): rows have 4 .* but 3 .*a\.parquet"):
        check(tmp_path)


def test_places_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data files found"):
        check_source(read(str(tmp_path)))
    with pytest.raises(DataError, match="no data files found"):
        check_source(read(str(tmp_path / "none.parquet")))
    with pytest.raises(UsageError, match="unknown scheme 's4'"):
        check_source(read("s4://bucket/x.parquet"))
    (tmp_path / "x.dat").write_bytes(b"1")
    with pytest.raises(UsageError, match=r"cannot infer the format of x\.dat; use --format"):
        check_source(read(str(tmp_path)))
    with pytest.raises(UsageError, match="unknown format 'parket'; did you mean 'parquet'"):
        read(str(tmp_path), format="parket")
    write_set(tmp_path, [3])
    (tmp_path / "x.csv").write_text("a,label\n1,2\n")
    (tmp_path / "x.dat").unlink()
    with pytest.raises(UsageError, match=r"several formats \(csv, parquet\)"):
        check_source(read(str(tmp_path)))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A server of this folder that knows ranges, as stores do."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            content = path.read_bytes() if path.is_file() else None
            if content is None:
                self.send_error(404)
                return
            total = len(content)
            wanted = self.headers.get("Range")
            start, stop = 0, total
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, stop = int(first), min(total, int(last or total - 1) + 1)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{total}")
            self.end_headers()
            self.wfile.write(content[start:stop])

    handler = functools.partial(Handler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_parquet_over_http(web: str, tmp_path: Path) -> None:
    images, _ = write_set(tmp_path, [120])
    pipeline = read(f"{web}/part-00.parquet").shard("row_group")
    table = build_dataset(pipeline, FeatureOptions()).train
    assert isinstance(table, PipelinedDataset)
    x, _ = table.batch(np.array([119, 0]))
    assert np.allclose(x.numpy() * 255, images[[119, 0]], atol=1e-3)
    assert table.blocks is not None
    table.blocks.close()
    with pytest.raises(DataError, match="part-09"):
        check_source(read(f"{web}/part-09.parquet"))


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An SFTP server of this machine's files, with keys of its own."""
    import asyncio

    import asyncssh

    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user_key.write_private_key(str(home / "id_ed25519"))
    allowed = asyncssh.import_authorized_keys(user_key.export_public_key().decode())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def listen() -> Any:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[host_key],
            authorized_client_keys=allowed,
            sftp_factory=True,
        )

    server = asyncio.run_coroutine_threadsafe(listen(), loop).result(30)
    port = server.get_port()
    public = host_key.export_public_key().decode()
    (home / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}")
    monkeypatch.setenv("HOME", str(home.parent))
    yield f"sftp://tester@127.0.0.1:{port}"
    loop.call_soon_threadsafe(server.close)
    asyncio.run_coroutine_threadsafe(server.wait_closed(), loop).result(30)

    async def end_connections() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end_connections(), loop).result(30)
    stores._open_store.cache_clear()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_parquet_over_sftp(sftp: str, tmp_path: Path) -> None:
    images, _ = write_set(tmp_path / "set", [70, 30])
    table = build_dataset(read(f"{sftp}{tmp_path}/set/*.parquet"), FeatureOptions()).train
    x, _ = table.batch(np.array([99, 0]))
    assert np.allclose(x.numpy() * 255, images[[99, 0]], atol=1e-3)
    with pytest.raises(DataError, match="no data files found"):
        check_source(read(f"{sftp}{tmp_path}/none/*.parquet"))


# ---- torch's own -----------------------------------------------------------------------------


class Squares(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index * index)]), index % 2


class Counting(IterableDataset[tuple[torch.Tensor, int]]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((torch.tensor([float(i)]), i % 3) for i in range(self._count))


def double(rows: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([2 * x for x, _ in rows]), torch.tensor([y for _, y in rows])


def test_loaders_are_data() -> None:
    table = as_dataset(DataLoader(Squares(), batch_size=4))
    assert table.batch(np.array([3, 1]))[0].tolist() == [[9.0], [1.0]]
    table = as_dataset(DataLoader(Squares(), batch_size=4, collate_fn=double))
    assert table.batch(np.array([3]))[0].tolist() == [[18.0]]
    with pytest.raises(UsageError, match="batch_size"):
        as_dataset(DataLoader(Squares(), batch_size=None))


def test_iterable_data_sets_are_held() -> None:
    table = as_dataset(DataLoader(Counting(2500), batch_size=32))
    assert len(table) == 2500
    x, y = table.batch(np.array([2499, 0]))
    assert x.tolist() == [[2499.0], [0.0]]
    assert y.tolist() == [2499 % 3, 0]
    with pytest.raises(DataError, match="no rows"):
        as_dataset(Counting(0))

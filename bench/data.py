"""Measures the cost of input: preparing batches, waiting for them, and their memory.

    python bench/data.py prepare --data-dir DIR     rows per second, and other readers
    python bench/data.py wait --data-dir DIR        fraction of a step, from disk, HDFS and S3
    python bench/data.py memory                     4 GB of Parquet, and a worker's peak

Each writes its part of bench/results/data.json. HDFS and S3 are real servers, started and stopped
here (tests/object_stores.py lists their requirements); missing ones are skipped with a message. The
large dataset is created in a temporary directory and deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "data.json"
BATCH = 64
EPOCHS = 5
"""A generator reads every time; what is held or cached is read once."""


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save(part: str, figures: Any) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "figures": figures}
    RESULTS.write_text(json.dumps(known, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


# ---- preparing batches -----------------------------------------------------------------------


def scale(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.float() / 255 - 0.1307) / 0.3081


def by_row(files: list[Path]) -> Iterator[Any]:
    """Reads rows as Python values, one after another, as estimators over DataFrames did."""
    import pyarrow.parquet as pq

    images: list[Any] = []
    labels: list[int] = []
    for _ in range(EPOCHS):
        for file in files:
            for group in pq.ParquetFile(file).iter_batches(1000):
                for row in group.to_pylist():
                    images.append(as_image(row["image"]))
                    labels.append(row["label"])
                    if len(labels) == BATCH:
                        yield scale(torch.from_numpy(np.stack(images))), torch.tensor(labels)
                        images, labels = [], []
        yield None


def as_image(value: Any) -> Any:
    flat = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.array(value)
    return flat.astype(np.float32).reshape(1, 28, 28)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Map-style dataset with all columns in memory as arrays; returns one row at a time."""

    def __init__(self, files: list[Path]) -> None:
        import pyarrow.parquet as pq

        from paceline.data.arrow_sources import to_array

        table = pq.read_table(files)
        self._images = torch.from_numpy(to_array(table.column("image")).copy())
        self._labels = to_array(table.column("label"))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return scale(self._images[index].reshape(1, 28, 28)), int(self._labels[index])


def by_loader(files: list[Path], workers: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        Rows(files), batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers
    )
    for _ in range(EPOCHS):
        yield from loader
        yield None


def by_paceline(files: list[Path], shard: str) -> Iterator[Any]:
    from paceline.data import read
    from paceline.data.dataset import FeatureOptions
    from paceline.data.dataset_builder import build_dataset
    from paceline.protocol.block_plan import BlockDealer, EpochBlockPlan
    from paceline.protocol.messages import Lease
    from paceline.worker.batch_loader import BatchLoader

    pipeline = read(
        [str(f) for f in files],
        features="image",
        label="label",
        shape=(1, 28, 28),
        classes=10,
        scale=(255, (0.1307,), (0.3081,)),
    ).shard(shard)
    if files[0].parent.name == "floats":
        # Bytes are scaled on the way; numbers are taken as they are, and scaled as elsewhere.
        pipeline = pipeline.batch(scale_batch)
    feed = BatchLoader(build_dataset(pipeline, FeatureOptions()).train, 0, torch.device("cpu"))
    try:
        for epoch in range(EPOCHS):
            allotment = None
            if feed.layout is not None:
                allotment = BlockDealer(EpochBlockPlan(feed.layout, epoch))
            for lo in range(0, feed.samples - BATCH + 1, BATCH):
                pieces = allotment.draw(0, BATCH) if allotment else ()
                ahead = allotment.lookahead(0) if allotment else ()
                yield feed.batch(Lease(0, epoch, lo, lo + BATCH, lo, lo + BATCH, pieces, ahead))
            yield None
    finally:
        feed.close()


def scale_batch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scale(x), y


def by_ray(files: list[Path]) -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = ray.data.read_parquet([str(f) for f in files])
        for _ in range(EPOCHS):
            for batch in rows.iter_torch_batches(batch_size=BATCH, drop_last=True):
                yield scale(batch["image"].reshape(-1, 1, 28, 28)), batch["label"]
            yield None
    finally:
        ray.shutdown()


def time_epochs(make: Callable[[], Iterator[Any]]) -> list[dict[str, float]]:
    """Returns rows per second of each epoch; the first includes opening the files."""
    epochs = []
    began, rows = time.perf_counter(), 0
    for batch in make():
        if batch is not None:
            rows += len(batch[0])
            continue
        seconds = time.perf_counter() - began
        epochs.append({"rows": rows, "seconds": round(seconds, 4), "rows_per_s": rows / seconds})
        began, rows = time.perf_counter(), 0
    return epochs


def write_floats(files: list[Path], folder: Path) -> list[Path]:
    """Writes the same rows as lists of floats, the format of a DataFrame's arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from paceline.data.arrow_sources import to_array

    folder.mkdir()
    written = []
    for file in files:
        table = pq.read_table(file)
        pixels = to_array(table.column("image")).astype(np.float32)
        offsets = np.arange(0, pixels.size + 1, pixels.shape[1], dtype=np.int32)
        column = pa.ListArray.from_arrays(offsets, pa.array(pixels.reshape(-1)))
        path = folder / file.name
        table = pa.table({"image": column, "label": table.column("label")})
        pq.write_table(table, path, row_group_size=1337)
        written.append(path)
    return written


def write_mnist(folder: Path, data_dir: Path | None, files: int = 8) -> list[Path]:
    from paceline.data.conversion import convert

    convert("mnist", str(folder), files=files, data_dir=data_dir)
    return sorted(folder.glob("train-*.parquet"))


def prepare(data_dir: Path | None) -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        stored = {"bytes": write_mnist(Path(temporary) / "bytes", data_dir)}
        stored["floats"] = write_floats(stored["bytes"], Path(temporary) / "floats")
        for kind, files in stored.items():
            figures[kind] = compare_readers(kind, files)
    save("prepare", figures)


def compare_readers(kind: str, files: list[Path]) -> dict[str, Any]:
    from functools import partial

    readers: dict[str, Callable[[], Iterator[Any]]] = {
        "row-wise Python generator": partial(by_row, files),
        "torch DataLoader, in process": partial(by_loader, files, 0),
        "torch DataLoader, 2 processes": partial(by_loader, files, 2),
        "paceline, by sample": partial(by_paceline, files, "sample"),
        "paceline, by row group": partial(by_paceline, files, "row_group"),
    }
    figures: dict[str, Any] = {}
    try:
        import ray  # noqa: F401

        if kind == "floats":
            readers["Ray Data"] = partial(by_ray, files)
    except ImportError:
        figures["Ray Data"] = "not installed: skipped"
    for name, make in readers.items():
        epochs = time_epochs(make)
        figures[name] = {
            "first_epoch_rows_per_s": round(epochs[0]["rows_per_s"]),
            "later_epochs_rows_per_s": round(
                statistics.median(e["rows_per_s"] for e in epochs[1:])
            ),
            "all_rows_per_s": round(
                sum(e["rows"] for e in epochs) / sum(e["seconds"] for e in epochs)
            ),
            "epochs": epochs,
        }
    slow = figures["row-wise Python generator"]
    for facts in figures.values():
        if isinstance(facts, dict):
            for part in ("first_epoch", "later_epochs", "all"):
                ratio = facts[f"{part}_rows_per_s"] / slow[f"{part}_rows_per_s"]
                facts[f"{part}_times_the_generator"] = round(ratio, 1)
    return figures


# ---- waiting for batches ---------------------------------------------------------------------


def run_once(url: str, shard: str, strategy: str, out: Path, **fields: Any) -> dict[str, Any]:
    from paceline.job import Job
    from paceline.launch.run import train

    job = Job(
        model="cnn-small",
        data=url,
        shard=shard,
        epochs=1,
        batch=128,
        lr=0.05,
        checkpoint_every="never",
        **fields,
    )
    result = train(job, strategy, 2, out=out, force=True)
    steps = ("input", "forward", "backward", "comm_exposed", "optimizer", "wait")
    shares = {}
    for worker, phases in result["phases"].items():
        whole = sum(phases[name] for name in steps)
        shares[worker] = {
            "input_s": round(phases["input"], 4),
            "step_s": round(whole, 4),
            "input_share": round(phases["input"] / whole, 5),
            "wait_share": round(result["input"][worker]["wait_s"] / whole, 5),
            **result["input"][worker],
        }
    return {
        "samples": result["samples"],
        "samples_per_s": result["samples_per_s"],
        "val_acc": result["val_acc"],
        "workers": shares,
    }


@contextlib.contextmanager
def in_environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wait(data_dir: Path | None, stores: list[str], shards: list[str]) -> None:
    from stores import NotHere, run_hdfs, run_s3

    from paceline.data.conversion import convert

    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures: dict[str, Any] = known.get("wait", {}).get("figures", {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in stores:
            try:
                with contextlib.ExitStack() as stack:
                    if name == "disk":
                        url, environment = str(folder / "mnist"), {}
                    elif name == "s3":
                        store = stack.enter_context(run_s3(folder / "s3"))
                        url, environment = f"{store.url}/mnist", store.environment
                    else:
                        store = stack.enter_context(run_hdfs(folder / "hdfs", 2))
                        url, environment = f"{store.url}/mnist", store.environment
                    stack.enter_context(in_environment(environment))
                    convert("mnist", url, files=8, data_dir=data_dir)
                    combinations = [(shard, "allreduce") for shard in shards]
                    if name == "disk":
                        combinations.append(("row_group", "ps"))
                    for shard, strategy in combinations:
                        figures[f"{name}, {shard}, {strategy}"] = run_once(
                            url, shard, strategy, folder / "run"
                        )
                        save("wait", figures)
            except NotHere as error:
                figures[name] = f"skipped: {error}"
                save("wait", figures)


# ---- memory ----------------------------------------------------------------------------------

SHAPE = (3, 64, 64)
ROW = 3 * 64 * 64


def write_large(folder: Path, gigabytes: float, files: int = 8, group: int = 1024) -> int:
    """Writes random, incompressible pixels, one row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    groups = max(files, round(gigabytes * 1e9 / (ROW * group)))
    written = 0
    for number in range(files):
        schema = pa.schema([("image", pa.binary(ROW)), ("label", pa.int64())])
        with pq.ParquetWriter(
            folder / f"part-{number:02}.parquet", schema, compression="none", use_dictionary=False
        ) as writer:
            for _ in range(groups // files):
                pixels = pa.py_buffer(rng.bytes(group * ROW))
                labels = rng.integers(0, 10, group)
                column = pa.Array.from_buffers(pa.binary(ROW), group, [None, pixels])
                writer.write_table(pa.table({"image": column, "label": labels}), group)
                written += group
    return written


def memory(gigabytes: float) -> None:
    from paceline.job import Job
    from paceline.launch.run import train

    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_large(folder / "small", 0.05, files=1)
        began = time.perf_counter()
        rows = write_large(folder / "large", gigabytes)
        figures["written_s"] = round(time.perf_counter() - began, 1)
        size = sum(path.stat().st_size for path in (folder / "large").iterdir())
        figures["large"] = {"rows": rows, "bytes": size}
        for name, shard in (("small", "sample"), ("large", "row_group")):
            job = Job(
                model="mlp-128",
                data=str(folder / name),
                shape="x".join(map(str, SHAPE)),
                shard=shard,
                epochs=1,
                batch=256,
                lr=0.01,
                checkpoint_every="never",
                classes=10,
                val_data=str(folder / "small"),
            )
            result = train(job, "allreduce", 2, out=folder / "run", force=True)
            figures[f"{name}, {shard}"] = {
                "peak_rss_bytes": result["peak_rss_bytes"],
                "samples": result["samples"],
                "samples_per_s": result["samples_per_s"],
                "seconds": result["seconds"],
                "input": result["input"],
            }
        base = figures["small, sample"]["peak_rss_bytes"]
        large = figures["large, row_group"]
        large["above_small_bytes"] = large["peak_rss_bytes"] - base
    save("memory", figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "wait", "memory"))
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--gigabytes", type=float, default=4.2)
    parser.add_argument("--stores", default="disk,hdfs,s3")
    parser.add_argument("--shards", default="row_group,sample")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.data_dir)
    elif options.what == "wait":
        wait(options.data_dir, options.stores.split(","), options.shards.split(","))
    else:
        memory(options.gigabytes)


if __name__ == "__main__":
    main()

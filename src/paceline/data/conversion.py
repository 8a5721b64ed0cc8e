"""Converts a named dataset to Parquet or TFRecord files with a description.

Features are written as stored, bytes as bytes. The description, `dataset.json`, is stored next to
the files and contains the scaling, the names, the shape and the classes, so that `--data URL` is
sufficient to train on it.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.blocks import Array
from paceline.data.catalog import PIXELS
from paceline.data.in_memory import ArrayDataset
from paceline.data.named_datasets import load
from paceline.data.pipeline import FACTS, PARTS, read_metadata
from paceline.data.stores import join_url, make_absolute, require_extra, write_bytes
from paceline.data.tfrecord import write_records
from paceline.errors import UsageError

FORMATS = ("parquet", "tfrecord")
GROUP_BYTES = 1 << 20
"""Approximate size of a row group or block: small enough for an even distribution."""


def convert(
    name: str,
    url: str,
    *,
    form: str = "parquet",
    files: int = 8,
    data_dir: Path | None = None,
    compress: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Writes a named dataset as `files` training files, and fewer for validation and test.

    Returns its description. Raises UsageError for a text dataset or if the target already contains
    a dataset, and DataError if something cannot be read or written.
    """
    url = make_absolute(url)
    if form not in FORMATS:
        raise UsageError(f"--format {form!r} cannot be written; use {' or '.join(FORMATS)}")
    if files < 1:
        raise UsageError(f"--files {files}: must be at least 1")
    require_extra("pyarrow" if form == "parquet" else "google_crc32c", "data", form)
    if read_metadata(join_url(url, FACTS)) and not force:
        raise UsageError(
            f"{url} already contains a dataset; choose another location or use --force"
        )
    found = load(name, data_dir=data_dir)
    feature = "image" if found.kind == "image" else "features"
    suffix = {"parquet": ".parquet", "tfrecord": ".tfrecord.gz" if compress else ".tfrecord"}[form]
    rows_of: dict[str, int] = {}
    for part in PARTS:
        table = getattr(found, part)
        if not isinstance(table, ArrayDataset):
            raise UsageError(f"{name} is a text dataset; copy its file and use --data URL")
        rows_of[part] = len(table)
        count = min(len(table), files if part == "train" else max(1, files // 8))
        for number, rows in enumerate(np.array_split(np.arange(len(table)), count)):
            features, labels = table.stored(rows)
            features = features.reshape(len(features), -1)
            if features.dtype == np.float64:
                features = features.astype(np.float32)
            path = join_url(url, f"{part}-{number:05}-of-{count:05}{suffix}")
            if form == "parquet":
                content = write_parquet(feature, features, labels, compress)
            else:
                examples = ({feature: x, "label": y} for x, y in zip(features, labels, strict=True))
                content = write_records(examples, compress=compress)
            write_bytes(path, content)
    facts: dict[str, Any] = {
        "name": found.name,
        "format": form,
        "features": [feature],
        "label": "label",
        "shape": list(found.input_shape),
        "classes": found.classes,
        "parts": rows_of,
        "notes": list(found.notes),
    }
    if found.name in PIXELS:
        facts["scale"] = PIXELS[found.name]
    # Written last, so that a dataset without a description is incomplete.
    write_bytes(join_url(url, FACTS), json.dumps(facts, indent=2).encode())
    return facts


def write_parquet(feature: str, features: Array, labels: Array, compress: bool) -> bytes:
    """Returns one file: bytes as binary, other features as fixed-size lists, in many row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    width = features.shape[1]
    if features.dtype == np.uint8:
        # Parquet has no byte type except binary: as integers each byte would take four.
        data = pa.py_buffer(np.ascontiguousarray(features))
        column = pa.Array.from_buffers(pa.binary(width), len(features), [None, data])
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), width)
    group = max(1, GROUP_BYTES // max(1, width * features.itemsize))
    stream = io.BytesIO()
    pq.write_table(
        pa.table({feature: column, "label": pa.array(labels)}),
        stream,
        row_group_size=group,
        compression="zstd" if compress else "snappy",
        use_dictionary=False,
    )
    return stream.getvalue()

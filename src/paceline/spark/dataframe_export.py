"""Exports a DataFrame once, as Parquet files that the workers read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pyspark.errors import PySparkException
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, NumericType

from paceline.errors import UsageError, suggest_name

ROW_GROUP_BYTES = 8 << 20
"""Small enough that several workers share a file and memory stays bounded."""
FEATURES, LABEL = "features", "label"

_written: dict[str, ExportedDataFrame] = {}
"""DataFrames that this application has already exported, by storage location and contents."""


@dataclass(frozen=True)
class TrainingColumns:
    """Columns of a DataFrame that are used for training."""

    features: str
    label: str
    integer_label: bool
    validation: float | str | None = None
    """A fraction of the rows, or a boolean column."""
    seed: int = 0


@dataclass(frozen=True)
class ExportedDataFrame:
    """Directories of Parquet files, and properties of the rows."""

    train: str
    val: str | None
    width: int
    classes: int | None


def export_dataframe(frame: DataFrame, columns: TrainingColumns, store: str) -> ExportedDataFrame:
    """Exports a DataFrame, or reuses an export. Raises UsageError for unsupported columns."""
    application = frame.sparkSession.conf.get("spark.app.id", "app")
    text = f"{application} {frame.semanticHash()} {columns}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    location = f"{store.rstrip('/')}/data/{key}"
    if location not in _written or not _exists(frame, _written[location].train):
        _written[location] = _write(frame, columns, location)
    return _written[location]


def _exists(frame: DataFrame, location: str) -> bool:
    try:
        return bool(frame.sparkSession.read.parquet(_for_spark(location)).columns)
    except PySparkException:
        return False


def _write(frame: DataFrame, columns: TrainingColumns, location: str) -> ExportedDataFrame:
    validation = columns.validation
    selected = [
        as_array(frame, columns.features).alias(FEATURES),
        _as_label(frame, columns).alias(LABEL),
    ]
    if isinstance(validation, str):
        column_type(frame, validation)
        chosen = F.coalesce(F.col(validation).cast("boolean"), F.lit(False))
        parts = {"train": frame.where(~chosen), "val": frame.where(chosen)}
        parts = {name: part.select(*selected) for name, part in parts.items()}
    elif validation:
        split = frame.select(*selected).randomSplit([1 - validation, validation], columns.seed)
        parts = dict(zip(("train", "val"), split, strict=True))
    else:
        parts = {"train": frame.select(*selected)}
    facts = {}
    for name, part in parts.items():
        target = f"{_for_spark(location)}/{name}"
        part.write.mode("overwrite").option("parquet.block.size", ROW_GROUP_BYTES).parquet(target)
        facts[name] = _check_rows(part.sparkSession.read.parquet(target), columns, name)
    if len({part["width"] for part in facts.values()}) > 1:
        raise UsageError("the features of validation rows and training rows have different lengths")
    return ExportedDataFrame(
        train=f"{location}/train",
        val=f"{location}/val" if "val" in parts else None,
        width=facts["train"]["width"],
        classes=max(f["highest"] for f in facts.values()) + 1 if columns.integer_label else None,
    )


def _for_spark(url: str) -> str:
    if url.startswith("s3://"):
        return "s3a://" + url.removeprefix("s3://")
    return url if "://" in url else f"file://{url}"


def as_array(frame: DataFrame, column: str) -> Column:
    """Converts a column of vectors, arrays or numbers to arrays of float."""
    kind = column_type(frame, column)
    if isinstance(kind, VectorUDT):
        return vector_to_array(F.col(column), "float32")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return F.col(column).cast("array<float>")
    if isinstance(kind, NumericType):
        return F.array(F.col(column).cast("float"))
    raise UsageError(
        f"column {column!r} has the type {kind.simpleString()}; features must be vectors, "
        "arrays of numbers or numbers"
    )


def column_type(frame: DataFrame, column: str) -> Any:
    if column not in frame.columns:
        known = suggest_name(column, frame.columns)
        raise UsageError(f"the DataFrame has no column {column!r}; {known}")
    return frame.schema[column].dataType


def _as_label(frame: DataFrame, columns: TrainingColumns) -> Column:
    kind = column_type(frame, columns.label)
    if not isinstance(kind, NumericType | BooleanType):
        raise UsageError(
            f"column {columns.label!r} has the type {kind.simpleString()}; labels must be numbers "
            "(use StringIndexer for text)"
        )
    return F.col(columns.label).cast("long" if columns.integer_label else "float")


def _check_rows(frame: DataFrame, columns: TrainingColumns, name: str) -> dict[str, Any]:
    """Returns facts about the rows. Raises UsageError for rows that cannot be batched."""
    size = F.size(FEATURES)
    row = frame.agg(
        F.count(F.lit(1)).alias("rows"),
        F.min(size).alias("shortest"),
        F.max(size).alias("longest"),
        F.sum(F.when(F.col(FEATURES).isNull() | F.exists(FEATURES, F.isnull), 1).otherwise(0)),
        F.sum(F.when(F.col(LABEL).isNull(), 1).otherwise(0)),
        F.min(LABEL).alias("lowest"),
        F.max(LABEL).alias("highest"),
    ).collect()[0]
    if not row["rows"]:
        what = "rows to train on" if name == "train" else "validation rows"
        raise UsageError(f"the DataFrame has no {what}")
    if row[3] or row[4]:
        column = columns.features if row[3] else columns.label
        raise UsageError(f"column {column!r} has {row[3] or row[4]} rows with nulls; drop them")
    if row["shortest"] != row["longest"]:
        raise UsageError(
            f"column {columns.features!r} has features of {row['shortest']} to {row['longest']} "
            "numbers; all rows must have the same length"
        )
    if columns.integer_label and row["lowest"] < 0:
        raise UsageError(
            f"column {columns.label!r} has the label {row['lowest']}; classes must start at 0"
        )
    return {"width": row["longest"], "highest": row["highest"]}

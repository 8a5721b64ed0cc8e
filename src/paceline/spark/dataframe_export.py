"""A DataFrame as Parquet files that workers read where they lie, written once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ROW_GROUP_BYTES = 8 << 20
"""Small enough that several workers find work in one file, and memory stays bounded."""
FEATURES, LABEL = "features", "label"
SPARK_SCHEMES = {"s3://": "s3a://"}
"""Where Spark's name for a store is another than ours."""

_written: dict[str, ExportedDataFrame] = {}
"""What this application has written already, by store and contents."""


@dataclass(frozen=True)
class TrainingColumns:
    """What of a DataFrame is trained on."""

    features: str
    label: str
    integer_label: bool
    validation: float | str | None = None
    """A share of the rows, or a column of booleans."""
    seed: int = 0


@dataclass(frozen=True)
class ExportedDataFrame:
    """Folders of Parquet files, and what is known of the rows."""

    train: str
    val: str | None
    rows: int
    val_rows: int
    width: int
    classes: int | None


def export_dataframe(frame: DataFrame, wish: TrainingColumns, store: str) -> ExportedDataFrame:
    """Write it, or find it again; raises UsageError for columns that cannot be trained on."""
    application = frame.sparkSession.conf.get("spark.app.id", "app")
    text = f"{application} {frame.semanticHash()} {wish}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    place = f"{store.rstrip('/')}/data/{key}"
    if place not in _written or not _is_there(frame, _written[place].train):
        _written[place] = _write(frame, wish, place)
    return _written[place]


def _is_there(frame: DataFrame, place: str) -> bool:
    """Somebody may have cleared the store since."""
    from pyspark.errors import PySparkException

    try:
        return bool(frame.sparkSession.read.parquet(_for_spark(place)).columns)
    except PySparkException:
        return False


def _write(frame: DataFrame, wish: TrainingColumns, place: str) -> ExportedDataFrame:
    from pyspark.sql import functions as F

    plain = frame.select(
        as_array(frame, wish.features).alias(FEATURES),
        _as_label(frame, wish).alias(LABEL),
        *_split_column(frame, wish),
    )
    parts = {"train": plain}
    if isinstance(wish.validation, str):
        chosen = F.col("__validation")
        parts = {
            "train": plain.where(~chosen).drop("__validation"),
            "val": plain.where(chosen).drop("__validation"),
        }
    elif wish.validation:
        train, val = plain.randomSplit([1 - wish.validation, wish.validation], wish.seed)
        parts = {"train": train, "val": val}
    facts = {}
    for name, part in parts.items():
        target = f"{_for_spark(place)}/{name}"
        (part.write.mode("overwrite").option("parquet.block.size", ROW_GROUP_BYTES).parquet(target))
        facts[name] = _check_rows(part.sparkSession.read.parquet(target), wish, name)
    train_facts = facts["train"]
    val_facts = facts.get("val")
    if val_facts is not None and val_facts["width"] != train_facts["width"]:
        raise UsageError("features of validation rows have another length than those of training")
    return ExportedDataFrame(
        train=f"{place}/train",
        val=f"{place}/val" if "val" in parts else None,
        rows=train_facts["rows"],
        val_rows=val_facts["rows"] if val_facts else 0,
        width=train_facts["width"],
        classes=max(f["highest"] for f in facts.values()) + 1 if wish.integer_label else None,
    )


def _for_spark(url: str) -> str:
    for ours, theirs in SPARK_SCHEMES.items():
        if url.startswith(ours):
            return theirs + url.removeprefix(ours)
    return url if "://" in url else f"file://{url}"


def as_array(frame: DataFrame, column: str) -> Column:
    """A column of vectors, arrays or numbers as arrays of float."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, NumericType

    kind = column_type(frame, column)
    if isinstance(kind, VectorUDT):
        return vector_to_array(F.col(column), "float32")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return F.col(column).cast("array<float>")
    if isinstance(kind, NumericType):
        return F.array(F.col(column).cast("float"))
    raise UsageError(
        f"column {column!r} is of type {kind.simpleString()}: vectors, arrays of numbers "
        "or numbers are features"
    )


def column_type(frame: DataFrame, column: str) -> Any:
    if column not in frame.columns:
        from paceline.errors import suggest_name

        raise UsageError(
            f"the DataFrame has no column {column!r}: {suggest_name(column, frame.columns)}"
        )
    return frame.schema[column].dataType


def _as_label(frame: DataFrame, wish: TrainingColumns) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql.types import BooleanType, NumericType

    kind = column_type(frame, wish.label)
    if not isinstance(kind, NumericType | BooleanType):
        raise UsageError(
            f"column {wish.label!r} is of type {kind.simpleString()}: labels are numbers "
            "(StringIndexer makes them of text)"
        )
    return F.col(wish.label).cast("long" if wish.integer_label else "float")


def _split_column(frame: DataFrame, wish: TrainingColumns) -> list[Column]:
    from pyspark.sql import functions as F

    if not isinstance(wish.validation, str):
        return []
    column_type(frame, wish.validation)
    return [F.coalesce(F.col(wish.validation).cast("boolean"), F.lit(False)).alias("__validation")]


def _check_rows(frame: DataFrame, wish: TrainingColumns, name: str) -> dict[str, Any]:
    """Count, and refuse rows that no batch can be made of."""
    from pyspark.sql import functions as F

    size = F.size(FEATURES)
    row = frame.agg(
        F.count(F.lit(1)).alias("rows"),
        F.min(size).alias("least"),
        F.max(size).alias("most"),
        F.sum(F.when(F.col(FEATURES).isNull() | F.exists(FEATURES, F.isnull), 1).otherwise(0)),
        F.sum(F.when(F.col(LABEL).isNull(), 1).otherwise(0)),
        F.min(LABEL).alias("lowest"),
        F.max(LABEL).alias("highest"),
    ).collect()[0]
    if not row["rows"]:
        what = "rows to train on" if name == "train" else "validation rows"
        raise UsageError(f"the DataFrame gives no {what}")
    if row[3] or row[4]:
        column = wish.features if row[3] else wish.label
        raise UsageError(f"column {column!r} has {row[3] or row[4]} rows with nulls: drop them")
    if row["least"] != row["most"]:
        raise UsageError(
            f"column {wish.features!r} has features of {row['least']} to {row['most']} numbers: "
            "all rows must have equally many"
        )
    if wish.integer_label and row["lowest"] < 0:
        raise UsageError(
            f"column {wish.label!r} has the label {row['lowest']}: classes count from 0"
        )
    return {"rows": row["rows"], "width": row["most"], "highest": row["highest"]}

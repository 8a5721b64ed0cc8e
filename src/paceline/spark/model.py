"""PacelineModel: a trained model as a Transformer that adds predictions to a DataFrame."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.ml import util
from pyspark.ml.base import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param.shared import HasFeaturesCol, HasPredictionCol, HasRawPredictionCol
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType

from paceline.errors import UsageError
from paceline.spark.dataframe_export import as_array
from paceline.spark.job_archive import build_trained

if TYPE_CHECKING:
    import pandas as pd

FACTS = "facts.json"


class PacelineModel(
    Model,
    HasFeaturesCol,
    HasPredictionCol,
    HasRawPredictionCol,
    util.MLReadable["PacelineModel"],
    util.MLWritable,
):
    """A fitted model. `result` is the run's `result.json`, `run` the location of the run folder."""

    def __init__(self, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        super().__init__()
        self._files = files
        self._facts = facts
        self._setDefault(
            featuresCol="features", predictionCol="prediction", rawPredictionCol="rawPrediction"
        )

    @property
    def result(self) -> dict[str, Any]:
        return dict(self._facts["result"])

    @property
    def run(self) -> str:
        return str(self._facts["run"])

    @property
    def torch_module(self) -> Any:
        """The torch module, on the driver."""
        return build_trained(self._files, self._facts["shape"], self._facts["classes"])

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Adds `prediction` (class or regression value) and `rawPrediction` (all outputs)."""
        predict: Any = F.pandas_udf(
            make_predict(self._files, self._facts), returnType=ArrayType(FloatType())
        )
        hidden = "__paceline_output"
        made = dataset.withColumn(hidden, predict(as_array(dataset, self.getFeaturesCol())))
        if self._facts["classes"] is not None:
            # The first maximum, as in argmax; Spark's arrays are 1-based.
            best = F.array_position(hidden, F.array_max(hidden)) - 1
        else:
            best = F.element_at(hidden, 1)
        made = made.withColumn(self.getPredictionCol(), best.cast("double"))
        if self.getRawPredictionCol():
            raw = array_to_vector(F.col(hidden).cast("array<double>"))
            made = made.withColumn(self.getRawPredictionCol(), raw)
        return made.drop(hidden)

    def write(self) -> util.MLWriter:
        return _ModelWriter(self)

    @classmethod
    def read(cls) -> util.MLReader[PacelineModel]:
        return _ModelReader()


def make_predict(
    files: dict[str, bytes], facts: dict[str, Any]
) -> Callable[[Iterator[pd.Series[Any]]], Iterator[pd.Series[Any]]]:
    import pandas as pd

    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        import numpy as np
        import torch

        shape = facts["shape"]
        module = build_trained(files, shape, facts["classes"])
        with torch.no_grad():
            for batch in batches:
                if not len(batch):
                    yield pd.Series([], dtype=object)
                    continue
                rows = np.stack(batch.to_numpy()).astype("float32").reshape(-1, *shape)
                output = module(torch.from_numpy(rows)).reshape(len(rows), -1)
                yield pd.Series(list(output.float().numpy()))

    # Spark infers the kind of a pandas UDF from its annotations, which must not be strings.
    predict.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return predict


class _ModelWriter(util.MLWriter):
    """Writes Spark's standard metadata, and the files as rows of Parquet, for any store."""

    def __init__(self, model: PacelineModel) -> None:
        super().__init__()
        self._model = model

    def saveImpl(self, path: str) -> None:  # noqa: N802
        session = self.sparkSession
        util.DefaultParamsWriter.saveMetadata(self._model, path, session)
        files = {**self._model._files, FACTS: json.dumps(self._model._facts).encode()}
        rows = [(name, bytearray(data)) for name, data in files.items()]
        frame = session.createDataFrame(rows, "name string, data binary")
        frame.coalesce(1).write.mode("overwrite").parquet(f"{path}/files")


class _ModelReader(util.MLReader[PacelineModel]):
    def load(self, path: str) -> PacelineModel:
        session = self.sparkSession
        metadata = util.DefaultParamsReader.loadMetadata(path, session)
        rows = session.read.parquet(f"{path}/files").collect()
        files = {row["name"]: bytes(row["data"]) for row in rows}
        if FACTS not in files:
            raise UsageError(f"{path} does not contain a saved PacelineModel")
        model = PacelineModel(files, json.loads(files.pop(FACTS)))
        model._resetUid(metadata["uid"])
        util.DefaultParamsReader.getAndSetParams(model, metadata)
        return model

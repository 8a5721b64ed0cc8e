"""PacelineEstimator: training as a stage of a pyspark.ml pipeline."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path
from typing import Any

from pyspark import keyword_only
from pyspark.ml.base import Estimator
from pyspark.ml.param import Param, TypeConverters, shared
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from paceline.data.pipeline import parse_shape
from paceline.errors import UsageError, suggest_name
from paceline.job import JobRef
from paceline.launch.engines.engine import EngineLauncher
from paceline.launch.project import ProjectBundle, read_project
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions, new_run_name
from paceline.plugins import hash_file
from paceline.report.progress import terminal_reporter
from paceline.spark.dataframe_export import (
    FEATURES,
    LABEL,
    ExportedDataFrame,
    TrainingColumns,
    export_dataframe,
)
from paceline.spark.engine import SparkEngine, setting
from paceline.spark.job_archive import as_store, pack_job, write_job
from paceline.spark.model import PacelineModel
from paceline.strategies.registry import parse_strategy

CROSS_ENTROPY = "cross_entropy"
ANY, TEXT = TypeConverters.identity, TypeConverters.toString
INTEGER, REAL = TypeConverters.toInt, TypeConverters.toFloat
TRAINING: dict[str, tuple[Any, Any, str]] = {
    # name: (converter, default, help); None means "not set"
    "model": (ANY, "mlp-128", "model name, a function or class, or a Keras model"),
    "strategy": (TEXT, "allreduce", "strategy, as on the command line"),
    "num_workers": (INTEGER, 2, "number of workers (barrier tasks)"),
    "batch": (INTEGER, 128, "global batch size, split across all workers"),
    "epochs": (INTEGER, 10, "number of epochs"),
    "optimizer": (TEXT, None, "optimizer, for example sgd(momentum=0.9)"),
    "lr": (REAL, None, "learning rate for the global batch"),
    "schedule": (TEXT, None, "learning-rate schedule, for example cosine(warmup=5%)"),
    "clip": (REAL, None, "clip the gradient to this norm"),
    "loss": (ANY, CROSS_ENTROPY, "name of a function in torch.nn.functional, or a function"),
    "shape": (TEXT, None, "shape of one sample, for example 1x28x28"),
    "classes": (INTEGER, None, "number of classes; default: inferred from the labels"),
    "validation": (ANY, None, "fraction of the rows, or a boolean column"),
    "until": (TEXT, None, "stop when a condition is met, for example val_acc>=0.97"),
    "patience": (INTEGER, None, "stop after this many epochs without improvement in val_loss"),
    "store": (TEXT, None, "directory or URL that the driver and the executors can access"),
    "timeout": (REAL, 300.0, "stop the run if a worker makes no progress for this many seconds"),
    "verbose": (INTEGER, 1, "0 disables progress output on the driver"),
}
JOB_FIELDS = ("batch", "epochs", "optimizer", "lr", "schedule", "clip", "until", "patience")


class PacelineEstimator(
    Estimator[PacelineModel],
    shared.HasFeaturesCol,
    shared.HasLabelCol,
    shared.HasPredictionCol,
    shared.HasRawPredictionCol,
    shared.HasSeed,
    DefaultParamsReadable["PacelineEstimator"],
    DefaultParamsWritable,
):
    """Trains a network on a DataFrame, in barrier tasks on the executors.

        estimator = PacelineEstimator(model="cnn-small", strategy="switch(allreduce, ps, at=50%)",
                                      num_workers=4, shape="1x28x28", store="hdfs://...")
        model = estimator.fit(train)
        model.transform(test)

    The DataFrame's features and labels are written to the store once, as Parquet, and read from
    there by the workers. Columns and seed are Params with Spark's standard names; the others are
    those of `TRAINING`. Raises UsageError for invalid input before anything runs; RunFailed or
    Diverged like `paceline.train`.
    """

    @keyword_only
    def __init__(self, **params: Any) -> None:
        super().__init__()
        for name, (converter, default, meaning) in TRAINING.items():
            setattr(self, name, Param(self, name, meaning, converter))
            if default is not None:
                self._setDefault(**{name: default})
        self._setDefault(
            featuresCol="features",
            labelCol="label",
            predictionCol="prediction",
            rawPredictionCol="rawPrediction",
            seed=0,
        )
        self.setParams(**self._input_kwargs)

    def value_of(self, name: str) -> Any:
        """Returns the value of a Param, or None if it is not set."""
        param = self.getParam(name)
        return self.getOrDefault(param) if self.isDefined(param) else None

    @keyword_only
    def setParams(self, **params: Any) -> PacelineEstimator:  # noqa: N802
        """Sets several Params by name; None leaves a Param unchanged."""
        given = self._input_kwargs
        for name in given:
            if not self.hasParam(name):
                known = [param.name for param in self.params]
                raise UsageError(
                    f"PacelineEstimator has no parameter {name!r}; {suggest_name(name, known)}"
                )
        try:
            self._set(**given)
        except TypeError as error:
            raise UsageError(f"PacelineEstimator: {error}") from None
        return self

    def write(self) -> Any:
        for name in ("model", "loss"):
            value = self.value_of(name)
            if not isinstance(value, str):
                raise UsageError(
                    f"an estimator whose {name} is a {type(value).__name__} cannot be saved; pass "
                    "it as 'file.py:function' (a fitted model can always be saved)"
                )
        return super().write()

    def _fit(self, dataset: DataFrame) -> PacelineModel:
        session = dataset.sparkSession
        strategy = parse_strategy(self.value_of("strategy"))
        workers = self.value_of("num_workers")
        store = as_store(self.value_of("store"), setting(session, "spark.master"))
        model, loss = self.value_of("model"), self.value_of("loss")
        loss = None if loss == CROSS_ENTROPY else loss
        written = export_dataframe(dataset, self._columns(model, loss), store.url)
        files = pack_job(model, loss, self._fields(written))
        run = new_run_name(str(strategy))
        with (
            tempfile.TemporaryDirectory(prefix="paceline-job-") as folder,
            store.stage_run(run) as out,
            terminal_reporter(str(strategy), quiet=not self.value_of("verbose")) as show,
        ):
            file = write_job(files, Path(folder))
            launcher = EngineLauncher(
                SparkEngine(session),
                workers,
                ProjectBundle(project=read_project(Path(folder))),
                # The number of cores that Spark assigns to a task.
                threads=int(setting(session, "spark.task.cpus", "1")),
            )
            timeout_s = self.value_of("timeout")
            options = RunOptions(
                out=out, workers=workers, timeout_s=timeout_s, launcher=launcher, on_event=show
            )
            result = run_training(JobRef(file=file, hash=hash_file(file)), strategy, options)
            files["model.safetensors"] = (out / "model.safetensors").read_bytes()
        facts = {
            "shape": list(self._shape(written)),
            "classes": written.classes,
            "result": result,
            "run": store.run_url(run),
        }
        fitted: PacelineModel = self._copyValues(PacelineModel(files, facts))
        return fitted

    def _columns(self, model: Any, loss: Any) -> TrainingColumns:
        validation = self.value_of("validation")
        if isinstance(validation, int | float) and not 0 <= validation < 1:
            raise UsageError(f"validation {validation}: must be a fraction in [0, 1) or a column")
        keras_loss = getattr(model, "loss", None) if not isinstance(model, str) else None
        integer = loss is None or loss == "nll_loss"
        if keras_loss is not None:
            name = keras_loss if isinstance(keras_loss, str) else getattr(keras_loss, "name", "")
            integer = str(name).endswith("categorical_crossentropy")
        return TrainingColumns(
            self.getFeaturesCol(), self.getLabelCol(), integer, validation, self.getSeed()
        )

    def _shape(self, written: ExportedDataFrame) -> tuple[int, ...]:
        text = self.value_of("shape")
        shape = parse_shape(text) if text else (written.width,)
        if prod(shape) != written.width:
            raise UsageError(
                f"shape {text} has {prod(shape)} values, but features have {written.width}"
            )
        return shape

    def _fields(self, written: ExportedDataFrame) -> dict[str, Any]:
        """Returns the fields of the job as JSON-compatible data."""
        fields = {name: self.value_of(name) for name in JOB_FIELDS}
        fields |= {
            "data": f"{written.train}/*.parquet",
            "val_data": f"{written.val}/*.parquet" if written.val else None,
            "features": FEATURES,
            "label": LABEL,
            "format": "parquet",
            "shape": "x".join(map(str, self._shape(written))),
            "classes": self.value_of("classes") or written.classes,
            "seed": self.getSeed(),
        }
        return {name: value for name, value in fields.items() if value is not None}

"""Opens a Spark session for a run from the command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from paceline.errors import RunFailed, UsageError
from paceline.spark.engine import is_connect, summarize_spark_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def open_session(master: str | None) -> SparkSession:
    """Opens a session as configured by spark-defaults.conf and the environment.

    Raises UsageError if pyspark is missing, RunFailed if no session can be opened.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise UsageError("pyspark is not installed; run pip install 'paceline[spark]'") from None
    builder = SparkSession.builder.appName("paceline")
    if master is not None:
        builder = builder.master(master)
    # Defaults to this interpreter's path: clusters often share their environments.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    try:
        session = builder.getOrCreate()
    except Exception as error:
        raise RunFailed(
            f"cannot open a Spark session at {master or 'the configured master'}: "
            f"{summarize_spark_error(error)}"
        ) from None
    if not is_connect(session):
        session.sparkContext.setLogLevel("ERROR")
    return session

"""A Spark session for one run from the command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from paceline.errors import RunFailed, UsageError
from paceline.spark.engine import is_connect, summarize_spark_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def open_session(master: str | None) -> SparkSession:
    """As spark-defaults.conf and the environment say; the master may be named.

    Raises UsageError where pyspark is missing, RunFailed where no session can be had.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise UsageError("pyspark is not installed: pip install 'paceline[spark]'") from None
    builder = SparkSession.builder.appName("paceline")
    if master is not None:
        builder = builder.master(master)
    # The same path as here, unless told otherwise: clusters often share their environments.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    try:
        session = builder.getOrCreate()
    except Exception as error:
        raise RunFailed(
            f"no Spark session at {master or 'the configured master'}: "
            f"{summarize_spark_error(error)}"
        ) from None
    if not is_connect(session):
        session.sparkContext.setLogLevel("ERROR")
    return session

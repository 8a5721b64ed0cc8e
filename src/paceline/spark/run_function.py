"""Runs a function on the executors, with the environment variables of torch.distributed set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

from paceline.errors import RunFailed, UsageError
from paceline.spark.engine import BarrierJob, check_session, summarize_spark_error, wait_for_slots


def run(
    function: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    session: SparkSession | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in `num_workers` simultaneous barrier tasks.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in each, so
    that `torch.distributed.init_process_group("gloo")` works. Return values must be
    JSON-compatible; the list is in the order of ranks. Raises RunFailed with the worker's error if
    one fails, or on timeout.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers {num_workers}: must be at least 1")
    session = session or SparkSession.getActiveSession()
    if session is None:
        raise UsageError("no active Spark session; create one with SparkSession.builder")
    check_session(session)
    wait_for_slots(session, num_workers)
    task = make_task_function(function, args, kwargs or {}, num_workers)
    job = BarrierJob(session, num_workers, task)
    try:
        job.thread.join(timeout_s)
        if job.thread.is_alive():
            raise RunFailed(f"the function did not return on all workers within {timeout_s:g} s")
    finally:
        job.cancel()
    if job.error is not None:
        raise RunFailed(summarize_spark_error(job.error), str(job.error))
    assert job.results is not None
    return [json.loads(text) for text in job.results]


def make_task_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> Callable[[int], str]:
    def call(index: int) -> str:
        import json
        import os
        import socket
        import traceback

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        # The address at which other executors reach this one.
        address = context.getTaskInfos()[index].address.rsplit(":", 1)[0]
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
            local = json.dumps({"address": address, "port": port})
            others = [json.loads(text) for text in context.allGather(local)]
        local_ranks = [rank for rank, other in enumerate(others) if other["address"] == address]
        os.environ.update(
            RANK=str(index),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(local_ranks.index(index)),
            LOCAL_WORLD_SIZE=str(len(local_ranks)),
            MASTER_ADDR=others[0]["address"],
            MASTER_PORT=str(others[0]["port"]),
        )
        try:
            answer = function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            # Not in the raise statement: Spark's traceback contains the source line, too.
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            text = f"paceline error: worker {index} on {socket.gethostname()}: {text}"
            raise RuntimeError(text) from error
        try:
            return json.dumps(answer)
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"paceline error: worker {index} returned a value that is not JSON-compatible "
                f"({error}); return numbers, text, lists or dicts, and write tensors to a file"
            ) from None

    return call

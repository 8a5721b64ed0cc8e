"""`run(function, num_workers)`: own code on the executors, with torch's variables set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import RunFailed, UsageError
from paceline.spark.engine import BarrierJob, check_session, summarize_spark_error, wait_for_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    function: Callable[..., Any],
    num_workers: int = 2,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    session: SparkSession | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `num_workers` barrier tasks at the same time.

    Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, so
    that `torch.distributed.init_process_group("gloo")` works as it is. What they return must be
    plain data (JSON); the list is in the order of ranks. Raises RunFailed with the worker's own
    error when one fails, or at the deadline.
    """
    if num_workers < 1:
        raise UsageError(f"num_workers is {num_workers}: at least one is needed")
    session = session or active_session()
    check_session(session)
    wait_for_slots(session, num_workers)
    job = BarrierJob(
        session,
        num_workers,
        make_task_function(function, args, kwargs or {}, num_workers),
        lambda why: None,
    )
    try:
        job.thread.join(timeout_s)
        if job.thread.is_alive():
            raise RunFailed(f"the function did not return on all workers within {timeout_s:g} s")
    finally:
        if job.thread.is_alive():
            job.cancel()
    if job.error is not None:
        raise RunFailed(summarize_spark_error(job.error), str(job.error))
    assert job.results is not None
    return [json.loads(text) for text in job.results]


def active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    if found is None:
        raise UsageError("there is no active Spark session: make one with SparkSession.builder")
    return found


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
        # The address of a machine as its executor is known by to the others.
        address = context.getTaskInfos()[index].address.rsplit(":", 1)[0]
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
            mine = json.dumps({"address": address, "port": port, "host": socket.gethostname()})
            others = [json.loads(text) for text in context.allGather(mine)]
        here = [rank for rank, other in enumerate(others) if other["address"] == address]
        os.environ.update(
            RANK=str(index),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(here.index(index)),
            LOCAL_WORLD_SIZE=str(len(here)),
            MASTER_ADDR=others[0]["address"],
            MASTER_PORT=str(others[0]["port"]),
        )
        try:
            answer = function(*args, **kwargs)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise RuntimeError(
                f"paceline says: worker {index} on {socket.gethostname()}: {text}"
            ) from error
        try:
            return json.dumps(answer)
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"paceline says: worker {index} returned what is no plain data ({error}): "
                "return numbers, text, lists or dicts, and write tensors to a file"
            ) from None

    return call

"""Threads that prepare data in the background and never keep a process from exiting."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple[Future[Any], Callable[[], Any]]


class DaemonThreadPool:
    """Runs tasks in order of submission on up to `threads` threads, started on demand.

    The threads never keep a process from exiting.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._max_threads = threads
        self._name = name

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Schedules a task; the future receives its result or exception."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        if len(self._threads) < self._max_threads:
            # Daemon threads: a read that hangs must not outlive the run.
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task, item

    def close(self) -> None:
        """Cancels pending tasks; threads exit after their current task."""
        with suppress(queue.Empty):
            while True:
                item = self._tasks.get_nowait()
                if item is not None:
                    item[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        self._threads = []


def results_in_order(futures: Iterator[Future[T]], ahead: int) -> Iterator[T]:
    """Yields the results in order; at most `ahead` futures are taken from the iterator early."""
    pending = deque(islice(futures, ahead))
    while pending:
        yield pending.popleft().result()
        pending.extend(islice(futures, 1))

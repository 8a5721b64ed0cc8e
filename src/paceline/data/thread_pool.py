"""Background threads that never keep a process from exiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreadPool:
    """Runs tasks in order of submission on up to `threads` threads, started on demand."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
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
        while True:
            try:
                item = self._tasks.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        self._threads = []

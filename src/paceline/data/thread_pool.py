"""A few threads that work ahead of somebody; they never keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreadPool:
    """Tasks in the order they come, on at most so many threads, which start when needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._most = threads
        self._name = name

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """What the task gives, or raises, comes out of the future."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        if len(self._threads) < self._most:
            # Daemons: a read that hangs must not outlive the run that wanted it.
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
        """Threads end after what they are doing; tasks not yet begun are dropped."""
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

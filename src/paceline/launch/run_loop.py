"""Event loops of runs: one per run, or one in a thread for several runs.

Connections that outlive a run need a loop that keeps running, so that heartbeats are answered
between the runs, while this thread plans, compares and writes.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.launch.signals import call_on_signals

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, T]]


def run_async(main: Main[T]) -> T:
    """asyncio.run, also where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    with LoopThread() as thread:
        return thread.run(main)


class LoopThread:
    """An event loop in a thread, on which coroutines run one after another."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="run-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def run(self, main: Main[T]) -> T:
        """Runs a coroutine to its end; an interrupt of this thread, or SIGTERM, cancels it."""
        began: Future[asyncio.Task[Any]] = Future()

        async def outer() -> T:
            task = asyncio.current_task()
            assert task is not None
            began.set_result(task)
            return await main()

        running = asyncio.run_coroutine_threadsafe(outer(), self._loop)

        def cancel() -> None:
            task = began.result()
            if not task.cancelling():  # A second signal must not interrupt the clean-up.
                self._loop.call_soon_threadsafe(task.cancel)

        with call_on_signals(cancel):
            while True:
                try:
                    return running.result()
                except KeyboardInterrupt:
                    if running.done():
                        raise
                    cancel()

    def close(self) -> None:
        """Ends the loop and its thread; what still runs on it is cancelled."""
        self.run(_cancel_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

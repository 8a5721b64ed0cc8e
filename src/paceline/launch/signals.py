"""Signals that end a run like Ctrl-C: it is cancelled, cleaned up, and its result is written."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator


def cancel_on_signals() -> None:
    """Cancels the current task on SIGTERM, by which batch systems end a job, and on SIGHUP, the
    end of a terminal. A SIGHUP that is ignored (nohup) stays ignored."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        if not task.cancelling():  # A second signal must not interrupt the clean-up.
            task.cancel()

    def hang_up() -> None:
        leave_terminal()
        cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


@contextlib.contextmanager
def call_on_signals(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` on the same signals in a block that waits for a run in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        action()

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Sends output nowhere if it goes to a terminal: one that is closed fails every write."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())

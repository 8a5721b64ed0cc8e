"""Signals that end a run like Ctrl-C: it is cancelled, cleaned up, and its result is written."""

import asyncio
import os
import signal
import sys
import threading


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


def leave_terminal() -> None:
    """Sends output nowhere if it goes to a terminal: one that is closed fails every write."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())

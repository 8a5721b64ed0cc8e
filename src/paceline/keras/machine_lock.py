"""A lock of this machine's workers, for functions that download or write shared files."""

import fcntl
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_held = False


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets one worker per machine call a function while the others wait.

    Functions that are called inside it run at once, because the lock is already held.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        global _held
        if _held:
            return function(*args, **options)
        path = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}.lock"
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _held = True
            try:
                return function(*args, **options)
            finally:
                _held = False

    return call

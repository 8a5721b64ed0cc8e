"""`paceline dashboard`."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline.cli.commands import argument, command
from paceline.options import Option


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    port: Annotated[int, Field(ge=0, le=65535), Option(metavar="PORT")] = 8321
    """Port to listen on; 0 picks a free port."""
    host: Annotated[str, Option(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; addresses other than localhost require a token."""
    token: bool = False
    """Require a token on localhost too."""


@command
def dashboard(
    folder: Annotated[Path, argument("Run folder, or a directory of run folders.")],
    /,
    *,
    options: DashboardOptions,
) -> None:
    from paceline.dashboard.server import Dashboard

    board = Dashboard(folder, host=options.host, port=options.port, ask_token=options.token)
    print(f"dashboard: {board.url}", flush=True)  # Immediately, also for a reader of a pipe.
    if not board.on_loopback:
        print(
            "paceline: anyone with this address can see the runs; the connection is not encrypted",
            file=sys.stderr,
        )
    # SIGTERM ends it like Ctrl-C: exit status 130, and the port is released.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    board.serve()

"""`paceline dashboard`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run, or a folder of runs.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8321,
    host: Annotated[
        str, typer.Option(help="The address to listen on; with another than loopback a token.")
    ] = "127.0.0.1",
    token: Annotated[
        bool, typer.Option("--token", help="Ask for a token on loopback too.")
    ] = False,
) -> None:
    from paceline.dashboard.server import Dashboard

    board = Dashboard(folder, host=host, port=port, ask_token=token)
    print(f"dashboard: {board.url}", flush=True)  # At once, also where somebody reads from a pipe.
    if not board.on_loopback:
        typer.echo(
            "anyone who has this address sees the runs; the connection is not encrypted", err=True
        )
    # Whoever ends it, as a run: exit status 130, the port given back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    board.serve()

"""A server process: the server of `strategies`, and what is told of it."""

from __future__ import annotations

import os
import socket

import torch

from paceline.comm.control import Control
from paceline.strategies.server import Server, warm_up
from paceline.telemetry.events import ServerBegan, ServerEnded
from paceline.telemetry.phases import ServerClock
from paceline.telemetry.resources import allowed_cores, quota_cores
from paceline.telemetry.sampler import Counters, Serving
from paceline.worker.agent import peak_rss_bytes
from paceline.worker.assignment import Assignment
from paceline.worker.files import open_files
from paceline.worker.witness import Witness


def serve(assignment: Assignment, control: Control, wait_s: float) -> None:
    """Serve until the coordinator says stop."""
    files = open_files(assignment, control)
    clock = ServerClock(files.began_wall_s)
    counters, serving = Counters(), Serving()
    witness = Witness(assignment, control, files.events, clock, counters, serving)
    witness.tell(
        ServerBegan(
            t=round(clock.now_s(), 6),
            server=assignment.index,
            beside=assignment.index % assignment.workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            cores=allowed_cores(),
            quota=quota_cores(),
        )
    )
    witness.start()
    torch.set_num_threads(1)
    warm_up()
    server = Server(
        index=assignment.index,
        host=assignment.bind or control.local_address,
        token=assignment.token,
        control=control,
        timeout_s=wait_s,
        clock=clock,
        counters=counters,
        serving=serving,
    )
    server.before_close = witness.look
    server.run()
    witness.stop()
    witness.tell(
        ServerEnded(
            t=round(clock.now_s(), 6),
            phases=clock.totals_s(),
            bytes_sent=server.bytes_sent,
            bytes_received=server.bytes_received,
            peak_rss_bytes=peak_rss_bytes(),
        )
    )

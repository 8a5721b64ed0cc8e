"""Entry point of a server process, including its telemetry."""

import os
import socket

import torch

from paceline.comm.wire import ControlConnection
from paceline.strategies.ps.server import ParameterServerProcess, warm_up_torch
from paceline.telemetry.events import ServerEnded, ServerStarted
from paceline.telemetry.phase_clock import ServerClock
from paceline.telemetry.proc_stats import allowed_cores, network_namespace, quota_cores
from paceline.telemetry.sampler import ServerCounters, StepCounters
from paceline.worker.assignment import Assignment
from paceline.worker.run_files import TelemetryReporter, open_run_files, peak_rss_bytes


def run_server(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    """Serves until the coordinator sends StopServer."""
    files = open_run_files(assignment, control)
    clock = ServerClock(files.began_wall_s)
    counters, serving = StepCounters(), ServerCounters()
    witness = TelemetryReporter(assignment, control, files.events, clock, counters, serving)
    witness.report(
        ServerStarted(
            t=round(clock.now_s(), 6),
            server=assignment.index,
            beside=assignment.index % assignment.workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            namespace=network_namespace(),
            cores=allowed_cores(),
            quota=quota_cores(),
        )
    )
    witness.start()
    torch.set_num_threads(1)
    warm_up_torch()
    server = ParameterServerProcess(
        index=assignment.index,
        host=assignment.bind or control.local_address,
        token=assignment.token,
        control=control,
        timeout_s=wait_s,
        clock=clock,
        counters=counters,
        serving=serving,
    )
    server.before_close = witness.sample_now
    server.run()
    witness.stop()
    witness.report(
        ServerEnded(
            t=round(clock.now_s(), 6),
            phases=clock.totals_s(),
            bytes_sent=server.bytes_sent,
            bytes_received=server.bytes_received,
            peak_rss_bytes=peak_rss_bytes(),
        )
    )

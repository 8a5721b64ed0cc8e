"""Measures bytes per second of gradients to a parameter server and weights back, by transport.

python bench/push_pull.py [--floats 850000] [--workers 2] [--seconds 3] [--repeats 5] [--save]

Workers and server are processes with the code of real runs under `ps`; only the coordinator is a
stub that numbers the pushes. An exchange is that of a step: copy the gradient, push, update (plain
SGD), pull. `shared` and `tcp` are Paceline's transports; `tcp alone` is push and pull without the
first copy and the update, and `bare` are processes that only send and receive the same bytes
through sockets in a loop. Bytes count once in each direction.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import secrets
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paceline.protocol.messages import (
    ApplyUpdate,
    GradientPushed,
    GradientRef,
    Lease,
    ServerReady,
    StopServer,
)
from paceline.state import Section
from paceline.strategies.ps.server import ParameterServerProcess, warm_up_torch
from paceline.strategies.ps.store import ShardState
from paceline.strategies.ps.transport import ParameterTransport
from paceline.strategies.ps.worker import ParameterServerRunner
from paceline.strategies.registry import parse_strategy
from paceline.strategies.runner import PhaseContext, Replica, TrainStep, WorkerContext
from paceline.telemetry.phase_clock import PhaseClock
from paceline.worker.process_settings import tune_malloc
from results_store import keep

HERE = Path(__file__).parent
WAIT_S = 60.0
WAYS = {
    "shared": "ps(via=shared)",
    "tcp": "ps(via=network)",
    "tcp alone": "ps(via=network)",
}


class Orders:
    """Coordinator stub for a server: every push is the next update."""

    def __init__(self, workers: list[Connection]) -> None:
        self._orders: queue.Queue[Any] = queue.Queue()
        self._ready: queue.Queue[Any] = queue.Queue()
        self._version = 0
        self._lock = threading.Lock()
        for connection in workers:
            threading.Thread(target=self._number, args=(connection,), daemon=True).start()

    def _number(self, connection: Connection) -> None:
        connection.send(self._ready.get(timeout=WAIT_S))
        while (pushed := connection.recv()) is not None:
            with self._lock:
                self._version += 1
                self._orders.put(
                    ApplyUpdate(self._version, (GradientRef(pushed[0], pushed[1], 1.0),), 1.0, None)
                )
                connection.send(self._version)
        self._orders.put(StopServer())

    def send(self, message: Any) -> None:
        if isinstance(message, ServerReady):
            for _ in range(64):
                self._ready.put((message.host, message.port))

    def receive(self) -> Any:
        return self._orders.get()


class Numbered:
    """Coordinator stub for a worker."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.version = 0

    def send(self, message: Any) -> None:
        assert isinstance(message, GradientPushed)
        self.connection.send((message.worker, message.handle))
        self.version = self.connection.recv()


def serve(token: str, connections: list[Connection]) -> None:
    torch.set_num_threads(1)
    tune_malloc()
    warm_up_torch()
    control: Any = Orders(connections)
    ParameterServerProcess(
        index=0, host="127.0.0.1", token=token, control=control, timeout_s=WAIT_S
    ).run()
    os._exit(0)  # as a server's process does, without waiting for its threads


def exchange(
    way: str,
    rank: int,
    size: int,
    token: str,
    floats: int,
    seconds: float,
    connection: Connection,
    go: Any,
    result: Connection,
) -> None:
    torch.set_num_threads(1)
    tune_malloc()
    address = connection.recv()
    model = torch.nn.Linear(floats, 1, bias=False)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    control: Any = Numbered(connection)
    no_group: Any = None
    context = WorkerContext(
        rank=rank,
        size=size,
        replica=replica,
        group=no_group,
        control=control,
        clock=PhaseClock(time.time()),
        token=token,
        timeout_s=WAIT_S,
        phase=PhaseContext(servers=(address,)),
    )
    runner: Any = ParameterServerRunner(parse_strategy(WAYS[way]), context)  # type: ignore[arg-type]
    alone = way == "tcp alone"
    if alone:
        hold_bytes(runner._transports[0], 4 * floats)
    else:
        weights = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
        runner.import_state(Section(weights))
    fresh = torch.full((1, floats), 1e-6)
    lease = Lease(0, 0, 0, size, rank, rank + 1)
    go.wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work = TrainStep(lease, count, control.version)
        runner.begin_step(work)
        for view in runner._out_views:  # where backward's hook leaves it
            if not alone:
                view.copy_(fresh)
            model.weight.grad = view
        runner.finish_step(work)
        count += 1
    took = time.perf_counter() - began
    go.wait()  # a server ends with the first that leaves
    runner.close()
    connection.send(None)
    result.send(2 * count * floats * 4 / took)


def hold_bytes(transport: ParameterTransport, nbytes: int) -> None:
    """Makes a server hold this many bytes without anything to update in them."""
    weights = torch.zeros(nbytes, dtype=torch.uint8)
    transport.load(
        ShardState(slices=(), options=(), optimizer="", codec=None, weights=weights, slots=())
    )


def answer_bare(listener: socket.socket, workers: int, nbytes: int) -> None:
    def one(link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer, weights = bytearray(nbytes), bytes(nbytes)
        while receive(link, memoryview(buffer)):
            link.sendall(weights)

    threads = [threading.Thread(target=one, args=(listener.accept()[0],)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(link: socket.socket, target: memoryview) -> bool:
    got = 0
    while got < len(target):
        count = link.recv_into(target[got:])
        if count == 0:
            return False
        got += count
    return True


def loop_bare(port: int, nbytes: int, seconds: float, go: Any, connection: Any) -> None:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient, buffer = bytes(nbytes), bytearray(nbytes)
    go.wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        link.sendall(gradient)
        receive(link, memoryview(buffer))
        count += 1
    took = time.perf_counter() - began
    link.close()
    connection.send(2 * count * nbytes / took)


def measure(way: str, workers: int, floats: int, seconds: float) -> float:
    """Returns bytes per second of all workers together."""
    context = multiprocessing.get_context("spawn")
    go = context.Barrier(workers)
    pipes = [context.Pipe() for _ in range(workers)]
    if way == "bare":
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server: Any = context.Process(target=answer_bare, args=(listener, workers, 4 * floats))
        members = [
            context.Process(target=loop_bare, args=(port, 4 * floats, seconds, go, there))
            for _, there in pipes
        ]
        ends = [here for here, _ in pipes]
    else:
        token = secrets.token_hex(16)
        # The coordinator's stand-in lives in the server's process.
        server = context.Process(target=serve, args=(token, [here for here, _ in pipes]))
        results = [context.Pipe() for _ in range(workers)]
        members = [
            context.Process(
                target=exchange,
                args=(way, rank, workers, token, floats, seconds, pipe[1], go, results[rank][1]),
            )
            for rank, pipe in enumerate(pipes)
        ]
        ends = [here for here, _ in results]
    server.start()
    for member in members:
        member.start()
    try:
        rates = []
        for end in ends:
            if not end.poll(WAIT_S + seconds):
                raise RuntimeError(f"{way}: a worker said nothing for {WAIT_S:g} s")
            rates.append(end.recv())
        return float(sum(rates))
    finally:
        for process in (*members, server):
            process.join(5)
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--floats", type=int, default=850_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[float]] = {"shared": [], "tcp": [], "tcp alone": [], "bare": []}
    for repeat in range(given.repeats):
        for way, rates in found.items():
            rates.append(measure(way, given.workers, given.floats, given.seconds) / 1e9)
        results = ", ".join(f"{way} {rates[-1]:.2f} GB/s" for way, rates in found.items())
        print(f"{repeat + 1}/{given.repeats}: {results}", flush=True)
    for way, rates in found.items():
        print(f"{way}: {statistics.median(rates):.2f} GB/s ({min(rates):.2f} to {max(rates):.2f})")
    ratios = [a / b for a, b in zip(found["tcp alone"], found["bare"], strict=True)]
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"tcp alone / bare: x{middle:.2f} ({least:.2f} to {most:.2f})")
    if given.save:
        about = {k: v for k, v in vars(given).items() if k != "save"}
        body = {"about": about, "gigabytes_per_s": found, "tcp_alone_over_bare": ratios}
        keep("push-pull", body)


if __name__ == "__main__":
    main()

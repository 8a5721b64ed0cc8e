"""Measures this machine as a pool of one in a few seconds: a step, and exchanges of two processes.

Contention between workers is not measured but modeled: they share the cores.
"""

import contextlib
import datetime
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.comm.shm.allreduce import SharedRegion, aligned_size
from paceline.comm.shm.segment import create_segment, open_segment, shm_domain_id, unlink_segment
from paceline.errors import PacelineError
from paceline.job import Job, display_name
from paceline.launch.run_options import usable_cores

WARM_UP, ROUNDS = 3, 12
PAUSE_S = 0.005
"""Pause before each exchange: a real worker computes in between, and its peers must wake up."""
TIMEOUT_S = 60.0
SPAWN = multiprocessing.get_context("spawn")


def probe_machine(job: Job, workers: int) -> Pool:
    """Measures a step of the job's model with one worker's threads, and both kinds of exchange."""
    from paceline.worker.job_builder import load_job_data
    from paceline.worker.step_timing import with_threads

    cores = usable_cores()
    times = with_threads(
        max(1, cores // workers), job, load_job_data(job), max(2, job.batch // workers)
    )
    cost = StepCost(fixed_s=times.fixed_s, per_sample_s=times.per_sample_s, update_s=times.update_s)
    return Pool(
        name="this machine, probed",
        hosts=(
            Host(
                host="localhost",
                cores=cores,
                workers=workers,
                measured={display_name(job.model) or "model": cost},
            ),
        ),
        jitter=Jitter(cv=min(2.0, times.cv)),
        **probe_backends(times.parameter_bytes),
    )


# ---- exchanges between two processes ----------------------------------------------------------


def probe_backends(nbytes: int, *, shared: bool = True) -> dict[str, Any]:
    """Measures the exchange rates of a pool for gradients of `nbytes`.

    With `shared`, uses shared memory if possible, like processes of one machine; otherwise sockets,
    like processes of several machines.
    """
    shared = shared and shm_domain_id() is not None
    least_s, sum_s = probe_collective(4, shared), probe_collective(nbytes, shared)
    send_s, latency_s = probe_transfer(nbytes, shared)
    return {
        "link": Link(mbit_s=float("inf"), latency_ms=1e3 * latency_s),
        # With two processes, an all-reduce has two hops and sends each byte once.
        "hop_ms": 1e3 * max(0.0, least_s / 2 - latency_s),
        "collective_gb_s": nbytes / max(sum_s - least_s, sum_s / 10) / 1e9,
        "transfer_gb_s": nbytes / max(send_s, 1e-9) / 1e9,
        "control_ms": 1e3 * latency_s / 2,
    }


def probe_collective(nbytes: int, shared: bool) -> float:
    """Returns the seconds of an all-reduce of `nbytes` between two local processes."""
    if shared:
        count = max(1, nbytes // 4)
        name = create_segment(SharedRegion.size_for(2, aligned_size([4 * count])))
        try:
            return _run_pair(_sum_in_memory, name, count)
        finally:
            unlink_segment(name)
    with tempfile.TemporaryDirectory() as folder:
        return _run_pair(_sum_together, str(Path(folder) / "store"), nbytes)


def probe_transfer(nbytes: int, shared: bool) -> tuple[float, float]:
    """Returns the seconds to send `nbytes` to another process, and a short message, one way."""
    token = secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        memory = None
        if shared:
            memory = create_segment(max(1, nbytes))
            stack.callback(unlink_segment, memory)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        stack.enter_context(_processes(_send_back, (port, token, nbytes, memory)))
        stack.enter_context(listener)
        return _send_and_wait(listener, token, nbytes, memory)


@contextlib.contextmanager
def _processes(target: Callable[..., None], *arguments: tuple[Any, ...]) -> Iterator[None]:
    """Runs one process per tuple of arguments; kills those that do not end."""
    children = [SPAWN.Process(target=target, args=args, daemon=True) for args in arguments]
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.join(TIMEOUT_S)
            if child.is_alive():
                child.kill()


def _run_pair(target: Callable[..., None], *args: Any) -> float:
    results = SPAWN.Queue()
    with _processes(target, *((rank, results, *args) for rank in range(2))):
        try:
            timings = [results.get(timeout=TIMEOUT_S) for _ in range(2)]
        except Exception as error:
            raise PacelineError(
                f"the probe between two processes timed out after {TIMEOUT_S:g} s ({error!r})"
            ) from None
    # The process that arrives last does not wait, so its time is that of the exchange.
    return float(statistics.median(min(same) for same in zip(*timings, strict=True)))


def _time_rounds(exchange: Callable[[], object]) -> list[float]:
    """Returns the seconds of each exchange after the warm-up."""
    times = []
    for _ in range(WARM_UP + 2 * ROUNDS):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def _sum_in_memory(rank: int, results: Any, name: str, count: int) -> None:
    import torch

    from paceline.comm.process_group import SharedMemoryGroup
    from paceline.comm.shm.allreduce import SharedMemoryAllReduce

    torch.set_num_threads(1)
    arena = SharedRegion(name, range(2), rank, aligned_size([4 * count]), TIMEOUT_S)
    sums = SharedMemoryAllReduce(SharedMemoryGroup(arena, None, 1), [count], [torch.float32])

    def exchange() -> None:
        sums.mark_filled()
        sums.finish()

    results.put(_time_rounds(exchange))


def _sum_together(rank: int, results: Any, store: str, nbytes: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),  # type: ignore[attr-defined]
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    tensor = torch.zeros(max(1, nbytes // 4))
    results.put(_time_rounds(lambda: dist.all_reduce(tensor)))
    dist.destroy_process_group()


def _send_back(port: int, token: str, nbytes: int, shared: str | None) -> None:
    from paceline.comm.wire import Channel

    channel = Channel.connect("127.0.0.1", port, token=token, peer="the probe", timeout_s=TIMEOUT_S)
    buffer = memoryview(bytearray(max(1, nbytes)))
    memory = memoryview(open_segment(shared, max(1, nbytes))) if shared is not None else None
    for _ in range(2 * (WARM_UP + ROUNDS)):
        head, size = channel.receive_head(max_body=len(buffer))
        if size:
            channel.receive_into(buffer[:size])
        elif head["payload"] and memory is not None:
            buffer[:] = memory
        channel.send({"size": size})
    channel.close()


def _send_and_wait(
    listener: socket.socket, token: str, nbytes: int, shared: str | None
) -> tuple[float, float]:
    from paceline.comm.wire import Channel

    listener.settimeout(TIMEOUT_S)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise PacelineError(
            f"the probe's other process did not connect within {TIMEOUT_S:g} s"
        ) from None
    channel = Channel.accept(connection, token=token, peer="the probe", timeout_s=TIMEOUT_S)
    body = memoryview(bytearray(max(1, nbytes)))
    memory = memoryview(open_segment(shared, max(1, nbytes))) if shared is not None else None
    long: list[float] = []
    short: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        for into, has_payload in ((long, True), (short, False)):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            if has_payload and memory is not None:
                memory[:] = body
            views = (body,) if has_payload and memory is None else ()
            channel.send({"op": "probe", "payload": has_payload}, *views)
            channel.receive_head(max_body=0)
            into.append(time.perf_counter() - began)
    channel.close()
    trip = statistics.median(short[WARM_UP:])
    took = max(1e-9, statistics.median(long[WARM_UP:]) - trip)
    # With shared memory each side copies once; with a socket both work concurrently.
    return took / (1 if shared is None else 2), trip / 2

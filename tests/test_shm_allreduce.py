"""Memory shared by processes of one machine: sums, the dead, the hostile, nothing left behind."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from conftest import RunCli, read_result
from paceline.comm.process_group import SharedMemoryGroup
from paceline.comm.shm.allreduce import SharedMemoryAllReduce, SharedRegion, aligned_size
from paceline.comm.shm.segment import (
    SHM_DIR,
    Words,
    create_segment,
    open_segment,
    shm_domain_id,
    unlink_segment,
)
from paceline.errors import PeerLost, WireError

pytestmark = pytest.mark.skipif(
    shm_domain_id() is None, reason="shared memory needs Linux on x86-64 with /dev/shm"
)
FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
"""For processes that use torch's collectives, whose threads a fork would not have."""
TIMEOUT_S = 20.0


def left_behind() -> set[str]:
    """Segments of any process, so tests that compare them are exclusive."""
    return {p.name for p in SHM_DIR.glob("paceline-*")}


def values_of(rank: int, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def sum_in(
    name: str, rank: int, size: int, counts: list[int], dtypes: list[Any], steps: int, told: Any
) -> None:
    nbytes = aligned_size([c * d.itemsize for c, d in zip(counts, dtypes, strict=True)])
    arena = SharedRegion(name, range(size), rank, nbytes, TIMEOUT_S)
    sums = SharedMemoryAllReduce(SharedMemoryGroup(arena, None, 1), counts, dtypes)
    found = []
    for step in range(steps):
        for bucket, (count, dtype) in enumerate(zip(counts, dtypes, strict=True)):
            sums.local_bucket(bucket).copy_(values_of(rank, step, count, dtype))
            sums.mark_filled()
            time.sleep(0.001 * ((rank + step) % 3))
        sums.finish()
        found.append(
            [sums.local_bucket(b).clone().view(torch.uint8).tolist() for b in range(len(counts))]
        )
    told.put((rank, found))


@pytest.mark.exclusive
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_have_the_bits_of_adding_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    """Buckets smaller than a piece, odd, and larger than a page; one of another type between."""
    before, steps = left_behind(), 4
    counts, dtypes = [1, 63, 5000], [dtype, torch.float64, dtype]
    nbytes = aligned_size([c * d.itemsize for c, d in zip(counts, dtypes, strict=True)])
    name, told = create_segment(SharedRegion.size_for(size, nbytes)), FORK.Queue()
    workers = [
        FORK.Process(target=sum_in, args=(name, r, size, counts, dtypes, steps, told))
        for r in range(size)
    ]
    for worker in workers:
        worker.start()
    answers = dict(told.get(timeout=TIMEOUT_S) for _ in workers)
    unlink_segment(name)
    for worker in workers:
        worker.join(TIMEOUT_S)
    for step in range(steps):
        for bucket, (count, kind) in enumerate(zip(counts, dtypes, strict=True)):
            total = values_of(0, step, count, kind)
            for rank in range(1, size):
                total.add_(values_of(rank, step, count, kind))
            wanted = total.view(torch.uint8).tolist()
            assert all(answers[r][step][bucket] == wanted for r in range(size))
    assert left_behind() == before


def sum_across(names: list[str], rank: int, meeting: str, count: int, told: Any) -> None:
    """Two workers on each of two machines; the first of each meet by torch's collectives."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, 4)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    leaders = dist.new_group([0, 2])
    mine = [0, 1] if rank < 2 else [2, 3]
    nbytes = aligned_size([8 * count])
    arena = SharedRegion(names[rank // 2], mine, rank, nbytes, TIMEOUT_S)
    sums = SharedMemoryAllReduce(SharedMemoryGroup(arena, leaders, 2), [count], [torch.float64])
    found = []
    for step in range(6):
        sums.local_bucket(0).copy_(values_of(rank, step, count, torch.float64))
        sums.mark_filled()
        time.sleep(0.002 * ((rank + step) % 3))
        sums.finish()
        found.append(sums.local_bucket(0).tolist())
    told.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.exclusive
def test_sums_reach_over_machines_through_their_first_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before, count = left_behind(), 700
    names = [create_segment(SharedRegion.size_for(2, aligned_size([8 * count]))) for _ in range(2)]
    told = SPAWN.Queue()
    meeting = str(tmp_path / "meeting")
    workers = [
        SPAWN.Process(target=sum_across, args=(names, r, meeting, count, told)) for r in range(4)
    ]
    for worker in workers:
        worker.start()
    answers = dict(told.get(timeout=60) for _ in workers)
    for name in names:
        unlink_segment(name)
    for worker in workers:
        worker.join(TIMEOUT_S)
    for step in range(6):
        wanted = sum(values_of(r, step, count, torch.float64) for r in range(4))
        assert isinstance(wanted, torch.Tensor)
        assert all(answers[r][step] == answers[0][step] for r in range(4))
        assert answers[0][step] == pytest.approx(wanted.tolist(), abs=1e-12)
    assert left_behind() == before


def wait_in(name: str, rank: int, told: Any) -> None:
    arena = SharedRegion(name, range(2), rank, 64, TIMEOUT_S)
    told.put("here")
    if rank == 1:
        time.sleep(60)
    try:
        arena.wait_for_all(0, 1)
        told.put("came")
    except PeerLost as error:
        told.put(str(error))


@pytest.mark.exclusive
def test_a_dead_member_is_named_long_before_the_deadline() -> None:
    name = create_segment(SharedRegion.size_for(2, 64))
    # A queue each: a process that is killed may hold the lock of its queue forever.
    queues = [FORK.Queue() for _ in range(2)]
    workers = [FORK.Process(target=wait_in, args=(name, r, queues[r])) for r in range(2)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=TIMEOUT_S) for queue in queues] == ["here", "here"]
    unlink_segment(name)
    began = time.monotonic()
    assert workers[1].pid is not None
    os.kill(workers[1].pid, signal.SIGKILL)  # stays a zombie until it is joined
    said = queues[0].get(timeout=TIMEOUT_S)
    assert "worker 1" in said
    assert "has exited" in said
    assert time.monotonic() - began < 5
    for worker in workers:
        worker.join(TIMEOUT_S)


def test_a_member_that_never_comes_is_named_at_the_deadline() -> None:
    name = create_segment(SharedRegion.size_for(2, 64))
    arena = SharedRegion(name, [4, 7], 4, 64, 0.3)
    unlink_segment(name)
    with pytest.raises(PeerLost, match=r"worker 7 did not arrive within 0\.3 s"):
        arena.wait_for_all(0, 1)


def test_counters_may_pass_32_bits() -> None:
    """The futex compares the lower half of a word, which is 0 again after 2**32 - 1."""
    name = create_segment(SharedRegion.size_for(2, 64))
    region, other = (SharedRegion(name, [0, 1], rank, 64, TIMEOUT_S) for rank in (0, 1))
    unlink_segment(name)
    region._words.values[0] = 2**32 - 2
    assert region.increment(0) == 2**32 - 1
    reached: list[float] = []

    def wait() -> None:
        other.wait_for(0, 0, 2**32)
        reached.append(time.monotonic())

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    assert not reached
    assert region.increment(0) == 2**32
    waiter.join(TIMEOUT_S)
    assert reached
    other.wait_for(0, 0, 2**32 - 1)


def test_words_wait_for_a_condition_until_the_deadline() -> None:
    """Liveness is checked although the word keeps changing; adding wakes nobody by itself."""
    name = create_segment(4096)
    words = Words(open_segment(name, 4096), first_line=1, lines=2)
    unlink_segment(name)
    words.values[9] += 5
    assert words.values[9] == 5
    over, checks = threading.Event(), []

    def keep_waking() -> None:
        while not over.wait(0.01):
            words.values[9] += 1
            words.wake(9)

    thread = threading.Thread(target=keep_waking)
    thread.start()
    try:
        began = time.monotonic()
        alive = functools.partial(checks.append, 1)
        assert not words.wait(9, lambda: False, deadline=began + 0.35, alive=alive)
        assert 0.35 <= time.monotonic() - began < 5
        assert checks
        assert words.wait_for(9, 6, deadline=time.monotonic() + TIMEOUT_S, alive=alive)
    finally:
        over.set()
        thread.join()
    assert not words.wait_for(9, 2**62, deadline=0.0, alive=alive, spin_reads=3)


@pytest.mark.parametrize("name", ["../../etc/passwd", "paceline-", "paceline-" + "g" * 32, ""])
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    with pytest.raises(WireError, match="was not created by Paceline"):
        open_segment(name, 1)


def test_memory_shorter_than_it_should_be_is_refused() -> None:
    name = create_segment(4096)
    try:
        with pytest.raises(WireError, match="4096 bytes, expected 8192"):
            open_segment(name, 8192)
    finally:
        unlink_segment(name)


@pytest.mark.exclusive
def test_no_room_leaves_nothing() -> None:
    before = left_behind()
    with pytest.raises(OSError, match=r"."):
        create_segment(1 << 60)
    assert left_behind() == before


# ---- real runs -------------------------------------------------------------------------------


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


@pytest.mark.exclusive
@pytest.mark.parametrize("workers", [2, 3])
def test_both_ways_train_to_the_same_weights(run_cli: RunCli, tmp_path: Path, workers: int) -> None:
    before = left_behind()
    common = ("--epochs", 1, "--batch", 96, "--workers", workers, "--dtype", "float64", "--quiet")
    for via in ("shared", "network"):
        args = ("--strategy", f"allreduce(via={via})", "--out", tmp_path / via)
        assert run_cli("train", *common, *args).code == 0
        assert read_result(tmp_path / via)["collectives"]["way"] == via
    shared, networked = weights(tmp_path / "shared"), weights(tmp_path / "network")
    for name, tensor in shared.items():
        assert torch.allclose(tensor, networked[name], rtol=1e-12, atol=1e-12)
    assert left_behind() == before


def test_auto_says_what_decided_and_a_resumed_run_keeps_it(run_cli: RunCli, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ("train", "--workers", 3, "--strategy", "allreduce", "--quiet", "--out", out)
    assert run_cli(*args, "--epochs", 1).code == 0
    first = read_result(out)["collectives"]
    assert "ms against" in first["why"]
    assert run_cli(*args, "--epochs", 2, "--resume").code == 0
    again = read_result(out)["collectives"]
    assert again == {**first, "why": "it was chosen before"}


@pytest.mark.exclusive
def test_a_server_on_this_machine_gets_no_bodies(run_cli: RunCli, tmp_path: Path) -> None:
    """Weights and gradients are counted, but do not pass the sockets."""
    before = left_behind()
    args = ("--model", "mlp-300-100", "--epochs", 1, "--workers", 2, "--quiet")
    out = tmp_path / "run"
    done = run_cli("train", *args, "--strategy", "ps(servers=2)", "--out", out)
    assert done.code == 0, done.stderr
    result = read_result(out)
    through_sockets = result["bytes_by_role"]["server"]["received"]
    assert result["bytes_sent"] > 4 * through_sockets
    assert left_behind() == before


def test_full_memory_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    """In a mount namespace whose shared memory has next to no room."""
    tiny = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=8k none {SHM_DIR}"
    tried = subprocess.run([*tiny, mount], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        pytest.skip(f"needs a mount namespace of its own: {tried.stderr.strip()}")
    command = f"{sys.executable} -m paceline.cli.main train --epochs 1 --workers 2"
    for strategy in ("allreduce", "ps"):
        line = f"{mount} && exec {command} --strategy {strategy} --out {tmp_path / strategy}"
        done = subprocess.run([*tiny, line], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told = "shared memory not used for gradients: No space left on device"
        assert (done.stdout + done.stderr).count(told) == 1
        assert read_result(tmp_path / strategy)["collectives"]["way"] == "network"

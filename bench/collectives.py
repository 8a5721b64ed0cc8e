"""Measures collectives by size and number of workers next to their cost formulas.

python bench/collectives.py [--workers 2,4] [--rounds 7] [--save] [--pool FILE]

`torch` is torch.distributed over Gloo; `ring`, `tree` and `butterfly` are implemented here with its
point-to-point messages; `shared` is Paceline's sum through shared memory. A formula gives seconds
for n bytes on p workers, with latency a per message and time b per byte (docs/cost-model.md); a and
b are fitted first, to round trips between two of the workers. With --pool the fit of the smallest
number of workers is written to a pool file for plan and twin (`hop_ms`, `collective_gb_s`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.cluster.pool_file import load_pool, write_pool
from paceline.comm.process_group import SharedMemoryGroup
from paceline.comm.shm.allreduce import SharedMemoryAllReduce, SharedRegion, aligned_size
from paceline.comm.shm.segment import create_segment, unlink_segment
from results_store import keep

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 3_400_000, 1 << 24)
"""Bytes; 3.4 MB are 0.85 M numbers."""

Formula = Callable[[float, int, float, float], float]


def log2(p: int) -> int:
    return math.ceil(math.log2(p))


FORMULAS: dict[str, Formula] = {
    "broadcast": lambda n, p, a, b: log2(p) * (a + n * b),
    "reduce": lambda n, p, a, b: log2(p) * (a + n * b),
    "scatter": lambda n, p, a, b: (p - 1) * (a + n / p * b),
    "gather": lambda n, p, a, b: (p - 1) * (a + n / p * b),
    "all-to-all": lambda n, p, a, b: (p - 1) * (a + n / p * b),
    "all-reduce (torch)": lambda n, p, a, b: 2 * (p - 1) * (a + n / p * b),
    "all-reduce (ring)": lambda n, p, a, b: 2 * (p - 1) * (a + n / p * b),
    "all-reduce (tree)": lambda n, p, a, b: 2 * log2(p) * (a + n * b),
    "all-reduce (butterfly)": lambda n, p, a, b: log2(p) * (a + n * b),
}
"""Sums are counted as free, as in the books: what they take shows as the difference."""


def exchange(send: torch.Tensor, to: int, receive: torch.Tensor, source: int) -> None:
    work = dist.isend(send, to)
    dist.recv(receive, source)
    assert work is not None
    work.wait()


def ring(x: torch.Tensor, rank: int, p: int) -> None:
    parts = list(torch.tensor_split(x, p))
    got = [torch.empty_like(part) for part in parts]
    for step in range(p - 1):
        out, into = (rank - step) % p, (rank - step - 1) % p
        exchange(parts[out], (rank + 1) % p, got[into], (rank - 1) % p)
        parts[into].add_(got[into])
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        exchange(parts[out], (rank + 1) % p, parts[into], (rank - 1) % p)


def tree(x: torch.Tensor, rank: int, p: int) -> None:
    other = torch.empty_like(x)
    reach = 1
    while reach < p:
        if rank % (2 * reach) == reach:
            dist.send(x, rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < p:
            dist.recv(other, rank + reach)
            x.add_(other)
        reach *= 2
    while reach > 1:
        reach //= 2
        if rank % (2 * reach) == reach:
            dist.recv(x, rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < p:
            dist.send(x, rank + reach)


def butterfly(x: torch.Tensor, rank: int, p: int) -> None:
    """Requires a power of two."""
    other, reach = torch.empty_like(x), 1
    while reach < p:
        exchange(x, rank ^ reach, other, rank ^ reach)
        x.add_(other)
        reach *= 2


def measure(rank: int, p: int, folder: str, memory: str, rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=p)
    found: dict[str, dict[int, float]] = {}

    def clock(name: str, size: int, act: Callable[[], object]) -> None:
        times = []
        for _ in range(rounds + 2):
            dist.barrier()
            began = time.perf_counter()
            act()
            mine = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)  # the last one's is the collective's
            times.append(float(mine))
        found.setdefault(name, {})[size] = statistics.median(times[2:])

    at_root = rank == 0
    most = max(SIZES)
    arena = SharedRegion(memory, list(range(p)), rank, aligned_size([most + 4096]), 60.0)
    for size in SIZES:
        x, y = torch.ones(size // 4), torch.empty(size // 4)
        count = size // 4 // p * p
        pieces, got = list(x[:count].chunk(p)), list(y[:count].chunk(p))

        def there_and_back(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            if rank == 0:
                dist.send(x, 1)
                dist.recv(y, 1)
            elif rank == 1:
                dist.recv(y, 0)
                dist.send(x, 0)

        clock("there and back", size, there_and_back)
        clock("broadcast", size, lambda x=x: dist.broadcast(x, 0))
        clock("reduce", size, lambda x=x: dist.reduce(x, 0))
        clock(
            "scatter",
            size,
            lambda got=got, pieces=pieces: dist.scatter(got[0], pieces if at_root else None, 0),
        )
        clock(
            "gather",
            size,
            lambda got=got, pieces=pieces: dist.gather(pieces[0], got if at_root else None, 0),
        )
        clock(
            "all-to-all",
            size,
            lambda x=x, y=y, count=count: dist.all_to_all_single(y[:count], x[:count]),
        )
        clock("all-reduce (torch)", size, lambda x=x: dist.all_reduce(x))
        clock("all-reduce (ring)", size, lambda x=x: ring(x, rank, p))
        clock("all-reduce (tree)", size, lambda x=x: tree(x, rank, p))
        if p & (p - 1) == 0:
            clock("all-reduce (butterfly)", size, lambda x=x: butterfly(x, rank, p))
        sums = SharedMemoryAllReduce(
            SharedMemoryGroup(arena, None, 1), [size // 4], [torch.float32]
        )

        def in_memory(sums: SharedMemoryAllReduce = sums) -> None:
            sums.mark_filled()
            sums.finish()

        clock("all-reduce (shared)", size, in_memory)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)


def fit(trips: dict[str, float]) -> tuple[float, float]:
    """Fits latency and seconds per byte of one direction, by least squares of relative errors."""
    rows = [(1.0 / t, 2.0 * int(size) / t) for size, t in trips.items()]
    a11 = sum(x * x for x, _ in rows)
    a12 = sum(x * y for x, y in rows)
    a22 = sum(y * y for _, y in rows)
    b1, b2 = sum(x for x, _ in rows), sum(y for _, y in rows)
    det = a11 * a22 - a12 * a12
    return max(0.0, (b1 * a22 - b2 * a12) / det) / 2, max(0.0, (a11 * b2 - a12 * b1) / det)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--pool", type=Path)
    given = parser.parse_args()
    found_pool = load_pool(given.pool) if given.pool is not None else None
    body: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "by": {}}
    for p in map(int, given.workers.split(",")):
        memory = create_segment(SharedRegion.size_for(p, aligned_size([max(SIZES) + 4096])))
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(measure, args=(p, folder, memory, given.rounds), nprocs=p)
            finally:
                unlink_segment(memory)
            found = json.loads(Path(folder, "found.json").read_text())
        a, b = fit(found.pop("there and back"))
        print(f"\n{p} workers: {1e6 * a:.0f} us a message, {1 / b / 1e9:.2f} GB/s\n")
        print("| collective | " + " | ".join(f"{s:,} bytes" for s in SIZES) + " |")
        print("|---|" + "---:|" * len(SIZES))
        for name, times in found.items():
            cells = []
            for size in SIZES:
                summary = f"{1e3 * times[str(size)]:.2f}"
                if name in FORMULAS:
                    summary += f" ({1e3 * FORMULAS[name](size, p, a, b):.2f})"
                cells.append(summary)
            print(f"| {name} | " + " | ".join(cells) + " |")
        body["by"][str(p)] = {"latency_s": a, "bytes_per_s": 1 / b, "seconds": found}
        if found_pool is not None and str(p) == given.workers.split(",")[0]:
            summary = {"hop_ms": round(1e3 * a, 4), "collective_gb_s": round(1 / b / 1e9, 3)}
            write_pool(found_pool, found_pool.pool.model_copy(update=summary))
    print(
        "\nMilliseconds, the median of the rounds, the slowest worker's; the formula in brackets."
    )
    if given.save:
        keep("collectives", body)


if __name__ == "__main__":
    main()

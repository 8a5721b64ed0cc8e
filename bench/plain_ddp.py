"""Plain PyTorch DDP for comparison, as in its tutorial. Prints samples per second.

python bench/plain_ddp.py WORKLOAD WORKERS THREADS [apart|compute] [channels_last]

With `apart` the processes train separate models and never communicate: the rate of a strategy
without synchronization cost. With `compute` they do not update their weights: forward and backward
only, an upper bound for training.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from paceline import models
from workloads import WORKLOADS, make_data


def train(
    rank: int, name: str, workers: int, threads: int, meeting: str, options: list[str]
) -> None:
    apart, last = "apart" in options or "compute" in options, "channels_last" in options
    workload = WORKLOADS[name]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    torch.manual_seed(0)
    model = models.build(workload.name, input_shape=workload.shape, classes=10)
    if not apart:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samples, share = workload.samples(workers), workload.batch_per_worker
    (inputs, targets), _, _ = make_data(workload.shape, samples)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    dist.barrier()
    began = time.perf_counter()
    for start in range(rank * share, samples, share * workers):
        rows = order[start : start + share]
        optimizer.zero_grad()
        batch = inputs[rows]
        if last:
            batch = batch.contiguous(memory_format=torch.channels_last)
        loss = torch.nn.functional.cross_entropy(model(batch), targets[rows])
        loss.backward()
        if "compute" not in options:
            optimizer.step()
    dist.barrier()
    if rank == 0:
        print(samples / (time.perf_counter() - began))
    dist.destroy_process_group()


if __name__ == "__main__":
    name, workers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        args = (name, workers, threads, f"{folder}/meet", sys.argv[4:])
        mp.spawn(train, args=args, nprocs=workers)

"""torchft (fault-tolerant DDP) for comparison, as in its guide. Prints samples per second.

PYTHON bench/peer_torchft.py WORKLOAD WORKERS THREADS

PYTHON is an interpreter with torchft and Paceline's dependencies. Every worker is a replica
group of one; its lighthouse runs in the first process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

LIMIT_S = 500
WARM_UP = 3


def train(rank: int, name: str, workers: int, threads: int) -> None:
    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from paceline import models
    from workloads import WORKLOADS, make_data

    workload = WORKLOADS[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = models.build(workload.name, input_shape=workload.shape, classes=10)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=workers,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        use_async_quorum=True,
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    samples, share = workload.samples(workers), workload.batch_per_worker
    (inputs, targets), _, _ = make_data(workload.shape, samples)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    starts = list(range(rank * share, samples, share * workers))
    began = 0.0
    for step, start in enumerate(starts):
        if step == WARM_UP:  # by then the replicas have met
            began = time.perf_counter()
        rows = order[start : start + share]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(wrapped(inputs[rows]), targets[rows])
        loss.backward()
        optimizer.step()
    if rank == 0:
        done = (len(starts) - WARM_UP) * share * workers
        print(done / (time.perf_counter() - began), flush=True)
    os._exit(0)


def main(name: str, workers: int, threads: int) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=workers, join_timeout_ms=1000, quorum_tick_ms=10
    )
    children = []
    for rank in range(workers):
        command = [sys.executable, __file__, name, str(workers), str(threads), str(rank)]
        env = {
            **os.environ,
            "TORCHFT_LIGHTHOUSE": lighthouse.address(),
            "GLOO_SOCKET_IFNAME": "lo",
            "RUST_LOG": "warn",
        }
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        children.append(subprocess.Popen(command, env=env, stdout=out, text=True))
    try:
        out, _ = children[0].communicate(timeout=LIMIT_S)
        print(out.strip().split()[-1])
    finally:
        for child in children:
            child.kill()
        lighthouse.shutdown()


if __name__ == "__main__":
    name, workers, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        train(int(sys.argv[4]), name, workers, threads)
    else:
        main(name, workers, threads)

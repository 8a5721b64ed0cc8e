"""An ordinary DistributedDataParallel script: it knows nothing of Paceline."""

import gc
import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train() -> float:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        inputs = torch.randn(16, 8, generator=generator)
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sum(float(p.detach().double().sum()) for p in model.parameters())


torch.set_num_threads(1)
dist.init_process_group("gloo")
total = train()
place = f"rank {dist.get_rank()} of {dist.get_world_size()} on {socket.gethostname()}"
print(f"{place} weights {total:.12f}")
# The model holds the process group in a cycle of references. If that outlives Python, one of
# Gloo's threads now and then aborts the process at its very end.
gc.collect()
dist.destroy_process_group()

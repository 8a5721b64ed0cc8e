"""An ordinary DistributedDataParallel script: it knows nothing of Paceline."""

import os
import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(rank)
for _ in range(20):
    inputs = torch.randn(16, 8, generator=generator)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = sum(float(p.detach().double().sum()) for p in model.parameters())
print(f"rank {rank} of {world} on {socket.gethostname()} pid {os.getpid()} weights {total:.12f}")
dist.destroy_process_group()

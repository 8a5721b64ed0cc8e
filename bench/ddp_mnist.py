"""Plain PyTorch DDP on MNIST until an accuracy is reached, for comparison over slow links.

Started by `paceline launch`, which sets RANK, WORLD_SIZE and MASTER_ADDR; otherwise independent of
it. Arguments: directory of MNIST, global batch, learning rate, `plain` or `powersgd`, accuracy,
epochs.
"""

from __future__ import annotations

import gc
import sys
import time

import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline import data, models

BEGAN = psutil.Process().create_time()


def train(folder: str, batch: int, lr: float, kind: str, goal: float, epochs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    loaded = data.load("mnist", data_dir=folder, dtype="float32")
    rows = len(loaded.train)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        models.build("mlp-300-100", input_shape=(1, 28, 28), classes=10)
    )
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=10
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    test_x, test_y = loaded.val.batch(torch.arange(len(loaded.val)).numpy())
    inputs, targets = loaded.train.batch(torch.arange(rows).numpy())
    for epoch in range(epochs):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, rows - batch + 1, batch):
            mine = order[start : start + batch][rank::size]
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs[mine]), targets[mine])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model.module(test_x).argmax(1) == test_y).float().mean().item()
        if rank == 0:
            print(
                f"epoch {epoch + 1} accuracy {right:.4f} seconds {time.time() - BEGAN:.2f}",
                flush=True,
            )
        if right >= goal:
            break


if __name__ == "__main__":
    folder, batch, lr, kind, goal, epochs = sys.argv[1:]
    train(folder, int(batch), float(lr), kind, float(goal), int(epochs))
    gc.collect()
    dist.destroy_process_group()

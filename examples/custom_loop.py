"""A plain PyTorch loop, with the lines that run it on several workers.

    python examples/custom_loop.py                                          # one process
    paceline launch examples/custom_loop.py --strategy allreduce --workers 2
    paceline launch examples/custom_loop.py --strategy ps --workers 2 -- --epochs 3

Lines marked `# paceline` were added.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline  # paceline
from paceline.data import digits  # bundled data: 1,797 images of 8x8 pixels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    images, labels = digits.read()
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = TensorDataset(inputs[:1500], targets[:1500]), (inputs[1500:], targets[1500:])

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    loader = DataLoader(train, batch_size=50, shuffle=True)  # the global batch
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, epochs=epochs)  # paceline

    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()

        # At the end of an epoch all workers hold the same weights, so one of them may report.
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
        if paceline.rank() == 0:  # paceline
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()

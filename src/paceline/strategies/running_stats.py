"""Averages running statistics, such as those of BatchNorm, over the workers."""

from collections.abc import Sequence

import torch

from paceline.comm.process_group import CollectiveGroup


def average_running_stats(
    buffers: dict[str, torch.Tensor], group: CollectiveGroup, samples: int
) -> None:
    """Averages BatchNorm's running statistics over the workers, weighted by their samples.

    Counters (num_batches_tracked) take the maximum. With one worker, buffers are unchanged.
    """
    if group.size == 1:
        return
    floats = [b for b in buffers.values() if b.is_floating_point()]
    counts = [b for b in buffers.values() if not b.is_floating_point()]
    weight = torch.tensor([float(samples)], dtype=torch.float64)
    parts = [b.detach().double().reshape(-1).cpu() * samples for b in floats]
    packed = torch.cat([weight, *parts])
    group.all_reduce(packed)
    if float(packed[0]) > 0:
        copy_flat(packed[1:] / packed[0], floats)
    if counts:
        whole = torch.cat([c.detach().to(torch.int64).reshape(-1).cpu() for c in counts])
        group.all_reduce(whole, largest=True)
        copy_flat(whole, counts)


def copy_flat(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copies consecutive parts of a flat tensor to the targets."""
    parts = torch.split(flat, [target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view_as(target))

"""Broadcast and all-gather of state sections between workers."""

from __future__ import annotations

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.state import Section


def broadcast_section(section: Section | None, group: CollectiveGroup, source: int = 0) -> Section:
    """Returns the section of `source` on all workers."""
    if group.size == 1:
        assert section is not None
        return section
    if group.rank == source:
        assert section is not None
        body = torch.frombuffer(bytearray(section.to_bytes()), dtype=torch.uint8)
        group.broadcast(torch.tensor([body.numel()]), source)
        group.broadcast(body, source)
        return section
    size = torch.zeros(1, dtype=torch.int64)
    group.broadcast(size, source)
    body = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(body, source)
    return Section.from_bytes(body.numpy().tobytes())


def all_gather_sections(section: Section, group: CollectiveGroup) -> list[Section]:
    """Returns the sections of all workers, in the order of ranks."""
    return [
        broadcast_section(section if rank == group.rank else None, group, rank)
        for rank in range(group.size)
    ]

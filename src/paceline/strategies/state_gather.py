"""Gathers state that is distributed over workers, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.comm.state_exchange import all_gather_sections
from paceline.state import RemoteTensor, Section
from paceline.strategies.runner import peer_errors

TAG = 1 << 24
"""First tag of state transfers, above all tags of activations."""


@contextmanager
def gather_to_rank0(
    group: CollectiveGroup, mine: Mapping[str, torch.Tensor], slots: Mapping[str, Any]
) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
    """Yields this worker's state and the remote state; no name occurs on two workers.

    All workers call it. Worker 0 fetches remote tensors inside the context, in order; the others
    send on exit. `slots` are those that are not tensors.
    """
    forms = {k: [list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in mine.items()}
    gathered = all_gather_sections(Section(plain={"forms": forms, "slots": dict(slots)}), group)
    distant: dict[str, RemoteTensor] = {}
    plain: dict[str, Any] = {}
    for rank, section in enumerate(gathered):
        for name, values in section.plain["slots"].items():
            plain.setdefault(name, {}).update(values)
        for key, (shape, dtype) in section.plain["forms"].items() if rank else ():
            distant[key] = _distant(group, shape, dtype, rank, TAG + len(distant))
    yield Section(dict(mine), {"slots": plain} if plain else {}), distant
    if group.rank == 0:
        return
    for place, key in enumerate(distant):
        if key in mine:
            with peer_errors(f"worker 0 did not receive {key}"):
                value = mine[key].detach().contiguous().reshape(-1)
                group.isend(value, 0, TAG + place).wait()


def _distant(
    group: CollectiveGroup, shape: list[int], dtype: str, rank: int, tag: int
) -> RemoteTensor:
    kind = getattr(torch, dtype)

    def fetch() -> torch.Tensor:
        value = torch.empty(torch.Size(shape).numel(), dtype=kind)
        with peer_errors(f"worker {rank} did not send its state"):
            group.recv(value, rank, tag)
        return value

    return RemoteTensor(torch.Size(shape), kind, fetch)


def gather_to_all(
    group: CollectiveGroup, mine: Mapping[str, torch.Tensor], slots: Mapping[str, Any]
) -> Section:
    """Gathers the whole state on all workers, for a strategy that continues with all of it."""
    merged = Section()
    plain: dict[str, Any] = {}
    for section in all_gather_sections(Section(dict(mine), {"slots": dict(slots)}), group):
        merged.tensors.update(section.tensors)
        for name, values in section.plain["slots"].items():
            plain.setdefault(name, {}).update(values)
    if plain:
        merged.plain["slots"] = plain
    return merged


def parameter_of_key(key: str) -> str:
    """Returns the parameter or buffer that a tensor of the state belongs to."""
    kind, _, name = key.partition("/")
    return name.rpartition("/")[0] if kind == "slots" else name

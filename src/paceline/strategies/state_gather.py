"""Gathers state that is distributed over workers, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.state import RemoteTensor, Section
from paceline.strategies.runner import peer_errors

TAG = 1 << 24
"""First tag of state transfers, above all tags of activations."""


def parameter_of_key(key: str) -> str:
    """Returns the parameter or buffer that a tensor of the state belongs to."""
    kind, _, name = key.partition("/")
    return name.rpartition("/")[0] if kind == "slots" else name


def select_state(whole: Section, is_selected: Callable[[str], bool]) -> Section:
    """Returns the state of the selected parameters and buffers."""
    slots = {n: v for n, v in whole.plain.get("slots", {}).items() if is_selected(n)}
    tensors = {k: t for k, t in whole.tensors.items() if is_selected(parameter_of_key(k))}
    return Section(tensors, {"slots": slots})


@contextmanager
def gather_to_rank0(
    group: CollectiveGroup, mine: Section
) -> Iterator[tuple[Section, dict[str, RemoteTensor]]]:
    """Yields this worker's state and the remote state; no name occurs on two workers.

    All workers call it. Worker 0 fetches remote tensors inside the context, in order; the others
    send on exit. Slots that are not tensors are sent at once.
    """
    forms = {
        k: [list(t.shape), str(t.dtype).removeprefix("torch.")] for k, t in mine.tensors.items()
    }
    gathered = group.all_gather_sections(Section(plain={**mine.plain, "forms": forms}))
    distant: dict[str, RemoteTensor] = {}
    for rank, section in enumerate(gathered[1:], 1):
        for key, (shape, dtype) in section.plain["forms"].items():
            distant[key] = _distant(group, shape, dtype, rank, TAG + len(distant))
    yield Section(mine.tensors, _merge_plain(gathered)), distant
    if group.rank == 0:
        return
    for place, key in enumerate(distant):
        if key in mine.tensors:
            with peer_errors(f"worker 0 did not receive {key}"):
                value = mine.tensors[key].detach().contiguous().reshape(-1)
                group.isend(value, 0, TAG + place).wait()


def _distant(
    group: CollectiveGroup, shape: list[int], dtype: str, rank: int, tag: int
) -> RemoteTensor:
    kind = getattr(torch, dtype)

    def fetch() -> torch.Tensor:
        value = torch.empty(torch.Size(shape).numel(), dtype=kind)
        with peer_errors(f"worker {rank} did not send its state"):
            group.irecv(value, rank, tag).wait()
        return value.view(shape)

    return RemoteTensor(torch.Size(shape), kind, fetch)


def gather_to_all(group: CollectiveGroup, mine: Section) -> Section:
    """Gathers the whole state on all workers, for a strategy that continues with all of it."""
    gathered = group.all_gather_sections(mine)
    tensors = {k: t for section in gathered for k, t in section.tensors.items()}
    return Section(tensors, _merge_plain(gathered))


def _merge_plain(sections: Iterable[Section]) -> dict[str, Any]:
    slots: dict[str, Any] = {}
    for section in sections:
        for name, values in section.plain.get("slots", {}).items():
            slots.setdefault(name, {}).update(values)
    return {"slots": slots} if slots else {}

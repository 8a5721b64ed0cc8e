"""Serializes and validates payloads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.codecs.base import Payload, Shape, dtype_name
from paceline.comm.flat_layout import as_memoryview
from paceline.errors import WireError

WIRE_TYPES = {
    _name: getattr(torch, _name)
    for _name in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32")
}
MAX_DIMS = 2


def to_bytes(payload: Payload) -> tuple[list[list[Any]], list[memoryview]]:
    """Returns a table of type, shape and size for a message's head, and the memory of its body."""
    table = [[dtype_name(t.dtype), list(t.shape), t.nbytes] for t in payload]
    return table, [as_memoryview(t) for t in payload]


def from_bytes(table: Any, body: Tensor) -> Payload:
    """Returns the payload of a message, as views of its body if they are aligned.

    Raises WireError unless the table is well-formed and describes exactly the body's bytes.
    """
    if not isinstance(table, list | tuple):
        raise WireError("invalid payload: the table is not a list")
    parts = [_read_entry(entry) for entry in table]
    total = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
    if total != body.numel():
        raise WireError(f"invalid payload: {total} bytes in a message of {body.numel()}")
    return split_body(body, parts)


def split_body(body: Tensor, parts: Iterable[tuple[torch.dtype, Shape]]) -> Payload:
    """Returns tensors of these types and shapes from the start of a body."""
    payload, at = [], 0
    for dtype, shape in parts:
        size = dtype.itemsize * math.prod(shape)
        part = body[at : at + size]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
            part = part.clone()
        payload.append(part.view(dtype).view(shape))
        at += size
    return payload


def _read_entry(entry: Any) -> tuple[torch.dtype, Shape]:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise WireError("invalid payload: an entry is not (type, shape, size)")
    name, shape, size = entry
    if not isinstance(name, str) or name not in WIRE_TYPES:
        raise WireError(f"invalid payload: unknown type {str(name)[:40]!r}")
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise WireError(f"invalid payload: a shape must have 0 to {MAX_DIMS} sizes")
    if not all(type(n) is int and n >= 0 for n in (*shape, size)):
        raise WireError("invalid payload: a size must be a non-negative integer")
    dtype: torch.dtype = WIRE_TYPES[name]
    if math.prod(shape) * dtype.itemsize != size:
        raise WireError(f"invalid payload: {tuple(shape)} {name} in {size} bytes")
    return dtype, tuple(shape)

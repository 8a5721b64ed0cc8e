"""TrainState: the training state as a value, and its on-disk format (safetensors and JSON).

The *global* section is shared by all replicas: weights, buffers, optimizer slots, and plain data
(samples seen, data position, history). The *per-worker* sections contain random generators and the
local state of a strategy (codec residuals, inner optimizers).

When the number of workers changes, the global section is preserved. Per-worker sections are
restored for workers that still exist; new workers start with empty ones. Nothing is pickled.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import load_file
from safetensors.torch import save as tensors_to_bytes

from paceline.errors import CheckpointError, StateError
from paceline.telemetry.run_folder import commit_checkpoint, partial_checkpoint_path
from paceline.telemetry.run_folder import list_checkpoints as list_checkpoints

FORMAT = 1


@dataclass
class Section:
    """Named tensors and plain (JSON-serializable) data."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        # Contiguous tensors that share no storage, as the file format requires.
        separate = {k: v.detach().contiguous().clone() for k, v in self.tensors.items()}
        body: bytes = tensors_to_bytes(separate, metadata={"plain": json.dumps(self.plain)})
        return body

    @classmethod
    def from_bytes(cls, data: bytes) -> Section:
        head_bytes = int.from_bytes(data[:8], "little")
        head = json.loads(data[8 : 8 + head_bytes])
        return cls(tensors_from_bytes(data), json.loads(head["__metadata__"]["plain"]))


@dataclass(frozen=True)
class RemoteTensor:
    """A tensor in another process: its shape, its dtype, and a function that fetches it once."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[], torch.Tensor]


@dataclass
class TrainState:
    """Training state: weights/NAME, buffers/NAME and slots/NAME/SLOT in one global section."""

    shared: Section
    workers: list[Section] = field(default_factory=list)

    distant: dict[str, RemoteTensor] = field(default_factory=dict)
    """Tensors of the global section in other processes; only used to write a checkpoint."""

    def fingerprint(self) -> str:
        """Identifies the model by the names, shapes and dtypes of its weights and buffers."""
        return fingerprint_of({**self.shared.tensors, **self.distant})


def is_model_tensor(name: str) -> bool:
    """Returns whether a tensor is a weight or buffer, not optimizer or strategy state."""
    return name.startswith(("weights/", "buffers/"))


def fingerprint_of(tensors: Mapping[str, torch.Tensor | RemoteTensor]) -> str:
    shapes = [
        f"{name}:{tuple(t.shape)}:{t.dtype}"
        for name, t in sorted(tensors.items())
        if is_model_tensor(name)
    ]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def copy_section(section: Section) -> Section:
    """Returns an independent copy."""
    tensors = {name: tensor.clone() for name, tensor in section.tensors.items()}
    return Section(tensors, copy.deepcopy(section.plain))


def state_from_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Section:
    """Returns the state of a model and its optimizer; tensors are views, not copies."""
    section = Section()
    for name, parameter in model.named_parameters():
        section.tensors[f"weights/{name}"] = parameter.detach()
        for slot, value in optimizer.state.get(parameter, {}).items():
            set_slot(section, name, slot, value)
    for name, buffer in persistent_buffers(model).items():
        section.tensors[f"buffers/{name}"] = buffer
    return section


def set_slot(section: Section, name: str, slot: str, value: Any) -> None:
    """Stores a slot: usually a tensor; plain numbers of custom optimizers are kept as such."""
    if isinstance(value, torch.Tensor):
        section.tensors[f"slots/{name}/{slot}"] = value
    elif value is not None:
        section.plain.setdefault("slots", {}).setdefault(name, {})[slot] = value


def load_into_model(
    section: Section, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Loads a section into a model and optimizer. Raises StateError if names or shapes differ."""
    load_weights(section, model)
    slots = slots_by_parameter(section)
    for name, parameter in model.named_parameters():
        optimizer.state.pop(parameter, None)
        if name in slots:
            optimizer.state[parameter] = {
                k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in slots[name].items()
            }


def load_weights(section: Section, model: torch.nn.Module) -> None:
    targets = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
    targets |= {f"buffers/{n}": b for n, b in persistent_buffers(model).items()}
    given = {k for k in section.tensors if is_model_tensor(k)}
    if given != set(targets):
        name = sorted(given.symmetric_difference(targets))[0]
        where = "missing in the state" if name in targets else "missing in the model"
        raise StateError(f"the state belongs to another model: {name} ({where})")
    for name, target in targets.items():
        source = section.tensors[name]
        if source.shape != target.shape:
            raise StateError(
                f"the state belongs to another model: {name} has shape {tuple(source.shape)}, "
                f"expected {tuple(target.shape)}"
            )
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def slots_by_parameter(section: Section) -> dict[str, dict[str, Any]]:
    slots: dict[str, dict[str, Any]] = {}
    for key, value in section.tensors.items():
        if key.startswith("slots/"):
            name, slot = key[len("slots/") :].rsplit("/", 1)
            slots.setdefault(name, {})[slot] = value
    for name, values in section.plain.get("slots", {}).items():
        slots.setdefault(name, {}).update(values)
    return slots


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = set(model.state_dict(keep_vars=True))
    return {name: b for name, b in model.named_buffers() if name in kept}


def checksum(section: Section) -> str:
    """Returns a fast checksum to compare replicas (not for security)."""
    digest = hashlib.sha256()
    for name in sorted(section.tensors):
        flat = section.tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 4:
            flat = flat.clone()  # An unaligned view with a dtype of one or two bytes.
        aligned = flat.numel() // 4 * 4
        total = int(flat[:aligned].view(torch.int32).sum(dtype=torch.int64)) if aligned else 0
        rest = bytes(flat[aligned:].tolist())
        digest.update(f"{name}:{total}:".encode() + rest)
    return digest.hexdigest()[:16]


# ---- on disk ---------------------------------------------------------------------------------


def save_checkpoint(folder: Path, name: str, state: TrainState, *, keep: int = 2) -> Path:
    """Writes a checkpoint atomically, then removes all but the latest `keep`."""
    partial = partial_checkpoint_path(folder, name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_tensors(partial / "state.safetensors", {**state.shared.tensors, **state.distant})
        for rank, section in enumerate(state.workers):
            (partial / f"worker-{rank}.safetensors").write_bytes(section.to_bytes())
        head = {
            "format": FORMAT,
            "fingerprint": state.fingerprint(),
            "workers": len(state.workers),
            "plain": state.shared.plain,
        }
        (partial / "state.json").write_text(json.dumps(head), encoding="utf-8")
        return commit_checkpoint(folder, name, keep=keep)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StateError(f"cannot write checkpoint {folder / name}: {error}") from None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor | RemoteTensor]) -> None:
    """Writes a safetensors file without copies, with at most one remote tensor in memory."""
    head: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.shape.numel() * tensor.dtype.itemsize
        head[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            local = tensor.fetch() if isinstance(tensor, RemoteTensor) else tensor
            flat = local.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def load_checkpoint(path: Path) -> TrainState:
    """Reads a checkpoint. Raises CheckpointError with the file and the problem."""
    try:
        head = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not isinstance(head, dict):
            raise ValueError("state.json is not a mapping")
        if head.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path} has format {head.get('format')}; "
                f"this version reads format {FORMAT}"
            )
        shared = Section(load_file(path / "state.safetensors"), head["plain"])
        workers = [
            Section.from_bytes((path / f"worker-{rank}.safetensors").read_bytes())
            for rank in range(head["workers"])
        ]
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error}") from None
    state = TrainState(shared, workers)
    if state.fingerprint() != head["fingerprint"]:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its tensors do not match its fingerprint"
        )
    return state

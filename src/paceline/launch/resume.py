"""Finds the checkpoint that a run resumes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from paceline.errors import UsageError
from paceline.protocol.history import CoordinatorMemory
from paceline.specs.optimizer import parse_optimizer
from paceline.telemetry.run_folder import RunFolder


def find_checkpoint(folder: RunFolder, facts: Mapping[str, Any]) -> Path | None:
    """The latest checkpoint of a run, if any; raises UsageError if it cannot be resumed."""
    if not folder.config.exists():
        raise UsageError(f"--resume: {folder.path} contains no run; start it without --resume")
    before = json.loads(folder.config.read_text(encoding="utf-8"))["job"]
    for name in ("model", "data", "batch", "seed", "dtype"):
        if before.get(name) != facts.get(name):
            raise UsageError(
                f"--resume: {folder.path} was trained with {name}={before.get(name)!r}, "
                f"but {name}={facts.get(name)!r} was given; resume with the same job"
            )
    kind, trained = facts.get("optimizer"), before.get("optimizer")
    if kind and trained and parse_optimizer(kind).name != parse_optimizer(trained).name:
        raise UsageError(
            f"--resume: {folder.path} was trained with {trained}, but {kind} was given; "
            "the checkpoint contains the state of the first"
        )
    whole = sorted(p for p in folder.checkpoints.glob("[0-9]*") if (p / "state.json").exists())
    if not whole:
        return None
    epoch = read_coordinator_state(whole[-1])["history"]["epoch"]
    if "epochs" in facts and epoch >= facts["epochs"]:
        raise UsageError(
            f"--resume: {folder.path} has already completed its {facts['epochs']} epochs; "
            "increase --epochs to continue training"
        )
    return whole[-1]


def read_coordinator_state(checkpoint: Path) -> CoordinatorMemory:
    """The coordinator's state in a checkpoint."""
    try:
        head = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        memory = head["plain"]["coordinator"]
        float(memory["elapsed_s"]), int(memory["history"]["epoch"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"checkpoint {checkpoint} cannot be read: {error}") from None
    return cast(CoordinatorMemory, memory)

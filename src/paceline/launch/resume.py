"""Resuming a run: its latest checkpoint, and whether anything is left to do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from paceline.errors import UsageError
from paceline.protocol.history import CoordinatorMemory, History
from paceline.protocol.run_spec import RunSpec
from paceline.specs.optimizer import parse_optimizer
from paceline.telemetry.run_folder import RunFolder, list_checkpoints


def find_checkpoint(folder: RunFolder, facts: Mapping[str, Any], plan: RunSpec) -> Path | None:
    """The latest checkpoint of a run, if any; raises UsageError if it cannot be resumed.

    A run that was trained to its end, but not evaluated and saved, can be resumed.
    """
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
    if not (whole := list_checkpoints(folder.checkpoints)):
        return None
    history = History.from_plain(read_coordinator_state(whole[-1])["history"])
    epochs = facts.get("epochs")
    reason = plan.stop_reason(history, epochs)
    if reason is not None and is_complete(folder, history):
        if reason == f"{epochs} epochs":
            ended, remedy = f"has already completed its {reason}", "increase --epochs"
        else:
            ended, remedy = f"has already ended ({reason})", "change --until or --patience"
        raise UsageError(
            f"--resume: {folder.path} {ended}, and its model and result are saved; "
            f"{remedy} to continue training"
        )
    return whole[-1]


def is_same_run(folder: RunFolder, plan: RunSpec, facts: Mapping[str, Any]) -> bool:
    """Returns whether a folder contains a run of exactly this job, strategy and size.

    Only its own workers can continue it; a changed run starts from the latest checkpoint.
    """
    try:
        before = json.loads(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = (before.get("strategy"), before.get("workers")) == (str(plan.strategy), plan.workers)
    return same and before.get("job") == json.loads(json.dumps(facts))


def is_complete(folder: RunFolder, history: History) -> bool:
    """Returns whether the model and the result of this state are saved."""
    if not folder.result.exists() or not folder.model.exists():
        return False
    try:
        result = folder.read_result()
    except UsageError:
        return False
    # The result of an earlier, shorter run in the folder has fewer samples.
    return result.get("status") == "done" and result.get("samples") == history.samples


def read_coordinator_state(checkpoint: Path) -> CoordinatorMemory:
    """The coordinator's state in a checkpoint."""
    try:
        head = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
        memory = head["plain"]["coordinator"]
        float(memory["elapsed_s"]), int(memory["history"]["epoch"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"checkpoint {checkpoint} cannot be read: {error}") from None
    return cast(CoordinatorMemory, memory)

"""The study of selecting machines: steps, loss and accuracy by epoch of each selection."""

from collections.abc import Sequence
from typing import Any

from paceline.report.reproduction.matching import (
    PublishedSettings,
    Reproduced,
    describe_mismatch,
    study_facts,
)
from paceline.report.tables import Column, ReportTable, make_table
from paceline.telemetry.schema import as_finite

STUDY = "resource_optimiser"
NOT_LEGIBLE = "not legible"


def make_tables(rows: Sequence[Reproduced]) -> list[ReportTable]:
    return [table for table in (make_summary(rows), make_epochs(rows)) if table.rows]


def show_printed(arm: Any, key: str) -> str:
    """Returns a published value with its origin: printed, derived or not legible."""
    value = arm.get(key)
    if value is None:
        return NOT_LEGIBLE
    return f"{value:g} (derived)" if key in arm.get("derived", ()) else f"{value:g}"


def make_summary(rows: Sequence[Reproduced]) -> ReportTable:
    facts = study_facts(STUDY)
    records = []
    for row in rows:
        theirs = facts["results"][row.arm]
        settings = PublishedSettings(
            *("mnist", facts["epochs"], theirs["workers"], 64),
            batch_is_per_worker=True,
            models=("cnn-small",),
        )
        updates, epochs = row.mean("updates"), row.average(r.result.get("epochs") for r in row.runs)
        records.append(
            {
                Column("selection"): row.label,
                Column("machines", "count"): row.entry["workers"],
                Column("steps per epoch, published"): show_printed(theirs, "steps_per_epoch"),
                Column("steps per epoch, here", "count"): updates / epochs
                if updates and epochs
                else None,
                Column("seconds, published"): show_printed(theirs, "seconds"),
                Column("training seconds, here", "seconds"): row.stage("train")
                or row.mean("seconds"),
                Column("training accuracy, published"): show_printed(theirs, "train_acc"),
                Column("training accuracy, here", "fraction"): row.mean("train_acc"),
                Column("test accuracy, here", "fraction"): row.mean("test_acc"),
                Column("updates, here", "count"): updates,
                Column("differs in"): describe_mismatch(row, settings),
            }
        )
    return make_table(
        "published-pool",
        "Selections of machines: published and here",
        records,
        "More machines with the same learning rate and 64 samples each make fewer updates, which "
        "explains the lower accuracy: 2,814 updates alone, 1,407 with two, 939 with three "
        "(derived). The output of the published GPU run differs from the others as that of another "
        "release of TensorFlow does. For all five machines the study prints a command, but no "
        "result.",
    ).without_empty_columns()


def make_epochs(rows: Sequence[Reproduced]) -> ReportTable:
    facts = study_facts(STUDY)
    records = []
    for row in rows:
        theirs = facts["results"][row.arm]
        for epoch in range(facts["epochs"]):
            ours = measure_epoch(row, epoch)
            printed = {
                key: values[epoch] if (values := theirs.get(key)) else NOT_LEGIBLE
                for key in (
                    "seconds_per_epoch",
                    "ms_per_step",
                    "loss_per_epoch",
                    "train_acc_per_epoch",
                )
            }
            records.append(
                {
                    Column("selection"): row.label,
                    Column("epoch", "count"): epoch + 1,
                    Column("seconds, published"): str(printed["seconds_per_epoch"]),
                    Column("seconds, here", "seconds"): ours.get("seconds"),
                    Column("ms/step, published"): str(printed["ms_per_step"]),
                    Column("ms/step, here", "count"): ours.get("ms"),
                    Column("loss, published"): str(printed["loss_per_epoch"]),
                    Column("loss, here", "loss"): ours.get("train_loss"),
                    Column("accuracy, published"): str(printed["train_acc_per_epoch"]),
                    Column("accuracy, here", "fraction"): ours.get("train_acc"),
                }
            )
    note = "Published: one machine of each selection; one loss of energy is doubtful (2.1108)."
    return make_table("published-pool-epochs", "Epochs: published and here", records, note)


def measure_epoch(row: Reproduced, epoch: int) -> dict[str, float | None]:
    """Returns seconds, ms per step, loss and accuracy of an epoch, mean over the runs."""
    found: dict[str, list[float | None]] = {
        "seconds": [],
        "ms": [],
        "train_loss": [],
        "train_acc": [],
    }
    for run in row.runs:
        if epoch >= len(run.history):
            continue
        now = run.history[epoch]
        before = run.history[epoch - 1] if epoch else {"seconds": run.cluster.from_s, "updates": 0}
        ended, began = as_finite(now.get("seconds")), as_finite(before.get("seconds"))
        steps = (as_finite(now.get("updates")) or 0) - (as_finite(before.get("updates")) or 0)
        seconds = ended - began if ended is not None and began is not None else None
        found["seconds"].append(seconds)
        found["ms"].append(1e3 * seconds / steps if seconds is not None and steps else None)
        for key in ("train_loss", "train_acc"):
            found[key].append(as_finite(now.get(key)))
    return {key: row.average(values) for key, values in found.items()}

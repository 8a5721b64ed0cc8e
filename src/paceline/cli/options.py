"""Options that several commands share, and how they become a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.data.stores import is_url_or_path, make_absolute
from paceline.errors import UsageError
from paceline.job import Job, JobRef, refer_to_job
from paceline.specs.slowdown import InjectedSlowdown, parse_slowdown

JobFile = Annotated[
    Path | None,
    typer.Argument(help="A job file: job.py with a function job(), or YAML.", show_default=False),
]
Model = Annotated[str | None, typer.Option(help="A model by name. [mlp-128]")]
Data = Annotated[str | None, typer.Option(help="A data set by name, or a URL. [digits]")]
DataDir = Annotated[Path | None, typer.Option(help="Holds DIR/<data set>/<original files>.")]
Features = Annotated[str | None, typer.Option(help="By URL: columns, parted by commas.")]
Label = Annotated[str | None, typer.Option(help="By URL: the label's column.")]
ValData = Annotated[str | None, typer.Option(help="By URL: validation data. [a tenth]")]
Format = Annotated[str | None, typer.Option(help="By URL: parquet, tfrecord ... [by suffix]")]
Shape = Annotated[str | None, typer.Option(help="By URL: of a row of features, e.g. 1x28x28.")]
Classes = Annotated[int | None, typer.Option(help="By URL: number of classes. [read off]")]
Fill = Annotated[float | None, typer.Option(help="By URL: in place of nulls. [refused]")]
SkipEmpty = Annotated[bool | None, typer.Option(help="By URL: leave files without rows out.")]
Shard = Annotated[
    str | None, typer.Option(help="By URL: file, row_group, sample, off or auto. [auto]")
]
Shuffle = Annotated[int | None, typer.Option(help="By URL: rows mixed at a time, 0: none. [50000]")]
Cache = Annotated[str | None, typer.Option(help="By URL: memory, disk, none or auto. [auto]")]
Prefetch = Annotated[int | None, typer.Option(help="By URL: batches made ahead. [tuned]")]
Memory = Annotated[int | None, typer.Option(help="By URL: MB a worker's data may take. [512]")]
Epochs = Annotated[int | None, typer.Option(help="Times through the training data. [10]")]
Batch = Annotated[int | None, typer.Option(help="The global batch, shared by all workers. [128]")]
BatchPerWorker = Annotated[int | None, typer.Option(help="In place of --batch: a worker's share.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate of the global batch. [by optimizer]")]
Optimizer = Annotated[
    str | None, typer.Option(help="E.g. 'sgd(momentum=0.9)', 'adamw(weight_decay=0.05)'.")
]
Schedule = Annotated[
    str | None, typer.Option(help="E.g. 'milestones(80, 130)', 'cosine(warmup=5%)'. [constant]")
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradient.")]
Seed = Annotated[int | None, typer.Option(help="Of weights, order and augmentation. [0]")]
Augment = Annotated[bool | None, typer.Option(help="Flip and pad-crop training images.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or float64. [float32]")]
ChannelsLast = Annotated[
    bool | None, typer.Option(help="Images with their channels last: often faster convolutions.")
]
Compile = Annotated[
    bool | None, typer.Option(help="torch.compile the model: slower to start, then faster.")
]
Recompute = Annotated[
    bool | None, typer.Option(help="Compute blocks again in backward: less memory, more time.")
]
Until = Annotated[str | None, typer.Option(help='Stop early, e.g. "val_acc>=0.97".')]
Patience = Annotated[
    int | None, typer.Option(help="Stop after so many epochs without a better val_loss.")
]
CheckpointEvery = Annotated[
    str | None, typer.Option(help="epoch(1), samples(50000) or never. [epoch(1)]")
]
Workers = Annotated[int, typer.Option(help="Worker processes in all; servers not counted.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads a worker. [cores divided by the workers]")
]
Pin = Annotated[bool, typer.Option("--pin", help="Keep each worker to cores of its own.")]
Timeout = Annotated[
    float, typer.Option(help="Seconds a worker may stay in one phase before the run is stopped.")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(help="Trouble on purpose: worker=0,factor=3[,from=EPOCH,to=EPOCH]."),
]
Delay = Annotated[
    list[str] | None,
    typer.Option(help="Trouble on purpose: worker=1,ms=10[,from=EPOCH,to=EPOCH]."),
]
Profile = Annotated[str | None, typer.Option(help="Time the operators of one epoch, e.g. epoch=3.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Serve metrics for Prometheus on loopback; 0 takes any free port."),
]
NoTelemetry = Annotated[
    bool, typer.Option("--no-telemetry", help="Record totals only: no steps, vitals, verdicts.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the run in the output folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def reject_conflicting(option: str, given: dict[str, Any], *others: str) -> None:
    for name in others:
        if given[name] not in (None, False):
            raise UsageError(f"{option} and --{name.replace('_', '-')} exclude each other")


def require_option(option: str, given: dict[str, Any], *others: str) -> None:
    for name in others:
        if given[name] not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} needs {option}: name the machines")


def parse_slowdowns(
    slow: list[str] | None, delay: list[str] | None, workers: int
) -> tuple[InjectedSlowdown, ...]:
    slowed = [parse_slowdown("slow", text, workers) for text in slow or []]
    return (*slowed, *(parse_slowdown("delay", text, workers) for text in delay or []))


def parse_profile_epoch(text: str | None) -> int | None:
    """The epoch, from 1, of `epoch=N`."""
    if text is None:
        return None
    name, _, number = text.partition("=")
    if name.strip() != "epoch" or not number.strip().isdigit() or int(number) < 1:
        raise UsageError(f"--profile is {text!r}: write epoch=N, counted from 1, e.g. epoch=3")
    return int(number)


def job_reference_from_options(
    file: Path | None, workers: int, batch_per_worker: int | None, arguments: dict[str, Any]
) -> JobRef:
    """The job that file and options describe; of a command's arguments only what was given."""
    fields = {name: arguments.get(name) for name in Job.model_fields}
    given = {name: value for name, value in fields.items() if value is not None}
    if batch_per_worker is not None:
        if "batch" in given:
            raise UsageError("--batch and --batch-per-worker say the same thing: give one of them")
        if batch_per_worker < 1:
            raise UsageError(f"--batch-per-worker is {batch_per_worker}: at least 1 is needed")
        given["batch"] = batch_per_worker * workers
    for name in ("data", "val_data"):
        if isinstance(given.get(name), str) and is_url_or_path(given[name]):
            given[name] = make_absolute(given[name])
    if "data_dir" in given:
        given["data_dir"] = str(Path(given["data_dir"]).resolve())
    return refer_to_job(file, given)

"""Builds the parts of a job: data, model, loss and optimizer."""

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from paceline import data as data_room
from paceline import models
from paceline.data import DataPipeline, DatasetSplits, MapDataset, as_dataset
from paceline.data.dataset import FeatureOptions
from paceline.data.dataset_builder import build_dataset, build_splits
from paceline.data.row_access import FirstRows, SingleRows
from paceline.data.stores import is_url_or_path
from paceline.data.streaming import PipelinedDataset
from paceline.errors import UsageError
from paceline.job import Job, display_name
from paceline.specs.optimizer import OptimizerSpec
from paceline.strategies.runner import LossOf


@dataclass(frozen=True)
class JobData:
    """Datasets of a worker; custom data may lack `val` and `test`."""

    train: MapDataset
    val: MapDataset | None
    test: MapDataset | None
    dataset: DatasetSplits | None = None

    def notes(self, workers: int) -> tuple[str, ...]:
        """Returns caveats to show with the results of a run with this many workers."""
        notes = self.dataset.notes if self.dataset is not None else ()
        if workers > 1 and isinstance(self.train, PipelinedDataset) and self.train.shard == "off":
            rows = len(self.train)
            off = f"shard off: every worker trains on all {rows:,} rows, so an epoch sees each "
            return (*notes, f"{off}sample {workers} times, once per worker")
        return notes

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(name for name in ("val", "test") if getattr(self, name) is not None)


def load_job_data(job: Job) -> JobData:
    """Loads the job's data. Raises a one-line DataError or UsageError."""
    data = _load(job)
    if job.has_named_data:
        data = _change_access(data, job)
    if job.shard != "off":
        return data
    return replace(data, train=replace(as_pipelined(data.train), shard="off"))


def _change_access(data: JobData, job: Job) -> JobData:
    """Applies the options of a job on how rows of a named dataset are fetched."""
    if (limit := job.limit) is not None:
        train, val, test = (
            part and FirstRows(part, limit) for part in (data.train, data.val, data.test)
        )
        assert train is not None
        assert data.dataset is not None
        used = f"only {len(train):,} of {len(data.train):,} training rows are used (limit)"
        noted = replace(data.dataset, notes=(*data.dataset.notes, used))
        data = JobData(train, val, test, noted)
    if job.row_by_row:
        data = replace(data, train=SingleRows(data.train))
    if job.prefetch is not None:
        pipeline = DataPipeline(urls=()).prefetch(job.prefetch)
        data = replace(data, train=replace(as_pipelined(data.train), pipeline=pipeline))
    return data


def as_pipelined(dataset: MapDataset) -> PipelinedDataset:
    return dataset if isinstance(dataset, PipelinedDataset) else PipelinedDataset(dataset)


def _load(job: Job) -> JobData:
    given = job.data
    options = FeatureOptions(
        dtype=job.dtype,
        augment=job.augment,
        seed=job.seed,
        scaling=job.scaling,
        validation=job.validation_spec,
    )
    if isinstance(given, str) and is_url_or_path(given):
        given = build_splits(given, *job.pipelines(), options)
    elif isinstance(given, str):
        given = data_room.load(given, data_dir=job.data_dir, **vars(options))
    elif callable(given):
        given = given()
    if isinstance(given, DataPipeline):
        given = build_splits(given.urls[0], given, None, options)
    if isinstance(given, DatasetSplits):
        return JobData(given.train, given.val, given.test, given)
    if isinstance(given, Mapping) and "train" in given:  # A DatasetDict of Hugging Face.
        names = ("train",), ("validation", "val", "valid"), ("test",)
        given = [next((given[n] for n in each if n in given), None) for each in names]
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise UsageError("data must be, or return, (train, val, test); val and test may be None")
    for name in ("validation", "scaling"):
        if getattr(job, name) is not None:
            raise UsageError(f"{name} does not apply to (train, val, test); remove it")
    train, val, test = (
        None if part is None else as_dataset(part, dtype=job.dtype) for part in given
    )
    if train is None or len(train) == 0:
        raise UsageError("the training data is empty; at least one sample is required")
    return JobData(train, val, test)


def load_test_split(job: Job, *, whole: bool) -> MapDataset | None:
    """Returns the test split; with `whole`, all data at a URL that has no test split."""
    table = load_job_data(job).test
    if table is None and whole and isinstance(job.data, str):
        table = build_dataset(job.pipelines()[0], FeatureOptions(dtype=job.dtype)).train
    return table


def build_model(job: Job, tables: JobData) -> torch.nn.Module:
    """Builds the job's model with initial weights from the job's seed."""
    torch.manual_seed(job.seed)
    if isinstance(job.model, str):
        shape, classes = input_facts(tables)
        model = models.build(job.model, input_shape=shape, classes=classes)
    elif isinstance(job.model, torch.nn.Module):
        model = job.model
    elif callable(job.model):
        model = job.model()
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"model {display_name(job.model)} returned {type(model).__name__}, "
                "expected a torch.nn.Module"
            )
    else:
        raise UsageError(f"model must be a name, a module or a function, got {job.model!r}")
    model = model.to(dtype=getattr(torch, job.dtype), device=choose_device(job))
    if job.recompute:
        checkpoint_activations(model)
    if job.channels_last:
        model.register_forward_pre_hook(_put_channels_last)
    if job.compile:
        model.compile()
    return model


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Recomputes each block in backward, with the same random numbers. Raises UsageError.

    Only the inputs of each block are kept until then.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            "recompute: the model has no blocks to recompute (modules with parts in "
            "a Sequential or ModuleList); remove it"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the outermost members of a Sequential or ModuleList that have submodules."""
    inside: set[torch.nn.Module] = set()
    blocks = []
    for row in model.modules():
        if not isinstance(row, torch.nn.Sequential | torch.nn.ModuleList) or row in inside:
            continue
        for block in row.children():
            if block not in inside and any(True for _ in block.children()):
                blocks.append(block)
                inside.update(block.modules())
    return blocks


def _put_channels_last(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts inputs to channels-last, which convolutions propagate; weights are unchanged."""
    return tuple(
        x.contiguous(memory_format=torch.channels_last)
        if isinstance(x, torch.Tensor) and x.dim() == 4
        else x
        for x in inputs
    )


def choose_device(job: Job) -> torch.device:
    if job.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: torch finds no CUDA device on this machine; use device=cpu")
    wanted = job.device if job.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def input_facts(tables: JobData) -> tuple[tuple[int, ...], int]:
    """Returns the input shape and the number of classes, for a built-in model."""
    if tables.dataset is not None:
        if tables.dataset.classes is None:
            raise UsageError(
                f"{tables.dataset.name}: built-in models require the number of classes; "
                "use --classes, or a custom model if labels are not classes"
            )
        return tables.dataset.input_shape, tables.dataset.classes
    shape: tuple[int, ...] = ()
    highest = 0
    for start in range(0, len(tables.train), 4096):
        rows = np.arange(start, min(start + 4096, len(tables.train)))
        inputs, targets = tables.train.batch(rows)
        if targets.is_floating_point():
            raise UsageError("built-in models require integer class labels; pass a custom model")
        shape = tuple(inputs.shape[1:])
        highest = max(highest, int(targets.max()))
    return shape, highest + 1


def build_loss(job: Job, model: torch.nn.Module) -> LossOf:
    """Returns the mean loss of a batch, including the model's regularization."""
    chosen: LossOf = job.loss if job.loss is not None else cross_entropy
    regularization = getattr(model, "regularization", None)
    if regularization is None:
        return chosen
    return lambda output, target: chosen(output, target) + regularization()


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Computes cross-entropy over the last dimension, for (N, C) and (N, T, C)."""
    if output.dim() > 2:
        output, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    return torch.nn.functional.cross_entropy(output, target)


def build_optimizer(
    spec: OptimizerSpec, lr: float, model: torch.nn.Module
) -> torch.optim.Optimizer:
    cls = pkgutil.resolve_name(spec.torch_class)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient: nothing to train")
    try:
        optimizer: Any = cls(trained, lr=lr, **spec.options())
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"optimizer {spec}: {error}") from None
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer

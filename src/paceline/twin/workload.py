"""Derives the workload of a job: parameters, operations and samples, counted on the real model."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.job import Job, display_name
from paceline.plan.cost_model import Workload
from paceline.protocol.messages import Lease
from paceline.specs.optimizer import count_slots
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.job_builder import (
    JobData,
    build_loss,
    build_model,
    choose_device,
    load_job_data,
)

PROBE_SAMPLES = 2
"""BatchNorm requires more than one row."""


def workload_of_job(job: Job) -> Workload:
    """Reads the job's data and counts its workload."""
    return count_workload(job, load_job_data(job))


def count_workload(job: Job, tables: JobData) -> Workload:
    """Counts the workload without changing the random generator or the job's model."""
    generator = torch.get_rng_state()
    model = build_model(job, tables)
    count = min(PROBE_SAMPLES, len(tables.train))
    loader = BatchLoader(tables.train, job.seed, choose_device(job))
    inputs, targets = loader.batch(Lease(0, 0, 0, count, 0, count))
    buffers_before = {n: b.clone() for n, b in model.named_buffers()}
    counter = FlopCounterMode(display=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    flops_before: dict[torch.nn.Parameter, int] = {}

    def record_flops(parameter: torch.Tensor) -> None:
        flops_before[parameter] = counter.get_total_flops()  # type: ignore[index]

    input_bytes: dict[torch.nn.Parameter, float] = {}

    def record_inputs(module: torch.nn.Module, inputs_of_module: tuple[object, ...]) -> None:
        nbytes = sum(t.nbytes for t in inputs_of_module if isinstance(t, torch.Tensor)) / count
        for parameter in module.parameters(recurse=False):
            input_bytes.setdefault(parameter, nbytes)

    hooks = [p.register_post_accumulate_grad_hook(record_flops) for p in trained]  # type: ignore[no-untyped-call]
    hooks += [m.register_forward_pre_hook(record_inputs) for m in model.modules()]
    with counter:
        build_loss(job, model)(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers_before[name])
    model.zero_grad(set_to_none=True)
    torch.set_rng_state(generator)
    total = max(1, counter.get_total_flops())
    spec = job.optimizer_spec
    return Workload(
        model=display_name(job.model) or "model",
        data=display_name(job.data) or "data",
        shapes=tuple(tuple(p.shape) for p in trained),
        item_bytes=trained[0].element_size(),
        flops_per_sample=counter.get_total_flops() / count,
        samples=len(tables.train),
        batch=job.batch,
        epochs=job.epochs,
        evaluated={split: len(getattr(tables, split)) for split in tables.splits},
        slots=count_slots(spec.name, spec.options()),
        # An unused parameter never has a gradient; its bucket waits until the end.
        gradient_ready=tuple(min(1.0, flops_before.get(p, total) / total) for p in trained),
        input_bytes_per_sample=tuple(input_bytes.get(p, 0.0) for p in trained),
        checkpoints=_count_checkpoints(job, len(tables.train)),
        uses_gpus=job.device != "cpu",
    )


def _count_checkpoints(job: Job, samples: int) -> int:
    every = job.checkpoint_point
    return 0 if every is None else samples * job.epochs // every.resolve(samples, job.epochs)

"""The training loop of a Job, from its first lease to its last."""

from __future__ import annotations

from paceline.job import Job
from paceline.protocol.messages import EpochEnd
from paceline.strategies.runner import Replica
from paceline.telemetry.phase_clock import INPUT, OTHER, PhaseClock
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.coordinator_client import CoordinatorClient
from paceline.worker.job_builder import Loss
from paceline.worker.profiler import EpochProfiler


def run_training_loop(
    job: Job,
    agent: CoordinatorClient,
    replica: Replica,
    feed: BatchLoader,
    loss_of: Loss,
    clock: PhaseClock,
    profiler: EpochProfiler | None = None,
) -> None:
    """Processes every lease that the coordinator grants."""
    model, optimizer = replica.model, replica.optimizer
    schedule, base_lr, samples = job.schedule_spec, job.base_lr, feed.samples
    total = samples * job.epochs
    model.train()
    for work in agent.steps():
        if isinstance(work, EpochEnd):
            continue
        lease = work.lease
        if profiler is not None:
            profiler.step_begins(lease.epoch)
        seen = lease.epoch * samples + lease.start
        lr = base_lr * schedule.factor(seen, per_epoch=samples, total=total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)

        rows = agent.rows_for(lease)
        batch = None
        if rows.samples:
            clock.enter(INPUT)
            batch = feed.batch(rows)
            clock.enter(OTHER)
        agent.begin(work)
        agent.finish(work, agent.forward_backward(work, batch, loss_of))

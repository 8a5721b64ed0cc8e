"""The training loop of a Job, from its first lease to its last."""

from __future__ import annotations

from paceline.job import Job
from paceline.protocol.messages import EpochOver
from paceline.strategies.runner import Replica
from paceline.telemetry.phases import INPUT, OTHER, PhaseClock
from paceline.worker.agent import Agent
from paceline.worker.build import Loss
from paceline.worker.feed import Feed
from paceline.worker.profile import EpochProfiler


def train(
    job: Job,
    agent: Agent,
    replica: Replica,
    feed: Feed,
    loss_of: Loss,
    clock: PhaseClock,
    profiler: EpochProfiler | None = None,
) -> None:
    """Run every lease that the coordinator hands out."""
    model, optimizer = replica.model, replica.optimizer
    schedule, base_lr, samples = job.schedule_spec, job.base_lr, feed.samples
    total = samples * job.epochs
    model.train()
    for work in agent.work():
        if isinstance(work, EpochOver):
            continue
        lease = work.lease
        if profiler is not None:
            profiler.step_begins(lease.epoch)
        seen = lease.epoch * samples + lease.start
        lr = base_lr * schedule.factor(seen, per_epoch=samples, total=total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)

        rows = agent.reads(lease)
        batch = None
        if rows.samples:
            clock.enter(INPUT)
            batch = feed.batch(rows)
            clock.enter(OTHER)
        agent.begin(work)
        agent.finish(work, agent.compute(work, batch, loss_of))

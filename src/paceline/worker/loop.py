"""The training loop of a Job, from its first lease to its last."""

from __future__ import annotations

from paceline.job import Job
from paceline.protocol.messages import EpochOver, Measured
from paceline.strategies.runner import Replica
from paceline.telemetry.phases import BACKWARD, FORWARD, INPUT, OTHER, PhaseClock
from paceline.worker.agent import Agent
from paceline.worker.build import Loss, count_correct
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

        if lease.samples == 0:
            # An empty share: nothing to compute, but the others wait for this worker's part.
            agent.begin(work)
            agent.finish(work, Measured(0, 0, 0.0, 0))
            continue
        clock.enter(INPUT)
        inputs, targets = feed.batch(lease)
        clock.enter(OTHER)
        agent.begin(work)
        clock.enter(FORWARD)
        output = model(inputs)
        loss = loss_of(output, targets)
        clock.enter(BACKWARD)
        loss.backward()  # type: ignore[no-untyped-call]
        correct, predictions = count_correct(output, targets)
        agent.finish(
            work, Measured(lease.samples, predictions, loss.item() * lease.samples, correct)
        )

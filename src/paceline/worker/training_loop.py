"""Trains a job on a worker, from its assignment to its last lease."""

from __future__ import annotations

from paceline.comm.wire import ControlConnection
from paceline.job import Job
from paceline.protocol.messages import EpochEnd, WorkerReady
from paceline.strategies.runner import LossOf, Replica
from paceline.telemetry.phase_clock import EVAL, INPUT, OTHER, PREPARE, READ
from paceline.worker.assignment import Assignment, unpack_live
from paceline.worker.batch_loader import BatchLoader
from paceline.worker.coordinator_client import CoordinatorClient, LoopHooks
from paceline.worker.epoch_profiler import EpochProfiler
from paceline.worker.evaluation import EvalShard, Predict, evaluate_shard
from paceline.worker.job_builder import (
    build_loss,
    build_model,
    build_optimizer,
    choose_device,
    load_job_data,
)
from paceline.worker.memory_check import check_memory
from paceline.worker.probes import probe_speed
from paceline.worker.session import Session


def run_worker_job(
    assignment: Assignment, control: ControlConnection, live: bytes | None, wait_s: float
) -> None:
    """Trains a job: read data, build the model, join the group, train until the run ends."""
    session = Session(assignment, control, wait_s)
    session.stages.enter(READ)
    if live is not None:
        job: Job = unpack_live(live)
    else:
        assert assignment.job is not None
        job = assignment.job.resolve()
    device = choose_device(job)
    tables = load_job_data(job)
    session.stages.enter(PREPARE)
    model = build_model(job, tables)
    optimizer = build_optimizer(job.optimizer_spec, job.base_lr, model)
    loss_of = build_loss(job, model)
    check_memory(session.strategy, model, optimizer, session.size)
    replica = Replica(model, optimizer, clip=job.clip, micro_batch=job.micro_batch)
    state = session.start(replica, seed=job.seed)
    set_worker = getattr(model, "set_worker", None)
    if set_worker is not None:
        set_worker(session.rank)

    def evaluate(split: str, share: EvalShard, predict: Predict) -> tuple[float, int | None, int]:
        return evaluate_shard(
            model,
            loss_of,
            getattr(tables, split),
            share=share,
            predict=predict,
            device=device,
            alive=lambda: session.clock.enter(EVAL),
        )

    feed = BatchLoader(
        tables.train,
        job.seed,
        device,
        rank=session.rank,
        workers=session.size,
        share=job.batch // session.size,
        tell=session.write_input,
    )
    if assignment.checkpoint is None:
        session.stages.enter(READ)
        feed.warm_up()
    profiler = EpochProfiler(session, assignment.profile_epochs)
    hooks = LoopHooks(
        evaluate=evaluate,
        on_leases_known=feed.prefetch,
        on_quiesce=profiler.stop,
        input_stats=feed.totals,
    )
    session.client = CoordinatorClient(session, state, hooks, samples_per_epoch=feed.samples)
    del state  # Its tensors are the model's: strategies that split it free what they can.
    speed, cv = 0.0, 0.0
    if session.strategy.needs_worker_speeds:
        # At its slowest: the groups are fixed for the whole run.
        slow = session.slowdown.max_factor if session.slowdown is not None else 1.0
        speed, cv = probe_speed(model, loss_of, feed, job.batch // session.size or 1)
        speed /= slow
    ready = WorkerReady(
        session.rank,
        feed.samples,
        job.batch,
        job.epochs,
        tables.splits,
        speed,
        feed.layout,
        cv=cv,
        exchange=session.probe_exchange(),
        notes=tables.notes(session.size),
    )
    control.greeting = lambda: [ready]
    control.send(ready)
    run_training_loop(job, session, session.client, feed, loss_of, profiler)
    feed.close()
    session.close()


def run_training_loop(
    job: Job,
    session: Session,
    client: CoordinatorClient,
    feed: BatchLoader,
    loss_of: LossOf,
    profiler: EpochProfiler,
) -> None:
    """Processes every lease that the coordinator grants."""
    replica, clock = session.context.replica, session.clock
    schedule, base_lr, samples = job.schedule_spec, job.base_lr, feed.samples
    total = samples * job.epochs
    replica.model.train()
    for work in client.steps():
        if isinstance(work, EpochEnd):
            continue
        lease = work.lease
        profiler.step_begins(lease.epoch)
        seen = lease.epoch * samples + lease.start
        lr = base_lr * schedule.factor(seen, per_epoch=samples, total=total) * client.lr_gain
        for group in replica.optimizer.param_groups:
            group["lr"] = lr
        replica.optimizer.zero_grad(set_to_none=True)

        rows = client.runner.rows_for(lease)
        batch = None
        if rows.samples:
            clock.enter(INPUT)
            batch = feed.batch(rows)
            clock.enter(OTHER)
        with client.interruptible():
            client.begin(work)
            client.finish(work, client.runner.forward_backward(work, batch, loss_of))

"""Support for custom training loops: three lines around model, optimizer and loader.

    import paceline
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, epochs=10)
    ...                                     # the loop stays as it is; one optimizer.step() a batch

Run by `paceline launch loop.py --strategy S --workers N`; started as an ordinary script, `prepare`
changes nothing. The loader's batch size is the global batch: each worker gets its share of it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from paceline.comm.wire import ControlConnection
from paceline.errors import UsageError
from paceline.protocol.messages import EpochEnd, StepStats, WorkerReady
from paceline.strategies.runner import Replica, TrainStep
from paceline.telemetry.phase_clock import BACKWARD, FORWARD, INPUT, PREPARE
from paceline.worker.assignment import Assignment
from paceline.worker.batch_loader import EpochOrder
from paceline.worker.coordinator_client import CoordinatorClient, LoopHooks
from paceline.worker.script import run_script
from paceline.worker.session import Session

_session: Session | None = None
"""Session of this process, if `paceline launch` started it."""

_loader: LeasedLoader | None = None

SEED = 0
"""Seed of the sample order. The loader's own sampler is ignored."""


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    *,
    epochs: int | None = None,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Prepares a training loop for a strategy. Raises UsageError for unsupported objects.

    `epochs` is needed only for a switch at a fraction of the run.
    """
    if _session is None:
        return model, optimizer, loader
    session = _session
    if session.client is not None:
        raise UsageError("paceline.prepare() was called twice; a run trains one model")
    dataset, batch = _inspect(loader)
    replica = Replica(model, optimizer, reduce_in_backward=True)
    session.join_group(replica, seed=torch.initial_seed() % 2**31)
    client = session.client = CoordinatorClient(
        session, session.broadcast_state(), LoopHooks(), samples_per_epoch=len(dataset)
    )
    session.control.send(
        WorkerReady(
            session.rank, len(dataset), batch, epochs, (), exchange=session.probe_exchange()
        )
    )
    global _loader
    leased = _loader = LeasedLoader(loader, client, session)
    _take_over_step(optimizer, leased)
    model.register_forward_hook(lambda *_: session.clock.enter(BACKWARD))
    return model, optimizer, leased


def _inspect(loader: DataLoader[Any]) -> tuple[Any, int]:
    dataset = getattr(loader, "dataset", None)
    batch = getattr(loader, "batch_size", None)
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            "prepare() requires a DataLoader over a dataset with __len__ and __getitem__, "
            "because samples are leased by index"
        )
    if not batch:
        raise UsageError(
            "prepare() requires a DataLoader with a batch_size (the global batch size)"
        )
    if len(dataset) == 0:
        raise UsageError("the loader's dataset is empty")
    return dataset, int(batch)


def _take_over_step(optimizer: torch.optim.Optimizer, loader: LeasedLoader) -> None:
    """Replaces optimizer.step() with exchange and update; runners call the original."""

    def step(self: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise UsageError("optimizer.step(closure) is not supported; remove the closure")
        loader.finish_step()

    # Learning-rate schedulers look for this mark, and wrap bound methods only.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer._opt_called = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


class LeasedLoader:
    """Wraps a loader; yields this worker's share of each global batch."""

    def __init__(self, loader: DataLoader[Any], client: CoordinatorClient, session: Session):
        self.dataset = cast(Any, loader.dataset)
        self.batch_size = loader.batch_size
        self._collate = loader.collate_fn
        self._client = client
        self._clock = session.clock
        self._stream = client.steps()
        self._work: TrainStep | None = None
        self.loss: float | None = None
        self._order = EpochOrder(len(self.dataset), SEED)

    def __len__(self) -> int:
        assert self.batch_size is not None
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._check_finished()
        for work in self._stream:
            if isinstance(work, EpochEnd):
                return
            lease = work.lease
            if lease.samples == 0:
                self._client.begin(work)
                self._client.finish(work, StepStats(0, 0, 0.0, 0))
                continue
            self._clock.enter(INPUT)
            rows = self._order.rows(lease.epoch, lease.lo, lease.hi)
            batch = self._collate([self.dataset[int(i)] for i in rows])
            self._client.begin(work)
            self._work, self.loss = work, None
            self._clock.enter(FORWARD)
            yield batch
            self._check_finished()

    def _check_finished(self) -> None:
        if self._work is not None:
            raise UsageError("optimizer.step() was not called for a batch; call it once per batch")

    def finish_step(self) -> None:
        work, self._work = self._work, None
        if work is None:
            raise UsageError("optimizer.step() was called without a batch from the prepared loader")
        samples = work.lease.samples
        loss_sum = None if self.loss is None else self.loss * samples
        self._client.finish(work, StepStats(samples, samples, loss_sum, None))


def log(loss: float | torch.Tensor) -> None:
    """Logs the loss of the current batch, for curves and divergence detection.

    Does nothing in a script that was started without `paceline launch`.
    """
    if _loader is not None:
        _loader.loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def rank() -> int:
    """Returns this worker's rank; 0 in a script started without `paceline launch`."""
    return _session.rank if _session is not None else 0


def run_worker_script(assignment: Assignment, control: ControlConnection, wait_s: float) -> None:
    """Runs a custom training loop; its `paceline.prepare` finds this session."""
    global _session
    assert assignment.script is not None
    session = _session = Session(assignment, control, wait_s)
    session.stages.enter(PREPARE)
    run_script(assignment.script, assignment.script_args, session.size)
    if session.client is None:
        raise UsageError(
            f"{assignment.script} called neither paceline.prepare(model, optimizer, loader) "
            "nor fit() of a Keras model"
        )
    session.client.finish_custom_loop()
    session.close()

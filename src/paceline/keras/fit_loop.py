"""One Keras model under a strategy: leases in, Keras's own `train_step` in the middle.

Keras computes: forward pass, loss, backward pass and metrics are its own, so models with a
`train_step` of their own work as long as it applies gradients once. What `optimizer.apply` would
have done is done by the strategy when the step has returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from paceline.comm.state_exchange import all_gather_sections
from paceline.errors import UsageError
from paceline.keras.fit_data import FitData
from paceline.keras.module import KerasModule
from paceline.keras.optimizer_conversion import (
    export_slots,
    import_slots,
    make_torch_optimizer,
    step_at,
    translate,
)
from paceline.protocol.messages import EpochEnd, Lease, StepStats, WorkerReady, split_batch
from paceline.state import Section, slots_by_parameter
from paceline.strategies.runner import Replica, WorkerContext
from paceline.telemetry.phase_clock import BACKWARD, EVAL, FORWARD, INPUT
from paceline.worker.coordinator_client import CoordinatorClient, LoopCallbacks
from paceline.worker.session import Session

BUILD_ROWS = 2


class FitSession:
    """The model that this run trains, from the first `fit` of the script to its end."""

    def __init__(
        self, session: Session, model: Any, source: FitData, validation: FitData | None, seed: int
    ) -> None:
        self._session = session
        self.model = model
        self._source, self._validation = source, validation
        self._facts = (source.samples, source.batch)
        self._seed = seed
        self.in_batch = False
        self._batch_loss: float | None = None
        self._applied = False
        self._callbacks: Any = None
        self._train_logs: dict[str, Any] | None = None
        self._validation_logs: dict[str, Any] = {}
        count = min(BUILD_ROWS, source.samples)
        model._symbolic_build(data_batch=_without_none(source.take(0, 0, count)))
        if not model.trainable_variables:
            raise UsageError("the Keras model has no trainable weights: nothing to train")
        self._optimizer = model.optimizer
        self._translated = translate(model.optimizer)
        self._module = KerasModule(model)
        self._torch = make_torch_optimizer(model.optimizer, self._module.parameters())
        import_slots(model.optimizer, model, self._torch)
        self._steps_before = int(model.optimizer.iterations)
        self._around: WorkerContext | None = None
        self._agent: CoordinatorClient | None = None
        self._stream: Any = None
        self._epoch = 0
        """Of the run: it goes on counting where a script calls fit several times."""

    # ---- before and between -------------------------------------------------------------------

    def begin(self, epochs: int) -> None:
        """Meet the other workers; all begin from worker 0's weights."""
        session, batch = self._session, self._source.batch
        if batch < session.size:
            raise UsageError(
                f"batch_size {batch} is smaller than --workers {session.size}: "
                "it is the global batch and must give every worker a sample"
            )
        replica = Replica(self._module, self._torch, clip=self._translated.clip)
        around = self._around = session.join_group(replica)
        session.start_heartbeat(around)
        self._check_same_data(around)
        session.seed_worker(self._seed)
        self._module.set_worker(session.rank)
        state = session.broadcast_state(around)

        def save(name: str, state: Any) -> str:
            raise AssertionError("a script keeps its own checkpoints")

        duties = LoopCallbacks(
            evaluate=lambda split, share, predict: self._evaluate(split),
            save=save,
            save_model=lambda distant: session.files.save_model(self._module, distant),
        )
        agent = self._agent = session.make_client(around, state, duties, self._source.samples)
        splits = ("val",) if self._validation is not None else ()
        session.control.send(
            WorkerReady(
                session.rank,
                self._source.samples,
                batch,
                epochs,
                splits,
                clip=self._translated.clip,
            )
        )
        self._stream = agent.steps()

    def _check_same_data(self, around: WorkerContext) -> None:
        mine = Section(plain={"digest": self._source.digest(), "seed": self._seed})
        others = [section.plain for section in all_gather_sections(mine, around.group)]
        for rank, other in enumerate(others):
            if other != others[0]:
                raise UsageError(
                    f"worker {rank} was given other data by the script than worker 0: every worker "
                    "runs the script, so seed whatever shuffles or splits (random_state=0)"
                )

    def check_again(self, model: Any, source: FitData) -> None:
        """A run trains one model on data of one size; a later fit must go on with the same."""
        if model is not self.model or model.optimizer is not self._optimizer:
            raise UsageError(
                "fit() was called for a second model (or one that was compiled anew): one run "
                "trains one model, so run the other in a script of its own"
            )
        if (source.samples, source.batch) != self._facts:
            raise UsageError(
                f"fit() was called again with {source.samples} samples in batches of "
                f"{source.batch}, not {self._facts[0]} in batches of {self._facts[1]}: "
                "run it in a script of its own"
            )

    def synchronize(self) -> None:
        assert self._around is not None
        self._around.group.barrier()

    # ---- fit ----------------------------------------------------------------------------------

    def fit(
        self,
        source: FitData,
        validation: FitData | None,
        *,
        epochs: Iterable[int],
        callbacks: Any,
        validation_freq: Any,
    ) -> Any:
        """Keras's own sequence of callbacks around epochs that the coordinator hands out."""
        model = self.model
        self._source, self._callbacks = source, callbacks
        if validation is not None:
            self._validation = validation
        model.stop_training = False
        with self._listening():
            logs = self._run_epochs(epochs, validation_freq)
        self._give_back()
        callbacks.on_train_end(logs=logs)
        return model.history

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """While fit runs, Keras's step hands loss and gradients to us; afterwards it is its own."""
        tracker = self.model._loss_tracker
        # Past Keras's own __setattr__, which would track what is set.
        object.__setattr__(self._optimizer, "apply", self._note_gradients)
        object.__setattr__(tracker, "update_state", self._note_loss(tracker.update_state))
        try:
            yield
        finally:
            object.__delattr__(self._optimizer, "apply")
            object.__delattr__(tracker, "update_state")

    def _run_epochs(self, epochs: Iterable[int], validation_freq: Any) -> dict[str, Any]:
        model, callbacks = self.model, self._callbacks
        logs: dict[str, Any] = {}
        callbacks.on_train_begin()
        for epoch in epochs:
            model.reset_metrics()
            self._train_logs, self._validation_logs = None, {}
            callbacks.on_epoch_begin(epoch)
            model.train()
            self._run_epoch()
            model.eval()
            logs = self._train_logs or self._sum_metrics()
            if self._validation is not None and model._should_eval(epoch, validation_freq):
                logs |= {f"val_{name}": value for name, value in self._validation_logs.items()}
            self._epoch += 1
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        return logs

    def _run_epoch(self) -> None:
        assert self._agent is not None
        agent, clock, batches = self._agent, self._session.clock, 0
        for work in self._stream:
            if isinstance(work, EpochEnd):
                return
            self._set_rate(work.lease)
            self._torch.zero_grad(set_to_none=True)
            if work.lease.samples == 0:
                agent.begin(work)
                agent.finish(work, StepStats(0, 0, 0.0, 0))
                continue
            clock.enter(INPUT)
            data = self._source.take(work.lease.epoch, work.lease.lo, work.lease.hi)
            agent.begin(work)
            self.in_batch = True
            self._callbacks.on_train_batch_begin(batches)
            clock.enter(FORWARD)
            right_before = self._right()
            self._batch_loss, self._applied = None, False
            logs = self.model.train_step(data)
            if not self._applied:
                raise UsageError(
                    "the model's train_step never called optimizer.apply(): "
                    "gradients must be applied once a batch"
                )
            agent.finish(work, self._measure(work.lease.samples, right_before))
            self._callbacks.on_train_batch_end(batches, logs)
            self.in_batch = False
            batches += 1
        raise UsageError("the run ended before fit() did: a stop was reached (until, patience)")

    def _set_rate(self, lease: Lease) -> None:
        step = step_at(lease.epoch, lease.start, *self._facts)
        self._optimizer.iterations.assign(self._steps_before + step)
        rate = float(self._optimizer._get_current_learning_rate())
        for group in self._torch.param_groups:
            group["lr"] = rate

    def _measure(self, samples: int, right_before: int | None) -> StepStats:
        loss_sum = None if self._batch_loss is None else self._batch_loss * samples
        right = self._right()
        correct = None if right is None or right_before is None else right - right_before
        return StepStats(samples, samples, loss_sum, correct)

    def _note_gradients(self, gradients: Any, variables: Any = None) -> None:
        if self._applied:
            raise UsageError(
                "the model's train_step applied gradients twice: once a batch is known"
            )
        self._applied = True

    def _note_loss(self, update: Any) -> Any:
        def noted(value: Any, *args: Any, **options: Any) -> Any:
            if self.in_batch:
                self._batch_loss = float(value.detach())
                self._session.clock.enter(BACKWARD)
            return update(value, *args, **options)

        return noted

    # ---- metrics ------------------------------------------------------------------------------

    def _right(self) -> int | None:
        """Right predictions so far in this epoch, where the model counts them itself."""
        accuracy = self._accuracy()
        return None if accuracy is None else round(float(accuracy.total))

    def _accuracy(self) -> Any | None:
        compiled = self.model._compile_metrics
        for metric in getattr(compiled, "metrics", ()) if compiled is not None else ():
            if type(metric).__name__.endswith("Accuracy") and hasattr(metric, "total"):
                return metric
        return None

    def _sum_metrics(self) -> dict[str, Any]:
        """Metrics over all workers: what they add up is added up, as tf.distribute does."""
        assert self._around is not None
        variables = [v for metric in self.model.metrics for v in metric.variables]
        if variables:
            flat = torch.cat([v.value.detach().double().reshape(-1).cpu() for v in variables])
            self._around.group.all_reduce(flat)
            parts = torch.split(flat, [v.value.numel() for v in variables])
            for variable, part in zip(variables, parts, strict=True):
                variable.assign(part.reshape(variable.shape).to(variable.value.dtype))
        results = self.model.get_metrics_result()
        return {
            name: float(value) if _is_scalar(value) else value for name, value in results.items()
        }

    def _evaluate(self, split: str) -> tuple[float, int | None, int]:
        """This worker's share of the validation data, when the coordinator asks for it."""
        assert self._validation is not None
        source, session = self._validation, self._session
        self._train_logs = self._sum_metrics()
        model = self.model
        model.reset_metrics()
        model.eval()
        self._callbacks.on_test_begin()
        cuts = split_batch(source.samples, session.size)
        lo, hi = cuts[session.rank], cuts[session.rank + 1]
        with torch.no_grad():
            for number, start in enumerate(range(lo, hi, source.batch)):
                session.clock.enter(EVAL)
                self._callbacks.on_test_batch_begin(number)
                logs = model.test_step(source.take(0, start, min(start + source.batch, hi)))
                self._callbacks.on_test_batch_end(number, logs)
        tracker = model._loss_tracker
        mine = (float(tracker.total), self._right(), hi - lo)
        self._validation_logs = self._sum_metrics()
        self._callbacks.on_test_end(self._validation_logs)
        model.reset_metrics()
        return mine

    # ---- after --------------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Into the Keras optimizer what it would know now, so that saving the model keeps it."""
        assert self._agent is not None
        steps = self._epoch * -(-self._facts[0] // self._facts[1])
        self._optimizer.iterations.assign(self._steps_before + steps)
        if not self._epoch:
            return
        trained = {id(p): name for name, p in self._module.named_parameters()}
        variables = self.model.trainable_variables
        slots = slots_by_parameter(self._agent.export_state())
        export_slots(self._optimizer, variables, [trained[id(v.value)] for v in variables], slots)


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 0


def _without_none(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part for part in batch if part is not None) if batch[1] is None else batch

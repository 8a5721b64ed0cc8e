"""Trains a Keras model with a strategy, using Keras's own `train_step`.

Forward pass, loss, backward pass and metrics are computed by Keras, so models with a custom
`train_step` work as long as it applies gradients once. The strategy replaces `optimizer.apply` and
updates the weights when the step has returned.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.keras import optimizers
from paceline.keras.fit_data import FitData
from paceline.keras.module import KerasModule
from paceline.protocol.balance import split_batch
from paceline.protocol.messages import EpochEnd, Lease, StepStats, WorkerReady
from paceline.state import Section, slots_by_parameter
from paceline.strategies.runner import Replica
from paceline.telemetry.phase_clock import BACKWARD, EVAL, FORWARD, INPUT
from paceline.worker.coordinator_client import CoordinatorClient, LoopHooks
from paceline.worker.session import Session

BUILD_ROWS = 2


class FitSession:
    """The model of this run, from the first `fit` of the script to its end."""

    def __init__(
        self,
        session: Session,
        model: Any,
        source: FitData,
        validation: FitData | None,
        *,
        seed: int,
        epochs: int,
    ) -> None:
        """Joins the other workers; all start from worker 0's weights."""
        self._session = session
        self.model = model
        self._source, self._validation = source, validation
        self._facts = (source.samples, source.batch)
        self.in_batch = False
        self._batch_loss: float | None = None
        self._applied = False
        self._callbacks: Any = None
        self._train_logs: dict[str, Any] | None = None
        self._validation_logs: dict[str, Any] = {}
        self._epoch = 0
        """Epoch of the run; it keeps counting if a script calls fit several times."""
        rows = source.take(0, 0, min(BUILD_ROWS, source.samples))
        if rows[1] is None:
            rows = tuple(part for part in rows if part is not None)
        model._symbolic_build(data_batch=rows)
        if not model.trainable_variables:
            raise UsageError("the Keras model has no trainable weights: nothing to train")
        if source.batch < session.size:
            raise UsageError(
                f"batch_size {source.batch} is smaller than --workers {session.size}; "
                "it is the global batch size and must cover at least one sample per worker"
            )
        self._optimizer = model.optimizer
        self._steps_before = int(model.optimizer.iterations)
        self._module = KerasModule(model)
        self._torch = optimizers.make_torch_optimizer(model.optimizer, self._module.parameters())
        optimizers.import_slots(model.optimizer, model, self._torch)
        clip = optimizers.translate(model.optimizer)[1]
        session.join_group(Replica(self._module, self._torch, clip=clip), seed=seed)
        self.group = session.context.group
        self._check_same_data(seed)
        self._module.set_worker(session.rank)
        hooks = LoopHooks(evaluate=lambda split, share, predict: self._evaluate())
        self._client = session.client = CoordinatorClient(
            session, session.broadcast_state(), hooks, samples_per_epoch=source.samples
        )
        splits = ("val",) if validation is not None else ()
        session.control.send(
            WorkerReady(
                session.rank,
                source.samples,
                source.batch,
                epochs,
                splits,
                clip=clip,
                exchange=session.probe_exchange(),
            )
        )
        self._stream = self._client.steps()

    def _check_same_data(self, seed: int) -> None:
        local = Section(plain={"digest": self._source.digest(), "seed": seed})
        others = [section.plain for section in self.group.all_gather_sections(local)]
        for rank, other in enumerate(others):
            if other != others[0]:
                raise UsageError(
                    f"worker {rank} has other data than worker 0; every worker "
                    "runs the script, so seed all shuffles and splits (random_state=0)"
                )

    def check_again(self, model: Any, source: FitData) -> None:
        """Checks that a later fit continues with the same model and the same data size."""
        if model is not self.model or model.optimizer is not self._optimizer:
            raise UsageError(
                "fit() was called for a second or recompiled model, but a run trains one model; "
                "use a separate script"
            )
        if (source.samples, source.batch) != self._facts:
            raise UsageError(
                f"fit() was called again with {source.samples} samples in batches of "
                f"{source.batch} instead of {self._facts[0]} in batches of {self._facts[1]}; "
                "use a separate script"
            )

    def fit(
        self, source: FitData, validation: FitData | None, epochs: range, callbacks: Any, freq: Any
    ) -> Any:
        """Runs the epochs granted by the coordinator, with Keras's sequence of callbacks.

        `freq` is the `validation_freq` of Keras.
        """
        model = self.model
        logs: dict[str, Any] = {}
        self._source, self._callbacks = source, callbacks
        self._validation = validation or self._validation
        model.stop_training = False
        with self._intercepting():
            callbacks.on_train_begin()
            for epoch in epochs:
                model.reset_metrics()
                self._train_logs, self._validation_logs = None, {}
                callbacks.on_epoch_begin(epoch)
                model.train()
                self._run_epoch()
                model.eval()
                logs = self._train_logs or self._sum_metrics()
                if self._validation is not None and model._should_eval(epoch, freq):
                    logs |= {f"val_{name}": value for name, value in self._validation_logs.items()}
                self._epoch += 1
                callbacks.on_epoch_end(epoch, logs)
                if model.stop_training:
                    break
        self._restore_optimizer()
        callbacks.on_train_end(logs=logs)
        return model.history

    @contextlib.contextmanager
    def _intercepting(self) -> Iterator[None]:
        """Intercepts loss and gradients of Keras's train step while fit runs."""
        tracker = self.model._loss_tracker
        update_loss = tracker.update_state

        def apply(gradients: Any, variables: Any = None) -> None:
            if self._applied:
                raise UsageError(
                    "the model's train_step applied gradients twice; "
                    "only once per batch is supported"
                )
            self._applied = True

        def update_state(value: Any, *args: Any, **options: Any) -> Any:
            if self.in_batch:
                self._batch_loss = float(value.detach())
                self._session.clock.enter(BACKWARD)
            return update_loss(value, *args, **options)

        # Bypasses Keras's __setattr__, which would track the value.
        object.__setattr__(self._optimizer, "apply", apply)
        object.__setattr__(tracker, "update_state", update_state)
        try:
            yield
        finally:
            object.__delattr__(self._optimizer, "apply")
            object.__delattr__(tracker, "update_state")

    def _run_epoch(self) -> None:
        client, clock, batches = self._client, self._session.clock, 0
        for work in self._stream:
            if isinstance(work, EpochEnd):
                return
            self._set_rate(work.lease)
            self._torch.zero_grad(set_to_none=True)
            if work.lease.samples == 0:
                client.begin(work)
                client.finish(work, StepStats(0, 0, 0.0, 0))
                continue
            clock.enter(INPUT)
            data = self._source.take(work.lease.epoch, work.lease.lo, work.lease.hi)
            client.begin(work)
            self.in_batch = True
            self._callbacks.on_train_batch_begin(batches)
            clock.enter(FORWARD)
            before = self._correct()
            self._batch_loss, self._applied = None, False
            logs = self.model.train_step(data)
            if not self._applied:
                raise UsageError(
                    "the model's train_step did not call optimizer.apply(); "
                    "gradients must be applied once per batch"
                )
            samples, after = work.lease.samples, self._correct()
            correct = None if before is None or after is None else after - before
            loss_sum = None if self._batch_loss is None else self._batch_loss * samples
            client.finish(work, StepStats(samples, samples, loss_sum, correct))
            self._callbacks.on_train_batch_end(batches, logs)
            self.in_batch = False
            batches += 1
        raise UsageError("the run ended before fit(): a stop condition was met (until, patience)")

    def _set_rate(self, lease: Lease) -> None:
        step = optimizers.step_at(lease.epoch, lease.start, *self._facts)
        self._optimizer.iterations.assign(self._steps_before + step)
        rate = float(self._optimizer._get_current_learning_rate())
        for group in self._torch.param_groups:
            group["lr"] = rate

    def _correct(self) -> int | None:
        """Returns the correct predictions of this epoch so far, if the model counts them."""
        for metric in getattr(self.model._compile_metrics, "metrics", ()):
            if type(metric).__name__.endswith("Accuracy") and hasattr(metric, "total"):
                return round(float(metric.total))
        return None

    def _sum_metrics(self) -> dict[str, Any]:
        """Sums metric variables over all workers, as tf.distribute does."""
        variables = [v for metric in self.model.metrics for v in metric.variables]
        if variables:
            flat = torch.cat([v.value.detach().double().reshape(-1).cpu() for v in variables])
            self.group.all_reduce(flat)
            parts = torch.split(flat, [v.value.numel() for v in variables])
            for variable, part in zip(variables, parts, strict=True):
                variable.assign(part.reshape(variable.shape).to(variable.value.dtype))
        results = self.model.get_metrics_result()
        return {
            name: float(value) if getattr(value, "ndim", 0) == 0 else value
            for name, value in results.items()
        }

    def _evaluate(self) -> tuple[float, int | None, int]:
        """Evaluates this worker's share of the validation data, as requested by the coordinator."""
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
        local = (float(model._loss_tracker.total), self._correct(), hi - lo)
        self._validation_logs = self._sum_metrics()
        self._callbacks.on_test_end(self._validation_logs)
        model.reset_metrics()
        return local

    def _restore_optimizer(self) -> None:
        """Copies step count and slots to the Keras optimizer, so that they are saved with it."""
        steps = self._epoch * -(-self._facts[0] // self._facts[1])
        self._optimizer.iterations.assign(self._steps_before + steps)
        if not self._epoch:
            return
        trained = {id(p): name for name, p in self._module.named_parameters()}
        variables = self.model.trainable_variables
        slots = slots_by_parameter(self._client.runner.export_state())
        given = [slots.get(trained[id(variable.value)], {}) for variable in variables]
        optimizers.export_slots(self._optimizer, variables, given)

"""Runs `model.fit` of an unchanged script with a strategy of Paceline.

Every worker runs the whole script, independently until `fit`. There all workers receive worker 0's
weights, train together, and have the same model when it returns. Only worker 0 writes files.
"""

import functools
import importlib
import importlib.machinery
import sys
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.keras.fit_data import ArrayFitData, FitData, make_fit_data
from paceline.keras.fit_loop import FitSession
from paceline.keras.keras_2_names import accept_keras_2_names
from paceline.keras.machine_lock import one_at_a_time
from paceline.keras.module import check_backend
from paceline.worker import custom_loop
from paceline.worker.session import Session

IGNORED = ("max_queue_size", "workers", "use_multiprocessing")
"""Arguments of Keras 2 for its input threads."""
WORKER_0_ONLY = ("CSVLogger", "TensorBoard", "RemoteMonitor", "SwapEMAWeights")
"""Callbacks that only write output."""


def patch_fit(keras: Any) -> None:
    """Replaces `fit`; called when the script has imported keras."""
    check_backend(keras)
    from keras.src.utils import module_utils

    # Keras, which detects TensorFlow itself, must not use the stub.
    if importlib.machinery.PathFinder.find_spec("tensorflow") is None:
        module_utils.tensorflow._available = False
    accept_keras_2_names(keras)
    # The cause of an error is known by the packages in its traceback.
    keras.config.disable_traceback_filtering()
    session = custom_loop._session
    if session is None:
        return
    _FitPatch(keras, session).install()


class _FitPatch:
    """Replacement of `fit`; the first call creates the session that later calls reuse."""

    def __init__(self, keras: Any, session: Session) -> None:
        self._keras = keras
        self._session = session
        self._fit_session: FitSession | None = None
        self._seed: int | None = None

    def install(self) -> None:
        model = self._keras.Model

        @functools.wraps(model.fit)
        def fit(model_self: Any, *args: Any, **options: Any) -> Any:
            return self.fit(model_self, *args, **options)

        model.fit = fit
        # Where it is defined: Keras does not compile loaded models of classes with their own.
        trainer = next(cls for cls in model.__mro__ if "compile" in vars(cls))
        trainer.compile = self._compile_for_torch(trainer.compile)
        for name, quiet in (("evaluate", 2), ("predict", 0)):
            setattr(model, name, self._print_once(getattr(model, name), quiet))
        for name in ("save", "save_weights", "export"):
            setattr(model, name, self._write_once(getattr(model, name)))
        # tf.keras has its own modules of the same functions.
        tf_keras = importlib.import_module("keras._tf_keras.keras")
        write_model = self._write_once(self._keras.saving.save_model)
        for module in (self._keras.models, self._keras.saving, tf_keras.models):
            module.save_model = write_model
        _lock_downloads()

    def _compile_for_torch(self, method: Any) -> Any:
        """Ignores how TensorFlow would run several steps at a time, which changes no result."""

        @functools.wraps(method)
        def call(model: Any, *args: Any, **options: Any) -> Any:
            return method(model, *args, **{**options, "steps_per_execution": 1})

        return call

    def _print_once(self, method: Any, verbosity: int) -> Any:
        """Makes only worker 0 show progress, as lines instead of a bar."""

        @functools.wraps(method)
        def call(model: Any, *args: Any, **options: Any) -> Any:
            if options.get("verbose", "auto") in ("auto", 1):
                options["verbose"] = verbosity if self._session.rank == 0 else 0
            return method(model, *args, **options)

        return call

    def _write_once(self, method: Any) -> Any:
        """Makes only worker 0 write; the others wait until it is done."""

        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options) if self._session.rank == 0 else None
            if self._fit_session is not None and not self._fit_session.in_batch:
                self._fit_session.group.barrier()
            return result

        return call

    def fit(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
        **input_settings: Any,
    ) -> Any:
        if unknown := input_settings.keys() - set(IGNORED):
            raise UsageError(f"fit() has no argument {sorted(unknown)[0]!r}; remove it")
        model._assert_compile_called("fit")
        if self._seed is None:
            # Only once: after the first fit, the workers' generators differ.
            self._seed = torch.initial_seed() % 2**31
        seed = self._seed
        source = make_fit_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            seed=seed,
            class_weight=class_weight,
        )
        validation: FitData | None = None
        if validation_data is not None:
            is_pair = isinstance(validation_data, tuple | list)
            given = validation_data if is_pair else (validation_data,)
            validation = make_fit_data(
                *given,
                batch_size=validation_batch_size or source.batch,
                steps=validation_steps,
                shuffle=False,
                seed=seed,
            )
        elif validation_split:
            if not isinstance(source, ArrayFitData):
                raise UsageError("validation_split requires arrays; pass validation_data")
            source, validation = source.split(validation_split)
        if self._fit_session is None:
            self._print_batch(source)
            count = max(0, epochs - initial_epoch)
            self._fit_session = FitSession(
                self._session, model, source, validation, seed=seed, epochs=count
            )
        self._fit_session.check_again(model, source)
        return self._fit_session.fit(
            source,
            validation,
            epochs=range(initial_epoch, epochs),
            callbacks=self._list_callbacks(model, callbacks, verbose, epochs, source),
            freq=validation_freq,
        )

    def _print_batch(self, source: FitData) -> None:
        workers, steps = self._session.size, -(-source.samples // source.batch)
        if self._session.rank == 0:
            print(
                f"fit: global batch {source.batch} on {workers} workers, about "
                f"{source.batch / workers:g} per worker; {steps} steps per epoch of "
                f"{source.samples} samples",
                flush=True,
            )

    def _list_callbacks(
        self, model: Any, callbacks: Any, verbose: Any, epochs: int, source: FitData
    ) -> Any:
        known = self._keras.callbacks
        if isinstance(callbacks, known.CallbackList):
            return callbacks
        given = self._keras.tree.flatten(callbacks) if callbacks else []
        if any(isinstance(callback, known.BackupAndRestore) for callback in given):
            if self._session.rank == 0:
                print("fit: BackupAndRestore has no effect: a script begins anew", flush=True)
            given = [c for c in given if not isinstance(c, known.BackupAndRestore)]
        if self._session.rank > 0:
            writing = tuple(getattr(known, n) for n in WORKER_0_ONLY if hasattr(known, n))
            given = [c for c in given if not isinstance(c, writing)]
            verbose = 0
        return known.CallbackList(
            given,
            add_history=True,
            add_progbar=verbose != 0,
            verbose=2 if verbose in ("auto", 1) else verbose,
            epochs=epochs,
            steps=-(-source.samples // source.batch),
            model=model,
        )


def _lock_downloads() -> None:
    """Lets one worker per machine download a file to Keras's cache."""
    from keras.src.utils import file_utils

    plain = file_utils.get_file
    get_file = one_at_a_time(plain)
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.") and getattr(module, "get_file", None) is plain:
            module.get_file = get_file  # type: ignore[attr-defined]

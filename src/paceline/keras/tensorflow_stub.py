"""Stub of TensorFlow for Keras scripts, used if TensorFlow is not installed.

`tf.keras` is Keras 3 with the torch backend. In addition there are the parts of TensorFlow that
scripts around `model.fit` use: tf.data over arrays, tensor operations from Keras, seeds, and
strategy scopes, which have no effect (`paceline launch --strategy` decides). Anything else raises a
one-line error with its name. Only `paceline launch` installs the stub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.keras.backend import import_keras

VERSION = "2.16.0"
"""The first TensorFlow version whose tf.keras is Keras 3."""
REMEDY = "install TensorFlow (pip install tensorflow-cpu), or use keras.ops instead"
DTYPES = (
    *("float16", "float32", "float64", "bfloat16", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
)
# TensorFlow names of operations that Keras names differently.
OPERATIONS = {
    "convert_to_tensor": "convert_to_tensor",
    "constant": "convert_to_tensor",
    "reduce_mean": "mean",
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "concat": "concatenate",
    "pow": "power",
}
SAME_NAME = (
    *("cast", "reshape", "expand_dims", "squeeze", "transpose", "stack", "one_hot", "argmax"),
    *("zeros", "ones", "zeros_like", "ones_like", "abs", "square", "sqrt", "exp", "maximum"),
    *("minimum", "matmul", "where", "equal", "shape", "range", "tile", "add", "subtract"),
    *("multiply", "divide", "round", "sign", "tanh", "sigmoid", "split", "repeat", "linspace"),
)


class MissingStubName(UsageError, AttributeError):
    """Raised for a part of TensorFlow that the stub lacks; hasattr() treats it as missing."""


class TensorFlowStub(ModuleType):
    """A module of the stub; missing names raise a one-line error."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        where = self.__name__.replace("tensorflow", "tf", 1)
        raise MissingStubName(f"{where}.{name} is not available without TensorFlow; {REMEDY}")


def make() -> ModuleType:
    """Returns the stub of the module `tensorflow`."""
    keras = import_keras()
    ops = keras.ops
    names: dict[str, Any] = {name: name for name in DTYPES}
    names.update({name: getattr(ops, name) for name in SAME_NAME if hasattr(ops, name)})
    names.update({name: getattr(ops, keras_name) for name, keras_name in OPERATIONS.items()})
    names.update(
        __version__=VERSION,
        __path__=[],
        keras=keras,
        newaxis=None,
        function=_plain_function,
        Tensor=keras.KerasTensor,
        data=_make_data(),
        distribute=_make_distribute(),
        config=_make_config(),
        random=TensorFlowStub(
            "tensorflow.random",
            {
                "set_seed": keras.utils.set_random_seed,
                "uniform": keras.random.uniform,
                "normal": keras.random.normal,
            },
        ),
        nn=_operations("tensorflow.nn", ops, ("relu", "softmax", "sigmoid", "gelu", "moments")),
        math=_operations("tensorflow.math", ops, ("exp", "log", "square", "sqrt", "argmax", "abs")),
        image=TensorFlowStub("tensorflow.image", {"resize": keras.ops.image.resize}),
    )
    return TensorFlowStub("tensorflow", names)


def _operations(name: str, ops: Any, known: tuple[str, ...]) -> TensorFlowStub:
    return TensorFlowStub(name, {n: getattr(ops, n) for n in known if hasattr(ops, n)})


def _plain_function(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replacement of tf.function; returns the function unchanged."""
    return function if function is not None else lambda f: f


def _make_config() -> TensorFlowStub:
    none = {
        "list_physical_devices": lambda kind=None: [],
        "list_logical_devices": lambda kind=None: [],
        "run_functions_eagerly": lambda on: None,
    }
    memory = {"set_memory_growth": lambda device, on: None}
    return TensorFlowStub(
        "tensorflow.config",
        {
            **none,
            "experimental": TensorFlowStub("tensorflow.config.experimental", {**none, **memory}),
        },
    )


class DistributionStrategyStub:
    """Replacement of any tf.distribute strategy; has no effect on the model."""

    num_replicas_in_sync = 1
    """The batch size of a script is already the global one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        return

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _make_distribute() -> TensorFlowStub:
    kinds = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "Strategy")
    names: dict[str, Any] = dict.fromkeys(kinds, DistributionStrategyStub)
    names["get_strategy"] = DistributionStrategyStub
    names["experimental"] = TensorFlowStub(
        "tensorflow.distribute.experimental", dict.fromkeys(kinds[1:2], DistributionStrategyStub)
    )
    return TensorFlowStub("tensorflow.distribute", names)


def _make_data() -> TensorFlowStub:
    names = {"Dataset": TfDataset, "AUTOTUNE": -1}
    names["experimental"] = TensorFlowStub("tensorflow.data.experimental", {"AUTOTUNE": -1})
    return TensorFlowStub("tensorflow.data", names)


INFINITE, UNKNOWN = -1, -2


class TfDataset:
    """Replacement of tf.data over arrays and generators, as a chain of iterators.

    `fit` reads one epoch into arrays, once. Paceline then assigns the samples, each exactly once
    per epoch, in its own order if the dataset is shuffled.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], count: int) -> None:
        self._make = make
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return self._make()

    def __len__(self) -> int:
        if self._count < 0:
            raise TypeError("the length of the dataset is infinite or unknown")
        return self._count

    def cardinality(self) -> int:
        return self._count

    @staticmethod
    def from_tensor_slices(tensors: Any) -> TfDataset:
        tree = import_keras().tree
        arrays = tree.map_structure(np.asarray, tensors)
        count = len(tree.flatten(arrays)[0])

        def rows() -> Iterator[Any]:
            for row in range(count):
                # Called immediately, within this iteration.
                yield tree.map_structure(lambda a: a[row], arrays)  # noqa: B023

        return TfDataset(rows, count)

    @staticmethod
    def from_generator(generator: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        return TfDataset(lambda: iter(generator()), UNKNOWN)

    @staticmethod
    def zip(*sets: Any) -> TfDataset:
        given = sets[0] if len(sets) == 1 and isinstance(sets[0], tuple | list) else sets
        count = min((s._count for s in given if s._count >= 0), default=UNKNOWN)
        return TfDataset(lambda: iter(zip(*given, strict=False)), count)

    def map(self, function: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        def mapped() -> Iterator[Any]:
            for item in self:
                yield function(*item) if isinstance(item, tuple) else function(item)

        return TfDataset(mapped, self._count)

    def filter(self, function: Callable[..., Any], **options: Any) -> TfDataset:
        def kept() -> Iterator[Any]:
            for item in self:
                if bool(function(*item) if isinstance(item, tuple) else function(item)):
                    yield item

        return TfDataset(kept, UNKNOWN)

    def batch(self, size: int, drop_remainder: bool = False, **options: Any) -> TfDataset:
        from paceline.keras.fit_data import as_array

        tree = import_keras().tree

        def batched() -> Iterator[Any]:
            held = []
            for item in self:
                held.append(tree.map_structure(as_array, item))
                if len(held) == size:
                    yield tree.map_structure(lambda *rows: np.stack(rows), *held)
                    held = []
            if held and not drop_remainder:
                yield tree.map_structure(lambda *rows: np.stack(rows), *held)

        count = self._count
        if count >= 0:
            count = count // size if drop_remainder else -(-count // size)
        return TfDataset(batched, count)

    def unbatch(self) -> TfDataset:
        tree = import_keras().tree

        def single() -> Iterator[Any]:
            for item in self:
                for row in range(len(tree.flatten(item)[0])):
                    yield tree.map_structure(lambda a: a[row], item)  # noqa: B023

        return TfDataset(single, UNKNOWN)

    def take(self, count: int) -> TfDataset:
        def first() -> Iterator[Any]:
            for number, item in enumerate(self):
                if number >= count:
                    return
                yield item

        return TfDataset(first, count if self._count < 0 else min(count, self._count))

    def skip(self, count: int) -> TfDataset:
        def rest() -> Iterator[Any]:
            for number, item in enumerate(self):
                if number >= count:
                    yield item

        return TfDataset(rest, self._count if self._count < 0 else max(0, self._count - count))

    def repeat(self, count: int | None = None) -> TfDataset:
        if count is not None and count >= 0:
            total = self._count * count if self._count >= 0 else self._count
            return TfDataset(lambda: (item for _ in range(count) for item in self), total)

        def infinite() -> Iterator[Any]:
            while True:
                yield from self

        return TfDataset(infinite, INFINITE)

    def shuffle(self, buffer_size: int, *args: Any, **options: Any) -> TfDataset:
        """Returns the dataset unchanged; Paceline reshuffles all samples every epoch."""
        return self

    def cache(self, *args: Any) -> TfDataset:
        return self

    def prefetch(self, buffer_size: int) -> TfDataset:
        return self

    def with_options(self, options: Any) -> TfDataset:
        return self

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingStubName(
            f"tf.data.Dataset.{name} is not available without TensorFlow; {REMEDY}"
        )

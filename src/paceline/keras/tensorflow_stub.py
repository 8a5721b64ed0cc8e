"""Stub of TensorFlow for Keras scripts, used if TensorFlow is not installed.

`tf.keras` is Keras 3 with the torch backend. In addition there are the parts of TensorFlow that
scripts around `model.fit` use: tf.data over arrays, tensor operations from Keras, seeds, and
`tf.distribute` (`paceline.keras.distribution`). Anything else raises a one-line error with its name
and the extra that provides it. Only `paceline launch` installs the stub.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.keras.distribution import DatasetCreator, check_shard, distribute_names
from paceline.keras.module import import_keras
from paceline.worker.script import EXTRA

VERSION = "2.16.0"
"""The first TensorFlow version whose tf.keras is Keras 3."""
REMEDY = f"{EXTRA}, or use keras.ops or NumPy instead"
DTYPES = (
    *("float16", "float32", "float64", "bfloat16", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
)
# TensorFlow names of operations that Keras names differently.
RENAMED = {f"reduce_{name}": name for name in ("mean", "sum", "max", "min")} | {
    "constant": "convert_to_tensor",
    "concat": "concatenate",
    "pow": "power",
}
SAME_NAME = (
    *("cast", "reshape", "expand_dims", "squeeze", "transpose", "stack", "one_hot", "argmax"),
    *("zeros", "ones", "zeros_like", "ones_like", "abs", "square", "sqrt", "exp", "maximum"),
    *("minimum", "matmul", "where", "equal", "shape", "range", "tile", "add", "subtract"),
    *("multiply", "divide", "round", "sign", "tanh", "sigmoid", "split", "repeat", "linspace"),
    "convert_to_tensor",
)
NN = ("relu", "softmax", "sigmoid", "gelu", "moments")
MATH = ("exp", "log", "square", "sqrt", "argmax", "abs")


class MissingStubName(UsageError, AttributeError):
    """Raised for a part of TensorFlow that the stub lacks; hasattr() treats it as missing."""


class TensorFlowStub(ModuleType):
    """A module of the stub, with dicts as submodules; missing names raise a one-line error."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        super().__init__(name)
        for key, value in names.items():
            inner = isinstance(value, dict)
            self.__dict__[key] = TensorFlowStub(f"{name}.{key}", value) if inner else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        where = self.__name__.replace("tensorflow", "tf", 1)
        raise MissingStubName(f"{where}.{name} is not available without TensorFlow; {REMEDY}")


def make() -> ModuleType:
    """Returns the stub of the module `tensorflow`."""
    keras = import_keras()

    def operations(known: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(keras.ops, name) for name in known if hasattr(keras.ops, name)}

    devices = {
        "list_physical_devices": lambda kind=None: [],
        "list_logical_devices": lambda kind=None: [],
        "run_functions_eagerly": lambda on: None,
    }
    keras.utils.experimental = SimpleNamespace(DatasetCreator=DatasetCreator)
    names: dict[str, Any] = {
        **{name: name for name in DTYPES},
        **operations(SAME_NAME),
        **{name: getattr(keras.ops, keras_name) for name, keras_name in RENAMED.items()},
        "__version__": VERSION,
        "__path__": [],
        "keras": keras,
        "newaxis": None,
        "function": _plain_function,
        "Tensor": keras.KerasTensor,
        "TensorSpec": IgnoredOption,
        "data": {
            "Dataset": TfDataset,
            "Options": TfDataOptions,
            "AUTOTUNE": -1,
            "experimental": {"AutoShardPolicy": IgnoredOption, "AUTOTUNE": -1},
        },
        "distribute": _merge(distribute_names(), IGNORED),
        "config": {
            **devices,
            "experimental": {**devices, "set_memory_growth": lambda device, on: None},
        },
        "random": {
            "set_seed": keras.utils.set_random_seed,
            "uniform": keras.random.uniform,
            "normal": keras.random.normal,
        },
        "nn": operations(NN),
        "math": operations(MATH),
        "image": {"resize": keras.ops.image.resize},
    }
    return TensorFlowStub("tensorflow", names)


def _plain_function(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replacement of tf.function; returns the function unchanged."""
    return function if function is not None else lambda f: f


class IgnoredOption:
    """Settings of strategies, which have no effect."""

    AUTO = RING = NCCL = OFF = FILE = DATA = HINT = None

    def __init__(self, *args: Any, **options: Any) -> None:
        return


IGNORED = {
    **dict.fromkeys(
        ("HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"), IgnoredOption
    ),
    "experimental": {
        **dict.fromkeys(("CommunicationOptions", "CommunicationImplementation"), IgnoredOption),
        "CollectiveCommunication": IgnoredOption,
        "partitioners": dict.fromkeys(
            ("MinSizePartitioner", "MaxSizePartitioner", "FixedShardsPartitioner"), IgnoredOption
        ),
    },
}


def _merge(names: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    inner = {k: _merge(names[k], v) if k in names else v for k, v in more.items()}
    return {**names, **inner}


class TfDataOptions:
    """Replacement of tf.data.Options, without effect."""

    def __init__(self) -> None:
        self.experimental_distribute = SimpleNamespace()
        self.experimental_optimization = SimpleNamespace()
        self.threading = SimpleNamespace()


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
        return TfDataset(lambda: _rows(arrays), len(tree.flatten(arrays)[0]))

    @staticmethod
    def from_generator(generator: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        return TfDataset(lambda: iter(generator()), UNKNOWN)

    @staticmethod
    def zip(*sets: Any) -> TfDataset:
        given = sets[0] if len(sets) == 1 and isinstance(sets[0], tuple | list) else sets
        count = min((s._count for s in given if s._count >= 0), default=UNKNOWN)
        return TfDataset(lambda: iter(zip(*given, strict=False)), count)

    def map(self, function: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        return TfDataset(lambda: (_call(function, item) for item in self), self._count)

    def filter(self, function: Callable[..., Any], **options: Any) -> TfDataset:
        return TfDataset(lambda: (item for item in self if _call(function, item)), UNKNOWN)

    def batch(self, size: int, drop_remainder: bool = False, **options: Any) -> TfDataset:
        from paceline.keras.fit_data import as_array

        tree = import_keras().tree

        def batched() -> Iterator[Any]:
            items = iter(self)
            while held := [tree.map_structure(as_array, i) for i in itertools.islice(items, size)]:
                if len(held) == size or not drop_remainder:
                    yield tree.map_structure(lambda *rows: np.stack(rows), *held)

        count = self._count
        if count >= 0:
            count = count // size if drop_remainder else -(-count // size)
        return TfDataset(batched, count)

    def unbatch(self) -> TfDataset:
        return TfDataset(lambda: (row for item in self for row in _rows(item)), UNKNOWN)

    def take(self, count: int) -> TfDataset:
        kept = count if self._count < 0 else min(count, self._count)
        return TfDataset(lambda: itertools.islice(self, count), kept)

    def skip(self, count: int) -> TfDataset:
        kept = self._count if self._count < 0 else max(0, self._count - count)
        return TfDataset(lambda: itertools.islice(self, count, None), kept)

    def shard(self, num_shards: int, index: int) -> TfDataset:
        check_shard(num_shards, index)
        kept = self._count if self._count < 0 else len(range(index, self._count, num_shards))
        return TfDataset(lambda: itertools.islice(self, index, None, num_shards), kept)

    def repeat(self, count: int | None = None) -> TfDataset:
        if count is None or count < 0:
            return TfDataset(lambda: (item for _ in itertools.count() for item in self), INFINITE)
        total = self._count * count if self._count >= 0 else self._count
        return TfDataset(lambda: (item for _ in range(count) for item in self), total)

    def shuffle(self, *args: Any, **options: Any) -> TfDataset:
        """Returns the dataset unchanged; Paceline reshuffles all samples every epoch."""
        return self

    cache = prefetch = with_options = shuffle

    def as_numpy_iterator(self) -> Iterator[Any]:
        return iter(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingStubName(
            f"tf.data.Dataset.{name} is not available without TensorFlow; {REMEDY}"
        )


def _rows(arrays: Any) -> Iterator[Any]:
    tree = import_keras().tree
    for row in range(len(tree.flatten(arrays)[0])):
        # Called immediately, within this iteration.
        yield tree.map_structure(lambda array: array[row], arrays)  # noqa: B023


def _call(function: Callable[..., Any], item: Any) -> Any:
    return function(*item) if isinstance(item, tuple) else function(item)

"""Stub of TensorFlow for Keras scripts, used if TensorFlow is not installed.

`tf.keras` is Keras 3 with the torch backend. In addition there are the parts of TensorFlow that
scripts around `model.fit` use: tf.data over arrays, tensor operations from Keras, seeds, and
`tf.distribute` (`paceline.keras.distribution`). Anything else raises a one-line error with its name
and the extra that provides it. Only `paceline launch` installs the stub.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.keras.distribution import (
    ClusterSpec,
    DatasetCreator,
    TensorFlowServer,
    check_shard,
    distribute_names,
    reject_checkpoint,
    reject_graph,
    reject_tape,
    reject_tpu,
)
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
    "clip_by_value": "clip",
}
SAME_NAME = (
    *("cast", "reshape", "expand_dims", "squeeze", "transpose", "stack", "one_hot", "argmax"),
    *("zeros", "ones", "zeros_like", "ones_like", "abs", "square", "sqrt", "exp", "maximum"),
    *("minimum", "matmul", "where", "equal", "shape", "range", "tile", "add", "subtract"),
    *("multiply", "divide", "round", "sign", "tanh", "sigmoid", "split", "repeat", "linspace"),
    "convert_to_tensor",
)
NN = ("relu", "softmax", "sigmoid", "gelu", "moments")
MATH = (
    *("exp", "log", "square", "sqrt", "argmax", "abs", "add", "subtract", "multiply", "divide"),
    *("maximum", "minimum", "equal"),
)
LOG_LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")}


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

    # The names of tf.keras include some that Keras 3 itself has dropped.
    tf_keras = importlib.import_module("keras._tf_keras.keras")
    tf_keras.utils.experimental = SimpleNamespace(DatasetCreator=DatasetCreator)
    devices = {
        **dict.fromkeys(("list_physical_devices", "list_logical_devices"), _list_devices),
        **dict.fromkeys(("set_visible_devices", "set_logical_device_configuration"), _ignore),
    }
    renamed = {name: getattr(keras.ops, keras_name) for name, keras_name in RENAMED.items()}
    names: dict[str, Any] = {
        **{name: name for name in DTYPES},
        **operations(SAME_NAME),
        **renamed,
        "__version__": VERSION,
        "__path__": [],
        "keras": tf_keras,
        **{name: getattr(tf_keras, name) for name in ("losses", "metrics", "optimizers")},
        "version": {"VERSION": VERSION},
        "newaxis": None,
        "function": _plain_function,
        "GradientTape": reject_tape,
        **dict.fromkeys(("Session", "placeholder"), reject_graph),
        "compat": {
            "v1": {
                **dict.fromkeys(("Session", "placeholder"), reject_graph),
                "logging": {**LOG_LEVELS, "set_verbosity": _ignore},
            }
        },
        "device": lambda name=None: contextlib.nullcontext(),
        "executing_eagerly": lambda: True,
        "get_logger": lambda: logging.getLogger("tensorflow"),
        "print": print,
        "test": dict.fromkeys(("is_gpu_available", "is_built_with_cuda"), _false),
        "Tensor": keras.KerasTensor,
        "TensorSpec": IgnoredOption,
        "data": {
            "Dataset": TfDataset,
            "Options": TfDataOptions,
            "AUTOTUNE": -1,
            "experimental": {
                "AutoShardPolicy": IgnoredOption,
                "AUTOTUNE": -1,
                "cardinality": lambda dataset: dataset.cardinality(),
            },
        },
        "distribute": _merge(distribute_names(), IGNORED),
        "config": {
            **devices,
            **dict.fromkeys(("run_functions_eagerly", "set_soft_device_placement"), _ignore),
            "LogicalDeviceConfiguration": IgnoredOption,
            "threading": dict.fromkeys(
                ("set_inter_op_parallelism_threads", "set_intra_op_parallelism_threads"), _ignore
            ),
            "experimental": {
                **devices,
                **dict.fromkeys(("set_memory_growth", "enable_op_determinism"), _ignore),
            },
        },
        "random": {
            "set_seed": keras.utils.set_random_seed,
            "uniform": keras.random.uniform,
            "normal": keras.random.normal,
        },
        "nn": operations(NN),
        "math": {**operations(MATH), **renamed},
        "image": {"resize": keras.ops.image.resize},
        "debugging": {"set_log_device_placement": _ignore},
        "autograph": {"set_verbosity": _ignore},
        "tpu": {"experimental": {"initialize_tpu_system": reject_tpu}},
        "train": {
            "ClusterSpec": ClusterSpec,
            "Server": TensorFlowServer,
            **dict.fromkeys(("Checkpoint", "CheckpointManager"), reject_checkpoint),
        },
    }
    return TensorFlowStub("tensorflow", names)


def _ignore(*args: Any, **options: Any) -> None:
    """Replacement of settings that have no effect here."""


def _list_devices(kind: str | None = None) -> list[Any]:
    """Returns the CPU: torch has the GPUs."""
    cpu = SimpleNamespace(name="/physical_device:CPU:0", device_type="CPU")
    return [cpu] if kind in (None, "CPU") else []


def _false(*args: Any, **options: Any) -> bool:
    return False


def _plain_function(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replacement of tf.function; returns the function unchanged."""
    return function if function is not None else lambda f: f


class IgnoredOption:
    """Settings of strategies, which have no effect."""

    AUTO = RING = NCCL = OFF = FILE = DATA = HINT = None

    def __init__(self, *args: Any, **options: Any) -> None:
        return


IGNORED = {
    "ReduceOp": SimpleNamespace(SUM="SUM", MEAN="MEAN"),
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


class Cardinality(int):
    """Number of elements of a dataset."""

    def numpy(self) -> int:
        return int(self)


class _DatasetType(type):
    def __getattr__(cls, name: str) -> Any:
        raise _missing_method(name)


class TfDataset(metaclass=_DatasetType):
    """Replacement of tf.data over arrays and generators, as a chain of iterators.

    `fit` reads one epoch into arrays, once. Paceline then assigns the samples, each exactly once
    per epoch, in its own order if the dataset is shuffled.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], count: int) -> None:
        self._make = make
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        """Yields tensors, as scripts expect when they evaluate by hand."""
        tree, convert = import_keras().tree, import_keras().ops.convert_to_tensor
        return (tree.map_structure(convert, item) for item in self._make())

    def __len__(self) -> int:
        if self._count < 0:
            raise TypeError("the length of the dataset is infinite or unknown")
        return self._count

    def cardinality(self) -> Cardinality:
        return Cardinality(self._count)

    @staticmethod
    def from_tensor_slices(tensors: Any) -> TfDataset:
        arrays = _arrays(tensors)
        return TfDataset(lambda: _rows(arrays), len(import_keras().tree.flatten(arrays)[0]))

    @staticmethod
    def from_generator(generator: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        return TfDataset(lambda: iter(generator()), UNKNOWN)

    @staticmethod
    def zip(*sets: Any) -> TfDataset:
        given = sets[0] if len(sets) == 1 and isinstance(sets[0], tuple | list) else sets
        count = min((s._count for s in given if s._count >= 0), default=UNKNOWN)
        return TfDataset(lambda: iter(zip(*(s._make() for s in given), strict=False)), count)

    def concatenate(self, other: TfDataset) -> TfDataset:
        counts = (self._count, other._count)
        return TfDataset(
            lambda: itertools.chain(self._make(), other._make()),
            sum(counts) if min(counts) >= 0 else min(counts),
        )

    def map(self, function: Callable[..., Any], *args: Any, **options: Any) -> TfDataset:
        return TfDataset(lambda: (_call(function, item) for item in self._make()), self._count)

    def filter(self, function: Callable[..., Any], **options: Any) -> TfDataset:
        return TfDataset(lambda: (item for item in self._make() if _call(function, item)), UNKNOWN)

    def batch(self, size: int, drop_remainder: bool = False, **options: Any) -> TfDataset:
        from paceline.keras.fit_data import as_array

        tree = import_keras().tree

        def batched() -> Iterator[Any]:
            items = self._make()
            while held := [tree.map_structure(as_array, i) for i in itertools.islice(items, size)]:
                if len(held) == size or not drop_remainder:
                    yield tree.map_structure(lambda *rows: np.stack(rows), *held)

        count = self._count
        if count >= 0:
            count = count // size if drop_remainder else -(-count // size)
        return TfDataset(batched, count)

    def unbatch(self) -> TfDataset:
        return TfDataset(lambda: (row for item in self._make() for row in _rows(item)), UNKNOWN)

    def apply(self, function: Callable[[TfDataset], TfDataset]) -> TfDataset:
        return function(self)

    def take(self, count: int) -> TfDataset:
        kept = count if self._count < 0 else min(count, self._count)
        return TfDataset(lambda: itertools.islice(self._make(), count), kept)

    def skip(self, count: int) -> TfDataset:
        kept = self._count if self._count < 0 else max(0, self._count - count)
        return TfDataset(lambda: itertools.islice(self._make(), count, None), kept)

    def shard(self, num_shards: int, index: int) -> TfDataset:
        check_shard(num_shards, index)
        kept = self._count if self._count < 0 else len(range(index, self._count, num_shards))
        return TfDataset(lambda: itertools.islice(self._make(), index, None, num_shards), kept)

    def repeat(self, count: int | None = None) -> TfDataset:
        if count is None or count < 0:
            return TfDataset(
                lambda: (item for _ in itertools.count() for item in self._make()), INFINITE
            )
        total = self._count * count if self._count >= 0 else self._count
        return TfDataset(lambda: (item for _ in range(count) for item in self._make()), total)

    def shuffle(self, *args: Any, **options: Any) -> TfDataset:
        """Returns the dataset unchanged; Paceline reshuffles all samples every epoch."""
        return self

    cache = prefetch = with_options = shuffle

    def as_numpy_iterator(self) -> Iterator[Any]:
        from paceline.keras.fit_data import as_array

        tree = import_keras().tree
        return (tree.map_structure(as_array, item) for item in self._make())

    def __getattr__(self, name: str) -> Any:
        raise _missing_method(name)


def _missing_method(name: str) -> AttributeError:
    if name.startswith("_"):
        return AttributeError(name)
    return MissingStubName(f"tf.data.Dataset.{name} is not available without TensorFlow; {REMEDY}")


def _arrays(tensors: Any) -> Any:
    """Converts lists to arrays, and keeps the structure of tuples and dicts."""
    if isinstance(tensors, tuple):
        return tuple(_arrays(part) for part in tensors)
    if isinstance(tensors, dict):
        return {name: _arrays(part) for name, part in tensors.items()}
    return np.asarray(tensors)


def _rows(arrays: Any) -> Iterator[Any]:
    tree = import_keras().tree
    for row in range(len(tree.flatten(arrays)[0])):
        # Called immediately, within this iteration.
        yield tree.map_structure(lambda array: array[row], arrays)  # noqa: B023


def _call(function: Callable[..., Any], item: Any) -> Any:
    return function(*item) if isinstance(item, tuple) else function(item)

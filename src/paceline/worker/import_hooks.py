"""Import hook for launched scripts: Keras trains through Paceline, and TensorFlow may be a stub.

When the script imports Keras, `fit` is replaced right after, before the script can use it, and so
is `tf.distribute` of TensorFlow. If TensorFlow is not installed, a stub takes its place. The
adapters are named by their import paths, as runners are: most scripts need none.
"""

import importlib
import importlib.abc
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PATCHES = {
    "keras": ("paceline.keras.fit_patch", "patch_fit"),
    "tensorflow": ("paceline.keras.tensorflow_patch", "patch_tensorflow"),
    "tensorflow_datasets": ("paceline.keras.tensorflow_patch", "patch_tensorflow_datasets"),
}
"""Adapter and its function, called with the module that was imported."""
STUB_ADAPTER = "paceline.keras.tensorflow_stub"
STUB = "tensorflow"


def install_import_hook() -> None:
    """Installs the hook; modules that are already imported are not affected."""
    sys.meta_path.insert(0, _ImportHook())


class _ImportHook(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{STUB}."):
            is_stub = isinstance(getattr(sys.modules.get(STUB), "__loader__", None), _StubLoader)
            return ModuleSpec(name, _StubLoader(), is_package=True) if is_stub else None
        if name not in PATCHES:
            return None
        # tf.keras must be Keras 3 on torch, even if the script selects another.
        os.environ.update(KERAS_BACKEND="torch", TF_USE_LEGACY_KERAS="0")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None and spec.loader is not None), None)
        if spec is not None:
            _patch_after_import(spec.loader, *PATCHES[name])
        if name == STUB and spec is None:
            return ModuleSpec(name, _StubLoader(), is_package=True)
        return spec


def _patch_after_import(loader: Any, adapter: str, function: str) -> None:
    run = loader.exec_module

    def run_and_patch(module: ModuleType) -> None:
        run(module)
        getattr(importlib.import_module(adapter), function)(module)

    loader.exec_module = run_and_patch


class _StubLoader(importlib.abc.Loader):
    """Creates the stub, or a submodule that is an attribute of it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package, *inner = spec.name.split(".")
        if not inner:
            return importlib.import_module(STUB_ADAPTER).make()  # type: ignore[no-any-return]
        found: Any = sys.modules[package]
        for part in inner:
            found = getattr(found, part)
        if not isinstance(found, ModuleType):
            raise ModuleNotFoundError(f"{spec.name} is not a module", name=spec.name)
        # A separate module, so that the original keeps its name and its spec.
        alias = ModuleType(spec.name)
        vars(alias).update(__getattr__=partial(getattr, found), __dir__=partial(dir, found))
        return alias

    def exec_module(self, module: ModuleType) -> None:
        return

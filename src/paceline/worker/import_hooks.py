"""Import hooks that replace the training calls of libraries in launched scripts.

When the script imports such a library, its adapter is called right after, before the script can
use it. The adapter is named by its import path, as runners are: most scripts need none.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ADAPTERS = {"keras": "paceline.keras.fit_patch:patch_fit"}
"""Called with the module when it has been imported."""
STAND_INS = {"tensorflow": "paceline.keras.tensorflow_stub:make"}
"""Called for a module of that name if the package is not installed."""
PREPARATIONS = {"keras": {"KERAS_BACKEND": "torch"}, "tensorflow": {"KERAS_BACKEND": "torch"}}
"""Environment that must be set before the import."""


def install_import_hook() -> None:
    """Installs the hooks; modules that are already imported are not affected."""
    sys.meta_path.insert(0, _ImportHook())


class _ImportHook(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if package not in PREPARATIONS or name in self._looking:
            return None
        if name != package and package in STAND_INS:
            return self._part_of_stand_in(name)
        if name != package:
            return None
        import os

        os.environ.update(PREPARATIONS[package])
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is None or spec.loader is None:
            return self._stand_in(name)
        if name in ADAPTERS:
            spec.loader = _PatchingLoader(spec.loader, ADAPTERS[name])
        return spec

    def _stand_in(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in STAND_INS:
            return None
        return importlib.machinery.ModuleSpec(name, _StubLoader(name), is_package=True)

    def _part_of_stand_in(self, name: str) -> importlib.machinery.ModuleSpec | None:
        package = name.split(".")[0]
        if not isinstance(getattr(sys.modules.get(package), "__loader__", None), _StubLoader):
            return None
        return importlib.machinery.ModuleSpec(name, _StubLoader(name), is_package=True)


class _PatchingLoader(importlib.abc.Loader):
    """Runs the package's own loader, then the adapter."""

    def __init__(self, loader: Any, adapter: str) -> None:
        self._loader = loader
        self._adapter = adapter

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _call(self._adapter, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _StubLoader(importlib.abc.Loader):
    """Creates a stub module, or a submodule that is an attribute of one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        package, *inner = self._name.split(".")
        if not inner:
            return _call(STAND_INS[package])  # type: ignore[no-any-return]
        found: Any = sys.modules[package]
        for part in inner:
            found = getattr(found, part)
        if not isinstance(found, ModuleType):
            raise ModuleNotFoundError(f"{self._name} is not a module", name=self._name)
        # A separate module, so that the original keeps its name and its spec.
        alias = _Alias(self._name)
        alias.__dict__["_target"] = found
        return alias

    def exec_module(self, module: ModuleType) -> None:
        return


class _Alias(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        return getattr(self.__dict__["_target"], name)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_target"])


def _call(reference: str, *args: Any) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)(*args)

"""User modules that every process of a run imports, because they register strategies or codecs."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A module that registers something, identified by its file or its installed name."""

    module: str
    file: Path | None = None
    """None if the module is installed in the environment."""
    hash: str | None = None

    def load(self) -> None:
        """Imports it. Raises UsageError if the file is missing, broken or has changed."""
        if self.file is None:
            importlib.import_module(self.module)
            return
        # In a copied project, the path is relative to the working directory of the process.
        file = self.file.absolute()
        if hash_file(file, "plugin") != self.hash:
            raise UsageError(f"{file} has changed since the run was started; start the run again")
        if "." not in self.module:
            load_module(file, self.module)
            return
        root = str(file.parents[self.module.count(".")])
        if root not in sys.path:
            sys.path.insert(0, root)
        importlib.import_module(self.module)


def plugin_for(module: str) -> Plugin:
    """Returns the plugin of a loaded module. Raises UsageError if others cannot import it."""
    if module in ("__main__", "__mp_main__"):
        raise UsageError(
            "a strategy or codec is defined in the script that was started, which workers cannot "
            "import; move it to a separate file"
        )
    path = getattr(sys.modules[module], "__file__", None)
    if path is None or "site-packages" in Path(path).parts:
        return Plugin(module=module)
    file = Path(path).resolve()
    return Plugin(module=module, file=file, hash=hash_file(file, "plugin"))


def load_plugin_file(path: Path) -> None:
    """Imports a file that registers something, under its own name. Raises UsageError."""
    if not path.is_file():
        raise UsageError(f"plugin {path} does not exist; use a Python file")
    file = path.resolve()
    loaded = sys.modules.get(file.stem)
    if loaded is None:
        load_module(file, file.stem)
    elif Path(getattr(loaded, "__file__", None) or "").resolve() != file:
        raise UsageError(f"plugin {path} has the name of another module; rename the file")


def hash_file(path: Path, what: str = "job file") -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None


def load_module(path: Path, name: str) -> Any:
    """Import a user's file under `name`; an error in it is reported with its file and line."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except PacelineError:
        raise
    except Exception as error:
        raise UsageError(locate_error(error, path)) from error
    return module


def locate_error(error: Exception, path: Path) -> str:
    """An error in a user's file as one line that names the file and the line."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [0, *(line for frame, line in frames if frame.f_code.co_filename == str(path))]
    line = getattr(error, "lineno", None) or lines[-1]
    return f"{path}:{line}: {type(error).__name__}: {error}".replace("\n", " ")

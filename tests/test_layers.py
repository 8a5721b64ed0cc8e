"""Import rules between layers, read from the source; torch is imported only where it is needed.

`LAYERS` is the rule: a layer may import itself and the layers named behind it, anywhere in its
files, inside functions and for type checking too. A layer is a folder, unless a pattern of
`FILE_PATTERNS` names it. `TORCH_FREE` layers never name torch, and importing any of their modules
does not import it.
"""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

FILE_PATTERNS = {
    "telemetry/event*.py": "telemetry.events",
    "cluster/remote/*.py": "cluster.remote",
    "codecs/__init__.py": "codecs.spec",
    "codecs/registry.py": "codecs.spec",
    "codecs/spec.py": "codecs.spec",
    "comm/flat_layout.py": "comm.flat_layout",
    "strategies/__init__.py": "strategies.registry",
    "strategies/registry.py": "strategies.registry",
    "strategies/*/__init__.py": "strategies.registry",
    "strategies/*/spec.py": "strategies.spec",
    "strategies/*/cost.py": "strategies.cost",
    "strategies/*/simulate.py": "strategies.simulate",
    "strategies/*_cost.py": "strategies.cost",
    "strategies/*_simulate.py": "strategies.simulate",
    "strategies/ps/simulated.py": "strategies.simulate",
    "strategies/allreduce/simulated_shares.py": "strategies.simulate",
    "strategies/allreduce/share_tree.py": "strategies.spec",
    "strategies/ps/sync.py": "strategies.spec",
    "strategies/pipeline/partition.py": "strategies.spec",
    "strategies/switch/*.py": "strategies.spec",
    "strategies/auto/*.py": "strategies.policy",
}
"""Layers that are not a whole folder; the first pattern that matches counts."""

LAYERS: dict[str, set[str]] = {
    # Ideas: no input, no output, no tensors.
    "errors": set(),
    "options": {"errors"},
    "plugins": {"errors"},
    "specs": {"errors"},
    "protocol": {"errors", "specs", "telemetry.events"},
    "telemetry.events": set(),
    # Materials: they know nothing of strategies, of workers or of how a run is started.
    "state": {"errors", "telemetry"},
    "models": {"errors"},
    "cluster.remote": set(),
    "cluster": {"errors"},
    "data": {"errors"},
    "codecs.spec": {"errors", "specs"},
    "comm.flat_layout": {"errors"},
    "codecs": {"errors", "codecs.spec", "comm.flat_layout"},
    "comm": {
        "errors",
        "specs",
        "protocol",
        "state",
        "codecs",
        "codecs.spec",
        "comm.flat_layout",
    },
    "telemetry": {"errors", "protocol", "telemetry.events"},
    "job": {"errors", "options", "plugins", "specs", "data", "models"},
    # Strategies, one folder each: what needs no torch comes first.
    "strategies.registry": {
        "errors",
        "plugins",
        "specs",
        "protocol",
    },
    "strategies.spec": {"errors", "specs", "protocol", "codecs.spec", "strategies.registry"},
    "strategies.cost": {
        "errors",
        "specs",
        "cluster",
        "codecs.spec",
        "plan",
        "strategies.registry",
        "strategies.spec",
    },
    "strategies.policy": {
        "errors",
        "specs",
        "protocol",
        "telemetry.events",
        "cluster",
        "plan",
        "strategies.registry",
        "strategies.spec",
    },
    "strategies.simulate": {
        "errors",
        "specs",
        "protocol",
        "codecs",
        "codecs.spec",
        "comm",
        "comm.flat_layout",
        "state",
        "plan",
        "strategies",
        "strategies.cost",
        "strategies.registry",
        "strategies.spec",
        "twin",
    },
    # What happens inside a worker.
    "strategies": {
        "errors",
        "specs",
        "protocol",
        "codecs",
        "codecs.spec",
        "comm",
        "comm.flat_layout",
        "state",
        "strategies.spec",
        "telemetry",
    },
    "worker": {
        "errors",
        "specs",
        "protocol",
        "comm",
        "state",
        "data",
        "models",
        "job",
        "plugins",
        "strategies",
        "strategies.registry",
        "telemetry",
        "telemetry.events",
    },
    "keras": {
        "errors",
        "specs",
        "protocol",
        "comm",
        "state",
        "job",
        "strategies",
        "telemetry",
        "worker",
    },
    # What people hold in their hands.
    "report": {"errors", "telemetry", "telemetry.events"},
    "dashboard": {"errors", "telemetry", "telemetry.events", "report"},
    "launch": {
        "options",
        "errors",
        "specs",
        "protocol",
        "comm",
        "job",
        "plugins",
        "report",
        "strategies.registry",
        "telemetry",
        "telemetry.events",
        "worker",
        "cluster",
        "cluster.remote",
    },
    "plan": {
        "errors",
        "specs",
        "cluster",
        "codecs.spec",
        "strategies.registry",
    },
    "twin": {
        "options",
        "errors",
        "specs",
        "protocol",
        "codecs",
        "codecs.spec",
        "comm",
        "comm.flat_layout",
        "state",
        "job",
        "strategies",
        "strategies.registry",
        "telemetry",
        "telemetry.events",
        "worker",
        "launch",
        "report",
        "cluster",
        "plan",
    },
    "spark": {
        "errors",
        "specs",
        "data",
        "models",
        "job",
        "keras",
        "launch",
        "plugins",
        "report",
        "strategies.registry",
        "worker",
    },
    "ray": {"errors", "data", "cluster", "cluster.remote", "launch", "worker"},
    "trained_model": {"errors", "job", "telemetry", "worker"},
    "cli": {
        "options",
        "cluster",
        "dashboard",
        "data",
        "errors",
        "job",
        "launch",
        "trained_model",
        "plan",
        "ray",
        "report",
        "spark",
        "specs",
        "strategies.registry",
        "twin",
    },
    "__main__": {"cli"},
    "__init__": {
        "codecs.spec",
        "strategies.registry",
        "strategies.spec",
        "job",
        "launch",
        "trained_model",
        "worker",
    },
}

TYPES_ONLY = {"strategies.registry": {"strategies"}}
"""What a layer may name for type checking alone: the registry returns facets, and imports them by
name."""

TORCH_FREE = (
    "errors",
    "options",
    "codecs.spec",
    "plugins",
    "specs",
    "protocol",
    "strategies.registry",
    "strategies.spec",
    "strategies.cost",
    "strategies.policy",
    "telemetry",
    "telemetry.events",
    "job",
    "report",
    "dashboard",
    "cluster",
    "cluster.remote",
    "plan",
    "launch",
    "ray",
    "cli",
)

TORCH_FREE_MODULES = {
    # Of layers with torch, what a process without it uses.
    "worker": {"__init__", "__main__", "main", "assignment", "outpost", "process_settings"},
    "comm": {"__init__", "wire", "control"},
    "data": {
        "__init__",
        "blocks",
        "array_cache",
        "catalog",
        "arrow_sources",
        "dataset",
        "tf_example",
        "cifar",
        "idx",
        "text",
        "image_folder",
        "pipeline",
        "stores",
        "tfrecord",
    },
    "models": {"__init__", "catalog"},
}
"""Modules of other layers that launch, job and the command line import before torch is needed."""

WORKER_FROM_LAUNCH = {"assignment", "faults", "fork_server", "main", "outpost"}
"""All that `launch` needs of a worker: what to tell it, how to start it, the marks it prints."""

PICKLE_ALLOWED = {"worker/assignment.py"}
"""Live jobs go to our own children there; nothing else is ever unpickled."""


def list_modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_module(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The full names of everything imported anywhere in a file, and whether for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in types_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports here are absolute"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((name, node in types_only) for name in names)


def imported_names(path: Path) -> Iterator[str]:
    return (name for name, _ in find_imports(path))


def layer_of(path: Path) -> str:
    inner = path.relative_to(SOURCE)
    for pattern, layer in FILE_PATTERNS.items():
        if fnmatch.fnmatchcase(inner.as_posix(), pattern):
            return layer
    return inner.with_suffix("").parts[0]


def layer_of_name(name: str) -> str:
    """The layer of a full name: `paceline.telemetry.events.Event` is in telemetry.events."""
    path = SOURCE
    for part in name.split(".")[1:]:
        if (path / part).is_dir():
            path = path / part
        else:
            path = path / f"{part}.py" if (path / f"{part}.py").is_file() else path
            break
    return layer_of(path / "__init__.py" if path.is_dir() else path)


def imports_of_ours(path: Path) -> Iterator[str]:
    return (name for name in imported_names(path) if name.split(".")[0] == "paceline")


def test_every_module_has_a_layer() -> None:
    for path in list_modules():
        assert layer_of(path) in LAYERS, f"{path}: give it a place in the table above"


def test_every_pattern_names_files_of_a_known_layer() -> None:
    files = [path.relative_to(SOURCE).as_posix() for path in list_modules()]
    for pattern, layer in FILE_PATTERNS.items():
        assert layer in LAYERS
        if layer in ("strategies.cost", "strategies.simulate"):
            continue  # Optional facets.
        assert fnmatch.filter(files, pattern), pattern


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_only_downwards(layer: str) -> None:
    odd = []
    for path in list_modules():
        if layer_of(path) != layer:
            continue
        for name, types_only in find_imports(path):
            if name.split(".")[0] != "paceline":
                continue
            allowed = {layer, *LAYERS[layer], *(TYPES_ONLY.get(layer, ()) if types_only else ())}
            if layer_of_name(name) not in allowed:
                odd.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert odd == []


def test_table_has_no_cycles() -> None:
    """So that every layer can be read, and tested, with those below it alone."""
    below: set[str] = set()
    left = dict(LAYERS)
    while left:
        ready = [layer for layer, needs in left.items() if needs <= below]
        assert ready, f"a cycle among {sorted(left)}"
        for layer in ready:
            below.add(layer)
            del left[layer]


def test_modules_have_no_cycles_at_import() -> None:
    """Within layers too, for imports at the top of a file."""
    names = {name_module(path): path for path in list_modules()}
    needs: dict[str, set[str]] = {}
    for name, path in names.items():
        needs[name] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names}
                needs[name] |= {f if f in names else node.module for f in found} & set(names)
    done: set[str] = set()
    while left := {name: wants for name, wants in needs.items() if name not in done}:
        ready = {name for name, wants in left.items() if wants <= done | {name}}
        assert ready, f"a cycle among {sorted(left)}"
        done |= ready


def test_launch_uses_only_the_light_part_of_workers() -> None:
    for path in list_modules():
        if layer_of(path) != "launch":
            continue
        for name in imports_of_ours(path):
            parts = name.split(".")
            if parts[1] == "worker":
                assert parts[2] in WORKER_FROM_LAUNCH, f"{path.name} imports {name}"


def test_programs_for_other_machines_need_nothing_there() -> None:
    """They are sent as text to machines where only Python is sure to be."""
    for path in (SOURCE / "cluster" / "remote").glob("*.py"):
        for name in imported_names(path):
            assert name.split(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
        # An old Python over there is to be told, not to be failed on.
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 7))


def test_pickle_stays_in_one_place() -> None:
    modules = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
    found = {
        str(path.relative_to(SOURCE))
        for path in list_modules()
        for name in imported_names(path)
        if name.split(".")[0] in modules or name.startswith("multiprocessing.reduction")
    }
    assert found == PICKLE_ALLOWED
    for path in list_modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save", "eval", "exec")


def is_torch_free(path: Path) -> bool:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    light = len(parts) == 2 and parts[1] in TORCH_FREE_MODULES.get(parts[0], set())
    return layer_of(path) in TORCH_FREE or light


def test_torch_is_not_named_where_it_is_not_needed() -> None:
    """`worker.main` starts servers, and so imports torch inside a function."""
    for path in list_modules():
        if layer_of(path) in TORCH_FREE:
            named = {name for name in imported_names(path) if name.split(".")[0] == "torch"}
            assert named == set(), path


def test_torch_stays_out_of_the_process() -> None:
    """Also what these modules import in turn, read in a process of its own one after another."""
    names = [name_module(path) for path in list_modules() if is_torch_free(path)]
    names = [name for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {['paceline', *names]!r}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'sklearn', 'safetensors'):\n"
        "        if heavy in sys.modules:\n"
        "            sys.exit(f'{name} brings {heavy} in')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_public_names_exist() -> None:
    import paceline

    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Dance'"):
        _ = paceline.Dance

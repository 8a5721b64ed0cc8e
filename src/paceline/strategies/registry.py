"""Registry of strategies: one record with the spec and the facets of each strategy.

A facet is named as `module:attribute` and imported on first use, so that nothing here needs torch.
A strategy without an optional facet can still train; requests for the facet raise a UsageError that
names it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import SpecError, UsageError
from paceline.plugins import Plugin, load_plugin_file, plugin_for
from paceline.protocol.pace import Pace, PaceContext
from paceline.protocol.switch_policy import RunHorizon, SwitchPolicy
from paceline.specs.base import Spec, parse_spec, spec_from_call
from paceline.specs.expression import Value
from paceline.specs.strategy import Strategy

if TYPE_CHECKING:
    from paceline.strategies.runner import PhaseContext, Runner, WorkerContext

BASELINE = "single"
"""The strategy that others are compared with: one worker, no communication."""


@dataclass(frozen=True, kw_only=True)
class StrategyRecord:
    """Properties of a strategy without importing torch; facets are `module:attribute`."""

    spec: type[Strategy]
    pace: str | None = None
    """`make_pace(spec, context: PaceContext) -> Pace`; required of a strategy that is ever active,
    which all but a switch are."""
    worker: str | Mapping[str, str] | None = None
    """A `Runner` class, or one per `Strategy.worker_variant`; required like `pace`."""
    simulate: str | None = None
    """A `twin.simulator.StrategySimulation` class."""
    cost: str | None = None
    """A `plan.facet.CostFacet` class."""
    policy: str | None = None
    """`make_policy(spec, horizon: RunHorizon) -> SwitchPolicy` of a strategy with phases."""
    examples: tuple[str, ...] = ()
    """Texts that the contract tests and the fault schedules run."""
    candidates: tuple[str, ...] = ()
    """Texts that the planner tries."""
    memory_saving: tuple[str, ...] = ()
    """Texts to suggest when a model does not fit into memory; `{workers}` is replaced."""

    @property
    def name(self) -> str:
        return self.spec.name


_DATA_PARALLEL = ("single", "allreduce", "ps", "grouped", "local_sgd", "diloco")
_BUILT_IN = (*_DATA_PARALLEL, "pipeline", "tensor", "switch", "auto")
_registered: dict[str, StrategyRecord] = {}


@cache
def _built_in_records() -> dict[str, StrategyRecord]:
    return {name: _load(f"paceline.strategies.{name}.spec:RECORD") for name in _BUILT_IN}


def records() -> Mapping[str, StrategyRecord]:
    """All strategies by name, in the order of the documentation."""
    return {**_built_in_records(), **_registered}


def _spec_types() -> dict[str, type[Strategy]]:
    return {name: record.spec for name, record in records().items()}


def register_strategy(record: StrategyRecord) -> None:
    """Registers a strategy. Raises SpecError if the name is taken.

    Call it in the module that defines the spec: the processes of a run import that module. The
    same module may register its strategy again, as it does when it is imported twice.
    """
    name = record.name
    taken = _registered.get(name)
    if name in _BUILT_IN or (taken is not None and taken.spec.__module__ != record.spec.__module__):
        raise SpecError(f"a strategy named {name!r} already exists; choose another name")
    if record.pace is None or record.worker is None:
        missing = "pace" if record.pace is None else "worker"
        raise SpecError(f"strategy {name!r} has no {missing} facet; pace and worker are required")
    _registered[name] = record


_FILE_PREFIX = re.compile(r"\s*(.+?\.py):(.*)", re.DOTALL)


def parse_strategy(text: str | Strategy) -> Strategy:
    """Parses a strategy; a `Strategy` is returned unchanged.

    `gossip.py:gossip(h=4)` first imports the file, which registers what the rest names.
    """
    if isinstance(text, Strategy):
        return text
    found = _FILE_PREFIX.fullmatch(text)
    if found is not None:
        load_plugin_file(Path(found[1]))
        text = found[2]
    return parse_spec(text, _spec_types(), "strategy")


def strategy_from_value(value: Value) -> Strategy:
    """Returns the strategy of a parsed name or call, as inside `switch(...)`."""
    return spec_from_call(value, _spec_types(), "strategy")


def parse_strategies(text: str) -> list[Strategy]:
    """Parses `S; S; ...`, the format of `--strategies`."""
    parts = [part for part in text.split(";") if part.strip()]
    if not parts:
        raise SpecError('--strategies is empty; use for example "single; allreduce; ps"')
    return [parse_strategy(part) for part in parts]


def make_pace(spec: Strategy, context: PaceContext) -> Pace:
    """Creates the pace of `spec`, which distributes work while it is active."""
    path = _record_of(spec).pace
    assert path is not None, f"{spec.name} is never active itself"
    make: Callable[[Strategy, PaceContext], Pace] = _load(path)
    return make(spec, context)


def make_runner(spec: Strategy, context: WorkerContext, phase: PhaseContext) -> Runner:
    """Creates the worker side of `spec` for one phase of the run; imports torch."""
    worker = _record_of(spec).worker
    assert worker is not None, f"{spec.name} is never active itself"
    path = worker if isinstance(worker, str) else worker[spec.worker_variant(context.size)]
    runner: Callable[[Strategy, WorkerContext], Runner] = _load(path)
    return runner(spec, dataclasses.replace(context, phase=phase))


def make_switch_policy(spec: Strategy, horizon: RunHorizon) -> SwitchPolicy:
    """Creates the switch policy of `spec`. Raises SpecError for unsupported rules."""
    path = _record_of(spec).policy
    if path is None:
        return SwitchPolicy()
    make: Callable[[Strategy, RunHorizon], SwitchPolicy] = _load(path)
    return make(spec, horizon)


def simulation(spec: Strategy) -> Any:
    """Returns the `StrategySimulation` class of `spec`. Raises UsageError if there is none."""
    return _load(_required(_record_of(spec), "simulate", "simulated"))


def cost(spec: Strategy) -> Any:
    """Returns the `CostFacet` of `spec`. Raises UsageError if there is none."""
    return cost_facet(_record_of(spec))


def cost_facet(record: StrategyRecord) -> Any:
    return _load(_required(record, "cost", "planned"))()


def plugins_of(spec: Strategy) -> tuple[Plugin, ...]:
    """Returns the plugins that another process needs for `spec`, its phases and codecs."""
    modules = {type(part).__module__ for part in _parts_of(spec)}
    foreign = sorted(m for m in modules if m.partition(".")[0] != "paceline")
    return tuple(plugin_for(module) for module in foreign)


def _parts_of(spec: Spec) -> Iterator[Spec]:
    """Yields a spec and all specs in its fields."""
    yield spec
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Spec):
                yield from _parts_of(inner)


def _record_of(spec: Strategy) -> StrategyRecord:
    record = _built_in_records().get(spec.name) or _registered.get(spec.name)
    if record is None:
        raise UsageError(f"strategy {spec.name!r} is not registered; call register_strategy first")
    return record


def _required(record: StrategyRecord, facet: str, verb: str) -> str:
    path: str | None = getattr(record, facet)
    if path is None:
        raise UsageError(f"{record.name} cannot be {verb}: it has no {facet} facet")
    return path


@cache
def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)

"""Strategies as data: what each is called, which roles it needs, how work is handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SpecError
from paceline.specs.base import (
    Spec,
    bool_field,
    choice_field,
    float_field,
    int_field,
    parse_spec,
    spec_field,
    spec_from_call,
)
from paceline.specs.codec import Codec, read_codec
from paceline.specs.expression import Call, Value, parse_expression
from paceline.specs.point import RunPoint, read_point, read_points
from paceline.specs.sync import SYNCS, Asp, Bsp, Gba, SyncMode, read_sync
from paceline.specs.when import WHENS, OnLrDrop, SwitchTrigger, trigger_from_value


@dataclass(frozen=True)
class StateFraction:
    """The share of a model's weights, gradients and optimizer slots that a worker has."""

    weights: float = 1.0
    gradients: float = 1.0
    slots: float = 1.0

    def floats_per_weight(self, slots: int) -> float:
        """Numbers kept for each weight of the model, with so many slots a weight."""
        return self.weights + self.gradients + slots * self.slots


class Strategy(Spec):
    """What every strategy says of itself; the runner behind it lives in `paceline.strategies`."""

    @property
    def exact(self) -> bool:
        """Equal to one process on the global batch, to rounding."""
        return True

    def worker_variant(self, workers: int) -> str:
        """The key of the runner behind it."""
        return self.name

    @property
    def phases(self) -> tuple[Strategy, ...]:
        """The strategies in force one after another; only a switch has more than one."""
        return (self,)

    def servers_for(self, workers: int) -> int:
        """Server processes needed beside the workers."""
        return 0

    def expected_staleness(self, workers: int) -> float:
        """Updates of others between a pull and its push, on equal machines."""
        return 0.0

    def state_fraction(self, workers: int) -> StateFraction:
        """What one worker has in memory, the fullest of them."""
        return StateFraction()

    def check_workers(self, workers: int) -> None:
        """Raise SpecError when this many workers cannot follow the strategy."""

    def check_batch(self, batch: int, workers: int) -> None:
        """Raise SpecError when a global batch cannot be shared out among so many workers."""
        if batch < workers:
            raise SpecError(
                f"--batch {batch} is smaller than --workers {workers}: "
                "the global batch must give every worker a sample"
            )

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        """How a batch is shared out, in proportion; None is evenly."""
        return None

    def lr_description(self, workers: int) -> str:
        """The learning rate in force, in words, for the start of a run and for a switch."""
        return "learning rate x1 an update of the global batch"


@dataclass(frozen=True)
class Single(Strategy):
    """One worker, no exchange; the reference that the exact strategies are equal to."""

    name: ClassVar[str] = "single"

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        return (1,) + (0,) * (workers - 1)

    def check_workers(self, workers: int) -> None:
        if workers != 1:
            raise SpecError(
                f"single trains on one worker, not {workers}: "
                "use --workers 1, or a strategy such as allreduce"
            )


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous: gradients averaged over all workers by collectives at every step."""

    name: ClassVar[str] = "allreduce"
    bucket_mb: float = spec_field(float_field(0.0, above=True), 25.0)
    balance: str = spec_field(choice_field("even", "auto"), "even")
    codec: Codec | None = spec_field(read_codec, None)
    via: str = spec_field(choice_field("auto", "shared", "network"), "auto")
    shard: str = spec_field(choice_field("none", "optimizer", "full"), "none")

    def worker_variant(self, workers: int) -> str:
        whole = self.shard == "none" or workers == 1
        return self.name if whole else f"{self.name}/{self.shard}"

    def state_fraction(self, workers: int) -> StateFraction:
        part = 1 / workers
        return {
            "none": StateFraction(),
            "optimizer": StateFraction(slots=part),
            "full": StateFraction(part, part, part),
        }[self.shard]

    def __post_init__(self) -> None:
        if self.shard == "full" and (self.codec is not None or self.via != "auto"):
            raise SpecError(
                "allreduce(shard=full) exchanges by torch's collectives: leave codec and via out"
            )
        if self.via == "shared" and self.codec is not None:
            raise SpecError(
                "allreduce(via=shared) sends nothing that a codec could make smaller: leave one out"
            )

    @property
    def exact(self) -> bool:
        return self.codec is None


def _read_lr_scale(value: Value, where: str) -> float | None:
    if value == Call("auto"):
        return None
    scale: float = float_field(0.0, above=True)(value, where)
    return scale


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Weights and optimizer on servers; workers pull, compute and push."""

    name: ClassVar[str] = "ps"
    sync: SyncMode = spec_field(read_sync, Asp())
    servers: int = spec_field(int_field(1, 1024), 1)
    lr_scale: float | None = spec_field(_read_lr_scale, None)
    damp: str = spec_field(choice_field("none", "inverse"), "none")
    overlap: bool = spec_field(bool_field, False)
    codec: Codec | None = spec_field(read_codec, None)
    via: str = spec_field(choice_field("auto", "shared", "network"), "auto")

    def __post_init__(self) -> None:
        if self.via == "shared" and self.codec is not None:
            raise SpecError(
                "ps(via=shared) sends nothing that a codec could make smaller: leave one out"
            )
        if isinstance(self.sync, str):
            object.__setattr__(self, "sync", parse_spec(self.sync, SYNCS, "sync mode"))
        if not isinstance(self.sync, SyncMode):
            raise SpecError(f"ps(sync=...) is {self.sync!r}: known: {', '.join(sorted(SYNCS))}")
        if self.overlap and self.sync.blocks_workers:
            raise SpecError(
                f"ps(overlap=true) computes ahead, but {self.sync} makes workers wait: "
                "use sync=asp or sync=gba"
            )

    @property
    def exact(self) -> bool:
        plain = self.codec is None and self.damp == "none"
        return isinstance(self.sync, Bsp) and self.lr_scale in (None, 1.0) and plain

    def servers_for(self, workers: int) -> int:
        return self.servers

    def state_fraction(self, workers: int) -> StateFraction:
        return StateFraction(slots=0.0)

    def expected_staleness(self, workers: int) -> float:
        own = 1.0 if self.overlap else 0.0
        return self.sync.expected_staleness(workers) + own

    def check_workers(self, workers: int) -> None:
        self.sync.check_workers(workers)

    def lr_scale_for(self, share: float, staleness: int) -> float:
        """The factor on the learning rate of an update worth this share of a global batch."""
        scale = share if self.lr_scale is None else self.lr_scale
        return scale / (1 + staleness) if self.damp == "inverse" else scale

    def lr_description(self, workers: int) -> str:
        if self.lr_scale is not None:
            return f"learning rate x{self.lr_scale:g} an update, as told"
        if isinstance(self.sync, Bsp | Gba):
            return "learning rate x1 an update of the global batch"
        return (
            f"learning rate x(samples of the update / global batch), "
            f"about x{1 / workers:.4g} with {workers} workers"
        )


@dataclass(frozen=True)
class Grouped(Strategy):
    """Groups of workers: synchronous inside a group, asynchronous between groups."""

    name: ClassVar[str] = "grouped"
    size: int = spec_field(int_field(1), 2)
    by: str = spec_field(choice_field("rank", "speed"), "rank")
    servers: int = spec_field(int_field(1, 1024), 1)
    lr_scale: float | None = spec_field(_read_lr_scale, None)

    @property
    def exact(self) -> bool:
        return False

    def servers_for(self, workers: int) -> int:
        return self.servers

    def expected_staleness(self, workers: int) -> float:
        return -(-workers // self.size) - 1.0

    def check_workers(self, workers: int) -> None:
        if self.size > workers:
            raise SpecError(
                f"grouped(size={self.size}) with {workers} workers: "
                "a group cannot be larger than all of them"
            )

    def worker_groups(
        self, workers: int, speeds: tuple[float, ...] | None
    ) -> tuple[tuple[int, ...], ...]:
        """The groups, by rank or with workers of like speed together; the last may be smaller."""
        ranks = list(range(workers))
        if self.by == "speed" and speeds is not None:
            ranks.sort(key=lambda w: (-speeds[w], w))
        return tuple(tuple(sorted(ranks[i : i + self.size])) for i in range(0, workers, self.size))

    def lr_description(self, workers: int) -> str:
        share = min(1.0, self.size / workers)
        return f"learning rate x(samples of the group / global batch), about x{share:.4g}"


@dataclass(frozen=True)
class LocalSgd(Strategy):
    """Local steps; weights averaged every `h` of them, or when replicas drift too far apart."""

    name: ClassVar[str] = "local_sgd"
    h: int | None = spec_field(int_field(1), None)
    drift: float | None = spec_field(float_field(0.0, above=True), None)

    def __post_init__(self) -> None:
        if self.h is not None and self.drift is not None:
            raise SpecError("local_sgd takes h=... or drift=..., not both")
        if self.h is not None and self.h < 1:
            raise SpecError(f"local_sgd(h={self.h}): at least one step lies between two averages")

    @property
    def exact(self) -> bool:
        return False

    @property
    def steps(self) -> int:
        return self.h if self.h is not None else 8

    def lr_description(self, workers: int) -> str:
        return "learning rate x1 on every worker's own share of the batch"


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Many local steps of the job's optimizer; an outer Nesterov step on what they moved."""

    name: ClassVar[str] = "diloco"
    h: int = spec_field(int_field(1), 50)
    outer_lr: float = spec_field(float_field(0.0, above=True), 0.7)
    outer_momentum: float = spec_field(float_field(0.0, 1.0), 0.9)

    @property
    def exact(self) -> bool:
        return False

    def lr_description(self, workers: int) -> str:
        return f"learning rate x1 inside, {self.outer_lr:g} outside every {self.h} steps"


def _read_cut(value: Value, where: str) -> str | tuple[str, ...]:
    """`even`, `auto`, or names of layers."""
    parts = value if isinstance(value, tuple) else (value,)
    names = []
    for part in parts:
        if not isinstance(part, Call) or part.args or part.named:
            raise SpecError(f"{where} is {part}: write even, auto, or names of layers")
        names.append(part.name)
    return names[0] if names in (["even"], ["auto"]) else tuple(names)


class ModelParallel(Strategy):
    """The model in parts, each on a worker of its own; all of them work on the same rows."""

    @property
    def model_parts(self) -> int:
        """Workers that hold one model together."""
        raise NotImplementedError

    @property
    def loss_part(self) -> int:
        """The part that has a replica's rows in the ledger: it computes the loss."""
        return 0

    def state_fraction(self, workers: int) -> StateFraction:
        """As far as layers can be shared out evenly."""
        part = 1 / self.model_parts
        return StateFraction(part, part, part)

    def batch_weights(self, workers: int) -> tuple[int, ...] | None:
        return tuple(int(w % self.model_parts == self.loss_part) for w in range(workers))

    def check_batch(self, batch: int, workers: int) -> None:
        replicas = workers // self.model_parts
        if batch < replicas:
            raise SpecError(
                f"--batch {batch} is smaller than the {replicas} replicas of the model: "
                "the global batch must give each a sample"
            )

    def check_workers(self, workers: int) -> None:
        if workers % self.model_parts:
            raise SpecError(
                f"{self} with {workers} workers: "
                f"use {self.model_parts} workers, or a multiple of it for replicas"
            )


@dataclass(frozen=True)
class PipelineParallel(ModelParallel):
    """The model in stages, each on a worker of its own; micro-batches pass through them."""

    name: ClassVar[str] = "pipeline"
    stages: int = spec_field(int_field(1, 1024), 2)
    micro: int = spec_field(int_field(1, 65536), 4)
    schedule: str = spec_field(choice_field("1f1b", "gpipe"), "1f1b")
    cut: str | tuple[str, ...] = spec_field(_read_cut, "even")
    recompute: bool = spec_field(bool_field, False)
    """Keep no activations: backward computes them again."""

    def __post_init__(self) -> None:
        if self.cuts and len(self.cuts) != self.stages - 1:
            raise SpecError(
                f"pipeline(stages={self.stages}) needs {self.stages - 1} cuts, "
                f"{len(self.cuts)} given"
            )

    @property
    def cuts(self) -> tuple[str, ...]:
        return () if isinstance(self.cut, str) else self.cut

    @property
    def model_parts(self) -> int:
        return self.stages

    @property
    def loss_part(self) -> int:
        return self.stages - 1

    def check_batch(self, batch: int, workers: int) -> None:
        count = workers // self.stages * self.micro
        if batch % count:
            raise SpecError(
                f"--batch {batch} does not divide into {count} micro-batches "
                f"({workers // self.stages} x {self.micro}): use a multiple of {count}"
            )


@dataclass(frozen=True)
class TensorParallel(ModelParallel):
    """Layers in slices: each worker has some of a layer's outputs, and all get all of them."""

    name: ClassVar[str] = "tensor"
    size: int = spec_field(int_field(1, 1024), 2)

    @property
    def model_parts(self) -> int:
        return self.size


@dataclass(frozen=True)
class Switch(Strategy):
    """Several strategies one after another, in one run, at stated points."""

    name: ClassVar[str] = "switch"
    parts: tuple[Strategy, ...] = ()
    at: tuple[RunPoint, ...] = ()
    when: SwitchTrigger | None = None

    def __init__(self, *parts: Strategy | str, at: object = None, when: object = None) -> None:
        strategies = tuple(parse_strategy(p) if isinstance(p, str) else p for p in parts)
        object.__setattr__(self, "parts", strategies)
        if at is not None and when is not None:
            raise SpecError("switch takes at=... or when=..., not both")
        if at is None and when is None:
            raise SpecError("switch: when? add at=50%, at=epoch(10) or when=auto")
        object.__setattr__(self, "at", read_points(at) if at is not None else ())
        rule = trigger_from_value(parse_expression(when)) if isinstance(when, str) else when
        object.__setattr__(self, "when", rule)
        self._check()

    def _check(self) -> None:
        if len(self.parts) < 2:
            raise SpecError(f"switch has {len(self.parts)} strategies: at least two are needed")
        for part in self.parts:
            if isinstance(part, Switch):
                raise SpecError("switch inside switch: name the strategies one after another")
        if self.when is not None:
            if not isinstance(self.when, SwitchTrigger):
                raise SpecError(f"switch(when={self.when!r}): known: {', '.join(sorted(WHENS))}")
            if len(self.parts) != 2 and not isinstance(self.when, OnLrDrop):
                raise SpecError(
                    f"when={self.when} decides between two strategies, {len(self.parts)} given"
                )
        elif len(self.at) != len(self.parts) - 1:
            raise SpecError(
                f"switch between {len(self.parts)} strategies needs {len(self.parts) - 1} "
                f"point(s), {len(self.at)} given: write at=50%, or at=(25%, 75%) for three"
            )

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    @property
    def phases(self) -> tuple[Strategy, ...]:
        return self.parts

    def servers_for(self, workers: int) -> int:
        return max(part.servers_for(workers) for part in self.parts)

    def state_fraction(self, workers: int) -> StateFraction:
        return max(
            (part.state_fraction(workers) for part in self.parts),
            key=lambda held: held.floats_per_weight(2),
        )

    def check_workers(self, workers: int) -> None:
        """A phase of `single` is fine here: one worker computes, the others idle."""
        for part in self.parts:
            if not isinstance(part, Single):
                part.check_workers(workers)

    def check_batch(self, batch: int, workers: int) -> None:
        for part in self.parts:
            part.check_batch(batch, workers)

    def to_call(self) -> Call:
        points = tuple(p.to_value() for p in self.at)
        at: Value = points[0] if len(points) == 1 else points
        rule = ("when", self.when.to_call()) if self.when is not None else ("at", at)
        return Call("switch", tuple(p.to_call() for p in self.parts), (rule,), bare=False)

    @classmethod
    def from_call(cls, call: Call) -> Switch:
        named = dict(call.named)
        at, when = named.pop("at", None), named.pop("when", None)
        for name in named:
            raise SpecError(f"switch has no option {name!r}: it takes strategies, at and when")
        parts = tuple(spec_from_call(a, STRATEGIES, "strategy") for a in call.args)
        points = None
        if at is not None:
            points = tuple(read_point(p) for p in (at if isinstance(at, tuple) else (at,)))
        return cls(*parts, at=points, when=trigger_from_value(when) if when is not None else None)


STRATEGIES: Mapping[str, type[Strategy]] = {
    c.name: c
    for c in (
        Single,
        AllReduce,
        ParameterServer,
        Grouped,
        LocalSgd,
        DiLoCo,
        PipelineParallel,
        TensorParallel,
        Switch,
    )
}


def parse_strategy(text: str | Strategy) -> Strategy:
    """The strategy that a text names; a strategy is passed through."""
    if isinstance(text, Strategy):
        return text
    return parse_spec(text, STRATEGIES, "strategy")


def parse_strategies(text: str) -> list[Strategy]:
    """Read `S; S; ...` as `--strategies` takes it."""
    parts = [part for part in text.split(";") if part.strip()]
    if not parts:
        raise SpecError('--strategies is empty: write "single; allreduce; ps"')
    return [parse_strategy(part) for part in parts]

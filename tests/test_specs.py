"""The texts of strategies, optimizers, schedules and conditions: read, written, and refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.specs.base import Spec
from paceline.specs.expression import Call, Percent, format_expression, parse_expression
from paceline.specs.optimizer import OPTIMIZERS, parse_optimizer
from paceline.specs.point import RunPoint, read_point
from paceline.specs.schedule import (
    SCHEDULES,
    Constant,
    Cosine,
    Milestones,
    Schedule,
    parse_schedule,
)
from paceline.specs.stop_condition import METRICS, StopCondition, parse_stop_condition
from paceline.specs.strategy import Strategy
from paceline.strategies.allreduce.spec import AllReduce
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.sync import SYNC_MODES, Asp, Bsp
from paceline.strategies.registry import parse_strategies, parse_strategy, records
from paceline.strategies.single.spec import Single
from paceline.strategies.switch.spec import Switch

# ---- all that can be written -----------------------------------------------------------------

share = st.floats(0, 1)
positive = st.floats(0, 1e12, exclude_min=True)
decay = st.floats(0, 1e12)
marks = st.floats(0, 1e6) | st.floats(0, 100).map(Percent)

OPTIMIZER_FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "sgd": {
        "momentum": share,
        "weight_decay": decay,
        "nesterov": st.booleans(),
        "dampening": share,
    },
    "adam": {"betas": st.tuples(share, share), "eps": positive, "weight_decay": decay},
    "adamw": {"betas": st.tuples(share, share), "eps": positive, "weight_decay": decay},
    "adagrad": {"lr_decay": decay, "weight_decay": decay, "eps": positive},
    "adadelta": {"rho": share, "eps": positive, "weight_decay": decay},
    "rmsprop": {"alpha": share, "eps": positive, "momentum": share, "weight_decay": decay},
}
_keras = {"weight_decay": decay, "clipnorm": decay, "clipvalue": decay}
_betas = {"beta_1": share, "beta_2": share}
OPTIMIZER_FIELDS |= {
    "keras_sgd": {**_keras, "momentum": share, "nesterov": st.booleans()},
    "keras_adam": {**_keras, **_betas, "epsilon": positive, "amsgrad": st.booleans()},
    "keras_adamw": {**_keras, **_betas, "epsilon": positive, "amsgrad": st.booleans()},
    "keras_adamax": {**_keras, **_betas, "epsilon": positive},
    "keras_nadam": {**_keras, **_betas, "epsilon": positive},
    "keras_rmsprop": {**_keras, "rho": share, "momentum": share, "centered": st.booleans()},
    "keras_adagrad": {**_keras, "initial_accumulator_value": decay, "epsilon": positive},
    "keras_adadelta": {**_keras, "rho": share, "epsilon": positive},
    "keras_lion": {**_keras, **_betas},
}
SCHEDULE_FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "constant": {"warmup": marks},
    "cosine": {"warmup": marks, "floor": share},
    "milestones": {
        "marks": st.lists(marks, min_size=1, max_size=4).map(tuple),
        "drop": st.floats(0, 1, exclude_min=True),
        "warmup": marks,
    },
}


def some_of(known: Any, fields: dict[str, dict[str, st.SearchStrategy[Any]]]) -> Any:
    """A spec of any word, any of its fields given."""

    def build(word: str) -> st.SearchStrategy[Spec]:
        given_fields = dict(fields[word])
        required = {"marks": given_fields.pop("marks")} if "marks" in given_fields else {}
        kwargs = st.fixed_dictionaries(required, optional=given_fields)
        return kwargs.map(lambda values: known[word](**values))

    return st.sampled_from(sorted(fields)).flatmap(build)


points = (
    st.floats(0, 1, exclude_min=True, exclude_max=True).map(lambda f: RunPoint(fraction=f))
    | st.integers(1, 10**9).map(lambda n: RunPoint(epoch=n))
    | st.integers(1, 10**12).map(lambda n: RunPoint(samples=n))
)
single_strategies = (
    st.just(Single())
    | st.builds(AllReduce, bucket_mb=positive)
    | st.builds(
        ParameterServer,
        sync=st.sampled_from([Asp(), Bsp()]),
        servers=st.integers(1, 1024),
        lr_scale=st.none() | positive,
    )
)


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    parts = draw(st.lists(single_strategies, min_size=2, max_size=4))
    at = draw(st.lists(points, min_size=len(parts) - 1, max_size=len(parts) - 1))
    return Switch(*parts, at=tuple(at))


def test_the_tables_here_are_complete() -> None:
    """A new word must come into these tests."""
    assert set(OPTIMIZER_FIELDS) == set(OPTIMIZERS)
    assert set(SCHEDULE_FIELDS) == set(SCHEDULES)


@given(spec=some_of(OPTIMIZERS, OPTIMIZER_FIELDS))
def test_optimizers_round_trip(spec: Any) -> None:
    assert parse_optimizer(str(spec)) == spec


@given(spec=some_of(SCHEDULES, SCHEDULE_FIELDS))
def test_schedules_round_trip(spec: Any) -> None:
    assert parse_schedule(str(spec)) == spec


@given(spec=single_strategies | switches())
@example(spec=Switch("allreduce", "ps", at=1 / 3))
@example(spec=Switch("allreduce", "ps", at=1e-12))
def test_strategies_round_trip(spec: Strategy) -> None:
    assert parse_strategy(str(spec)) == spec
    assert parse_strategy(spec) is spec


@pytest.mark.parametrize("word", sorted({*records()} - {"switch", "auto"}))
def test_every_strategy_by_its_word_alone(word: str) -> None:
    spec = parse_strategy(word)
    assert str(spec) == word
    assert spec.name == word
    assert spec.phases == (spec,)


@pytest.mark.parametrize("word", sorted(SYNC_MODES))
def test_every_sync_mode_round_trips_at_its_defaults(word: str) -> None:
    spec = parse_strategy(f"ps(sync={word})")
    assert parse_strategy(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("single", Single()),
        (" allreduce ( ) ", AllReduce()),
        ("allreduce(1.5)", AllReduce(bucket_mb=1.5)),
        ("ps", ParameterServer()),
        ("ps(sync=bsp, servers=2)", ParameterServer(sync=Bsp(), servers=2)),
        ("ps(bsp, 2)", ParameterServer(sync=Bsp(), servers=2)),
        ("ps(lr_scale=auto)", ParameterServer()),
        ("switch(allreduce, ps, at=50%)", Switch("allreduce", "ps", at=0.5)),
        ("switch(allreduce, ps, at=0.5)", Switch("allreduce", "ps", at=0.5)),
        ("switch(ps, single, at=epoch(10))", Switch("ps", "single", at=RunPoint(epoch=10))),
        (
            "switch(allreduce, ps(sync=bsp), ps, at=(25%, samples(270000)))",
            Switch("allreduce", ParameterServer(Bsp()), "ps", at=(0.25, RunPoint(samples=270_000))),
        ),
    ],
)
def test_texts_of_strategies(text: str, spec: Strategy) -> None:
    assert parse_strategy(text) == spec


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (parse_strategy, "", "the strategy is empty"),
        (parse_strategy, "alreduce", "did you mean 'allreduce'"),
        (parse_strategy, "50%", "is not the name of a strategy"),
        (parse_strategy, "ps(servers=0)", "at least 1"),
        (parse_strategy, "ps(servers=1.5)", "whole number"),
        (parse_strategy, "ps(server=2)", "did you mean 'servers'"),
        (parse_strategy, "ps(2, sync=bsp)", "sync"),
        (parse_strategy, "ps(sync=asap)", "did you mean 'asp'"),
        (parse_strategy, "ps(servers=1, servers=2)", "given twice"),
        (parse_strategy, "ps(lr_scale=0)", "must be greater than 0, got 0"),
        (parse_strategy, "single(3)", "accepts no values"),
        (parse_strategy, "switch(allreduce, ps)", "requires a switch point"),
        (parse_strategy, "switch(allreduce, at=50%)", "at least two"),
        (parse_strategy, "switch(allreduce, ps, at=150%)", "below 100%"),
        (parse_strategy, "switch(allreduce, ps, at=0%)", "above 0%"),
        (
            parse_strategy,
            "switch(allreduce, ps, at=(25%, 75%))",
            "2 strategies require 1 switch point",
        ),
        (
            parse_strategy,
            "switch(allreduce, ps, ps, at=50%)",
            "3 strategies require 2 switch point",
        ),
        (parse_strategy, "switch(ps, switch(ps, ps, at=1%), at=50%)", "switch inside switch"),
        (
            parse_strategy,
            "switch(allreduce, ps, at=epoch(0))",
            "requires a whole number of at least 1",
        ),
        (parse_strategy, "switch(allreduce, ps, at=soon)", "at=soon"),
        (parse_strategy, "allreduce ps", "the expression should end here"),
        (parse_strategy, "ps(", "at the end: expected a value"),
        (parse_strategy, "__import__('os')", "unexpected character"),
        (parse_strategy, "ps(" * 30, "levels deep"),
        (parse_strategy, "x" * 5000, "at most 4000 characters, got 5000"),
        (parse_strategies, " ; ", "--strategies is empty"),
        (parse_optimizer, "sdg", "did you mean 'sgd'"),
        (parse_optimizer, "sgd(momentum=2)", "at most 1"),
        (parse_optimizer, "sgd(nesterov=yes)", "true or false"),
        (parse_optimizer, "sgd(lr=0.1)", "no option 'lr'"),
        (parse_optimizer, "adam(betas=(0.9, 2))", "at most 1"),
        (parse_schedule, "cosin", "did you mean 'cosine'"),
        (parse_schedule, "milestones", "milestones requires epochs"),
        (parse_schedule, "milestones(80, drop=0)", "must be greater than 0"),
        (parse_schedule, "milestones(-1)", "at least 0"),
        (parse_schedule, "cosine(warmup=101%)", "must be 0% to 100% of the run, got 101%"),
        (parse_stop_condition, "val_ac>=0.9", "did you mean 'val_acc'"),
        (parse_stop_condition, "val_acc=0.9", "is not a condition; use for example"),
        (parse_stop_condition, "val_acc>=high", "is not a condition"),
        (parse_stop_condition, "val_acc>=1e", "is not a condition"),
        (parse_stop_condition, "", "is not a condition"),
    ],
)
def test_mistakes_are_told_in_one_line(read: Callable[[str], Any], text: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- all that cannot -------------------------------------------------------------------------

READERS: tuple[Callable[[str], Any], ...] = (
    parse_strategy,
    parse_strategies,
    parse_optimizer,
    parse_schedule,
    parse_stop_condition,
    lambda text: read_point(parse_expression(text)),
)
tokens = st.sampled_from(
    [
        *("(", ")", ",", "=", "%", " ", "-", ";", "1", "0.5", "1e999", "-1", "inf", "nan", "true"),
        *records(),
        *SYNC_MODES,
        *OPTIMIZERS,
        *SCHEDULES,
        *("at=", "sync=", "servers=", "momentum=", "betas=", "warmup=", "marks=", "epoch(", "50%"),
        *METRICS,
    ]
)


@given(text=st.text(max_size=80) | st.lists(tokens, max_size=15).map("".join))
@example(text="milestones(1, marks=2)")
@example(text="milestones(marks=(1,))")
@example(text="sgd(momentum=1e999)")
@example(text="switch(allreduce, ps, at=(1%, (2%)))")
@example(text="ps(٣)")
@example(text="9" * 3999)
@example(text="ps(servers=" + "9" * 3900 + ")")
@example(text="sgd(momentum=" + "9" * 3900 + ")")
@example(text="milestones(" + "9" * 3900 + ")")
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in READERS:
        try:
            read(text)
        except SpecError:
            pass


values = st.recursive(
    st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(0, 1e9).map(Percent)
    | st.from_regex(r"[A-Za-z_][A-Za-z0-9_\-]{0,6}", fullmatch=True).map(Call),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(value=values)
def test_written_values_are_read_back(value: Any) -> None:
    assert parse_expression(format_expression(value)) == value


# ---- schedules at their values ---------------------------------------------------------------

PER_EPOCH, EPOCHS = 1000, 100
TOTAL = PER_EPOCH * EPOCHS


def factor(schedule: str | Schedule, epoch: float) -> float:
    spec = parse_schedule(schedule) if isinstance(schedule, str) else schedule
    return spec.factor(round(epoch * PER_EPOCH), per_epoch=PER_EPOCH, total=TOTAL)


@pytest.mark.parametrize(
    ("schedule", "epoch", "value"),
    [
        ("constant", 0, 1.0),
        ("constant", 100, 1.0),
        ("milestones(80, 90)", 79.999, 1.0),
        ("milestones(80, 90)", 80, 0.1),
        ("milestones(80, 90)", 89.999, 0.1),
        ("milestones(80, 90)", 90, 0.01),
        ("milestones(50%, 75%, drop=0.5)", 49.999, 1.0),
        ("milestones(50%, 75%, drop=0.5)", 50, 0.5),
        ("milestones(50%, 75%, drop=0.5)", 75, 0.25),
        ("milestones(0.5)", 0.5, 0.1),
        ("cosine", 0, 1.0),
        ("cosine", 25, 0.5 * (1 + math.sqrt(0.5))),
        ("cosine", 50, 0.5),
        ("cosine", 100, 0.0),
        ("cosine", 120, 0.0),
        ("cosine(floor=0.2)", 50, 0.6),
        ("cosine(floor=0.2)", 100, 0.2),
        ("cosine(warmup=20)", 10, 0.5),
        ("cosine(warmup=20)", 20, 1.0),
        ("cosine(warmup=20)", 60, 0.5),
        ("cosine(warmup=20%)", 60, 0.5),
        ("cosine(warmup=100%)", 100, 1.0),
        ("constant(warmup=5)", 0, 0.0002),
        ("constant(warmup=5)", 1, 0.2),
        ("constant(warmup=5)", 4.999, 0.9998),
        ("constant(warmup=5)", 5, 1.0),
        ("milestones(80, warmup=10)", 5, 0.5),
        ("milestones(80, warmup=10)", 80, 0.1),
    ],
)
def test_schedules_at_their_values(schedule: str, epoch: float, value: float) -> None:
    assert factor(schedule, epoch) == pytest.approx(value, rel=1e-12, abs=1e-15)


@given(spec=some_of(SCHEDULES, SCHEDULE_FIELDS), epoch=st.floats(0, EPOCHS))
def test_schedules_stay_between_zero_and_one(spec: Any, epoch: float) -> None:
    assert 0 <= factor(spec, epoch) <= 1


def test_warm_up_never_stands_still() -> None:
    for schedule in (Constant(2.0), Cosine(Percent(10.0)), Milestones((50.0,), warmup=1.0)):
        assert factor(schedule, 0) > 0


# ---- points, conditions, learning rates ------------------------------------------------------


def test_points_resolve_to_samples() -> None:
    assert RunPoint(fraction=0.5).resolve(1000, 3) == 1500
    assert RunPoint(epoch=2).resolve(1000, None) == 2000
    assert RunPoint(samples=77).resolve(1000, None) == 77
    with pytest.raises(SpecError, match="epochs="):
        RunPoint(fraction=0.5).resolve(1000, None)


@pytest.mark.parametrize("at", [None, 0, 1, 1.5, -0.5, True, "150%", object(), (0.5, None)])
def test_python_points_that_are_none(at: object) -> None:
    with pytest.raises(SpecError):
        Switch("allreduce", "ps", at=at)


@pytest.mark.parametrize(
    ("text", "until"),
    [
        ("val_acc>=0.97", StopCondition("val_acc", ">=", 0.97)),
        (" train_loss < 1e-3 ", StopCondition("train_loss", "<", 0.001)),
        ("val_loss<=.5", StopCondition("val_loss", "<=", 0.5)),
        ("train_acc>-1", StopCondition("train_acc", ">", -1.0)),
    ],
)
def test_conditions(text: str, until: StopCondition) -> None:
    assert parse_stop_condition(text) == until
    assert parse_stop_condition(str(until)) == until


def test_conditions_are_met() -> None:
    until = parse_stop_condition("val_acc>=0.97")
    assert until.is_met(0.97)
    assert not until.is_met(0.9699)
    assert not until.is_met(math.nan)
    assert not until.is_met(None)
    assert parse_stop_condition("val_loss<0.5").is_met(0.4)
    assert not parse_stop_condition("val_loss<0.5").is_met(0.5)


def test_learning_rate_of_an_update() -> None:
    assert ParameterServer().lr_scale_for(0.25, 3) == 0.25
    assert ParameterServer(lr_scale=2.0).lr_scale_for(0.25, 3) == 2.0
    assert ParameterServer(damp="inverse").lr_scale_for(0.5, 4) == 0.1
    assert ParameterServer(sync=Bsp()).exact
    assert not ParameterServer().exact
    assert "0.25" in ParameterServer().lr_description(4)


def test_options_are_those_of_torch() -> None:
    """Every optimizer can be made from its spec; the learning rate is kept apart."""
    import importlib

    import torch

    for cls in OPTIMIZERS.values():
        module, name = cls.torch_class.split(":")
        made = getattr(importlib.import_module(module), name)
        made([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **cls().options())
    assert parse_optimizer("sgd(momentum=0.9)").options()["momentum"] == 0.9
    assert OPTIMIZERS["adam"]().options()["betas"] == (0.9, 0.999)
    assert OPTIMIZERS["rmsprop"]().options()["alpha"] == 0.99


def test_workers_that_a_strategy_cannot_have() -> None:
    with pytest.raises(SpecError, match="one worker, not 2"):
        Single().check_workers(2)
    Switch("single", "allreduce", at=0.5).check_workers(3)
    assert Switch("allreduce", "ps(servers=3)", at=0.5).servers_for(2) == 3

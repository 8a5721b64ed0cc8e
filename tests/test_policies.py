"""Rules that decide when to switch: each on a history made up for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.protocol.history import History
from paceline.protocol.messages import StepStats
from paceline.protocol.switch_policy import RunHorizon
from paceline.protocol.throughput import (
    GradientNoiseScale,
    ThroughputMonitor,
    ThroughputWindow,
    find_straggler,
)
from paceline.specs.schedule import Schedule, parse_schedule
from paceline.specs.slowdown import ActiveSlowdown, InjectedSlowdown, parse_slowdown
from paceline.strategies.registry import make_switch_policy, parse_strategy
from paceline.telemetry.events import EpochRow

CALM = (100.0, 101.0, 99.0, 100.0)
LAGGING = (100.0, 101.0, 33.0, 100.0)


def window(
    phase: int = 0, speeds: Any = CALM, rate: float = 300.0, **changes: Any
) -> ThroughputWindow:
    facts = {"loss": 1.0, "comm_share": 0.1, "began": 0.0, "ended": 1.0, **changes}
    return ThroughputWindow(phase=phase, samples=int(rate), speeds=speeds, **facts)


def policy_of(text: str, schedule: str = "constant", epochs: int | None = 10) -> Any:
    return make_switch_policy(parse_strategy(text), horizon(parse_schedule(schedule), epochs))


def horizon(schedule: Schedule, epochs: int | None = 10) -> RunHorizon:
    return RunHorizon(
        workers=4, samples_per_epoch=1000, epochs=epochs, batch=100, schedule=schedule
    )


def history_of(samples: int, windows: list[ThroughputWindow], **changes: Any) -> History:
    history = History(samples=samples, phase_samples=Counter({0: samples}), **changes)
    for one in windows:
        history.throughput.append(one)
    return history


# ---- measuring --------------------------------------------------------------------------------


def test_a_window_closes_when_it_is_old_enough_and_all_were_heard() -> None:
    pulse = ThroughputMonitor()
    pulse.begin(2, phase=1, now=10.0, idle=frozenset())
    assert not pulse.add(0, StepStats(10, 10, 5.0, 0, busy_s=0.5, comm_s=0.1), 10.4)
    assert not pulse.add(0, StepStats(10, 10, 5.0, 0, busy_s=0.5, comm_s=0.1), 11.2)
    assert pulse.add(1, StepStats(5, 5, 5.0, 0, busy_s=1.0, comm_s=0.9), 11.5)
    (closed,) = pulse.windows
    assert (closed.samples, closed.phase, closed.loss) == (25, 1, 0.6)
    assert closed.speeds == (20.0, 5.0)
    assert closed.comm_share == pytest.approx(0.2)
    # Each worker between its own reports.
    assert closed.rate == pytest.approx(20 / 1.2 + 5 / 1.5)


def test_a_window_goes_on_over_a_stop_and_without_those_who_idle() -> None:
    pulse = ThroughputMonitor()
    pulse.begin(2, phase=0, now=0.0, idle=frozenset({1}))
    assert not pulse.add(0, StepStats(10, 10, 5.0, 0, busy_s=0.5), 0.6)
    pulse.end(0.6)
    pulse.begin(2, phase=0, now=5.0, idle=frozenset({1}))
    assert pulse.add(0, StepStats(10, 10, 5.0, 0, busy_s=0.3), 5.5)
    (closed,) = pulse.windows
    assert closed.rate == pytest.approx(20 / 1.1)
    assert closed.speeds == (25.0, 0.0)


def test_of_two_workers_the_slower_can_be_the_straggler() -> None:
    for slow in (25.0, 30.0, 33.3, 61.7):
        assert find_straggler([window(speeds=(100.0, slow))] * 3, 3) == 1


def test_windows_of_an_earlier_phase_are_not_mixed_in() -> None:
    pulse = ThroughputMonitor()
    for phase in (0, 0, 1, 0):
        pulse.append(window(phase))
    assert len(pulse.latest(0, 3)) == 1


@given(
    signal=st.floats(0.1, 10),
    noise=st.floats(0, 1000),
    small=st.integers(1, 50),
    n=st.integers(2, 9),
)
def test_noise_scale_is_found_again(signal: float, noise: float, small: int, n: int) -> None:
    """Squared norms follow |G|^2 + S/B: from two batch sizes both can be told."""
    measured = GradientNoiseScale()
    big = small * n
    for _ in range(3):
        measured.add(small, signal + noise / small, big, signal + noise / big)
    assert measured.scale is not None
    assert measured.scale == pytest.approx(noise / signal, rel=1e-4, abs=1e-4)


def test_noise_scale_is_unknown_while_nothing_can_be_told() -> None:
    noise = GradientNoiseScale()
    assert noise.scale is None
    noise.add(32, 1.0, 32, 1.0)
    assert noise.scale is None


def test_a_straggler_is_slow_in_every_one_of_the_last_windows() -> None:
    assert find_straggler([window(speeds=LAGGING)] * 3, 3) == 2
    assert find_straggler([window(speeds=LAGGING)] * 2, 3) is None
    assert find_straggler([window(), window(speeds=LAGGING), window(speeds=LAGGING)], 3) is None


@given(st.lists(st.floats(90, 110), min_size=2, max_size=8))
def test_equal_machines_have_no_straggler(speeds: list[float]) -> None:
    assert find_straggler([window(speeds=tuple(speeds))] * 5, 3) is None


# ---- deciding ---------------------------------------------------------------------------------


def test_lr_drop_switches_where_the_schedule_drops() -> None:
    policy = policy_of("switch(allreduce, ps, when=lr_drop)", "milestones(4, 8)")
    assert policy.next_stop(History(samples=0)) == 4000
    assert policy.decide(History(samples=3900)) is None
    assert policy.decide(History(samples=4000)).reason == "lr_drop"
    with pytest.raises(SpecError, match="has 0; use milestones"):
        policy_of("switch(allreduce, ps, when=lr_drop)", "cosine")


def rows(*losses: float) -> list[EpochRow]:
    return [EpochRow(epoch=i + 1, val_loss=loss) for i, loss in enumerate(losses)]


def test_plateau_waits_for_the_loss_to_stop_falling() -> None:
    policy = policy_of("switch(allreduce, ps, when=plateau(2, 0.05, 2))")
    assert policy.decide(History(rows=rows(1.0, 0.8, 0.6, 0.5, 0.4))) is None
    decision = policy.decide(History(rows=rows(1.0, 0.5, 0.5, 0.5, 0.5, 0.5)))
    assert decision.phase == 1
    assert "plateau" in decision.reason


def test_greedy_leaves_for_a_straggler_comes_back_and_ends_with_the_quota() -> None:
    policy = policy_of("switch(allreduce, ps, when=straggler(greedy, quota=40%))")
    assert policy.decide(history_of(1000, [window()] * 3)) is None
    away = policy.decide(history_of(1000, [window(speeds=LAGGING)] * 3))
    assert away.phase == 1
    assert "worker 2 computes 3.0x slower" in away.reason
    back = policy.decide(history_of(2000, [window(1)] * 3, phase=1))
    assert back.phase == 0
    assert policy.decide(history_of(4000, [window()] * 3)).phase == 1
    assert policy.next_stop(history_of(1000, [])) == 4000


def test_elastic_leaves_the_straggler_out() -> None:
    policy = policy_of("switch(allreduce, ps, when=straggler(elastic))")
    history = history_of(1000, [window(speeds=LAGGING)] * 3)
    decision = policy.decide(history)
    assert (decision.phase, decision.exclude_worker) == (0, 2)
    history.excluded_workers.add(2)
    assert policy.decide(history) is None


# ---- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "ps(sync=ssp(-1))",
        "ps(sync=dssp(5, 3))",
        "ps(sync=kasync(0))",
        "ps(sync=bsp, overlap=true)",
        "allreduce(codec=topk(0))",
        "allreduce(codec=powersgd(0))",
        "allreduce(balance=fair)",
        "grouped(size=0)",
        "local_sgd(h=0)",
        "local_sgd(h=2, drift=0.1)",
        "diloco(h=0)",
        "switch(allreduce, ps, when=whenever)",
        "switch(allreduce, ps, at=50%, when=auto)",
        "switch(allreduce, ps, single, when=auto)",
        "switch(allreduce, ps, when=straggler(greedy, quota=150%))",
    ],
)
def test_impossible_parameters_are_one_clear_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_strategy(text)
    assert "\n" not in str(caught.value)


def test_what_needs_more_workers_than_there_are_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot be larger"):
        parse_strategy("grouped(size=4)").check_workers(3)
    with pytest.raises(SpecError, match="waits for 4 gradients, but there are only 3 workers"):
        parse_strategy("ps(sync=kasync(4))").check_workers(3)


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("slow", "worker=0", "one of factor=... and cores=... is required"),
        ("slow", "worker=5,factor=2", "worker must be 0 to 1"),
        ("slow", "worker=0,factor=0.5", "at least 1"),
        ("slow", "worker=0,factr=2", "did you mean 'factor'"),
        ("delay", "worker=0,ms=x", "ms must be a number, got 'x'"),
        ("delay", "worker=0,ms=1,from=3,to=2", "must be before"),
        ("slow", "worker=0,cores=0", "greater than 0"),
        ("slow", "worker=0,cores=0.5,factor=2", "one of factor=... and cores=... is required"),
        ("delay", "worker=0,cores=0.5", "unknown"),
        ("slow", "fast", "'fast' has no value; use worker=0,factor=3"),
    ],
)
def test_bad_trouble_is_refused(kind: str, text: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        parse_slowdown(kind, text, 2)


def test_a_quota_counts_processor_time_and_a_factor_what_went_by() -> None:
    """Half a core: 2 s for one second of work, though neighbours made it take 1.5 s here."""
    quota, factor = parse_slowdown("slow", "worker=0,cores=0.5", 2), InjectedSlowdown(0, factor=3.0)
    assert ActiveSlowdown.of([quota], 0, 0.0).wall_s(1.5, 1.0) == 2.0
    assert ActiveSlowdown.of([quota], 0, 0.0).wall_s(2.5, 1.0) == 2.5
    assert ActiveSlowdown.of([factor], 0, 0.0).wall_s(1.5, 1.0) == 4.5
    assert ActiveSlowdown.of([quota, factor], 0, 0.0).wall_s(1.5, 1.0) == 6.0
    assert ActiveSlowdown.of([quota, factor], 1, 0.0) == ActiveSlowdown()


def test_trouble_is_read() -> None:
    trouble = parse_slowdown("delay", "worker=1,ms=10,from=2,to=5", 2)
    assert (trouble.worker, trouble.delay_s) == (1, 0.01)
    assert [trouble.is_active(e) for e in (1.9, 2.0, 4.9, 5.0)] == [False, True, True, False]

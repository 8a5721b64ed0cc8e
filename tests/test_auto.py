"""The strategy `auto`: goodput on clusters whose best strategy is known, decisions, whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.pool import Host, Jitter, Link, Pool, StepCost
from paceline.errors import SpecError
from paceline.job import Job
from paceline.launch.compare_runs import compare
from paceline.launch.run import train
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.history import History
from paceline.protocol.switch_policy import RunHorizon
from paceline.protocol.throughput import ThroughputWindow
from paceline.specs.schedule import parse_schedule
from paceline.specs.strategy import Strategy
from paceline.strategies.auto.goodput import LiveCluster, Observation, predict_goodput
from paceline.strategies.auto.policy import AutoPolicy, make_policy
from paceline.strategies.auto.spec import DEFAULT_CANDIDATES, Auto
from paceline.strategies.registry import make_switch_policy, parse_strategy
from paceline.telemetry.events import DecisionRow, EpochRow, SwitchRow
from paceline.twin.run import TwinOptions, run_twin

NAMES = ("allreduce", "ps", "local_sgd(h=4)", "allreduce(codec=int8)")
PHASES: dict[int, Strategy] = {i: parse_strategy(name) for i, name in enumerate(NAMES)}


def cluster_of(
    speeds: tuple[float, ...], *, exchange_s: float = 0.0, latency_s: float = 0.0, cv: float = 0.0
) -> LiveCluster:
    cluster = LiveCluster(len(speeds), 64)
    cluster.set_speeds(speeds)
    cluster.set_exchange(exchange_s)
    cluster.set_latency(latency_s)
    cluster.set_cv(cv)
    return cluster


def windows_of(
    cluster: LiveCluster, strategy: Strategy, phase: int = 0, *, loss: float = 1.0, now: float = 1.0
) -> list[ThroughputWindow]:
    """Two windows as a run on this cluster would measure them."""
    estimate = cluster.estimate(strategy)
    rate = cluster.batch / estimate.step_s
    shares = [max(0.0, estimate.step_s / busy - 1) for busy in estimate.busy]
    return [
        ThroughputWindow(
            phase=phase,
            began=now + i,
            ended=now + i + 1,
            samples=round(rate),
            loss=loss,
            speeds=cluster.speeds,
            comm_share=min(shares),
            mean_comm_share=sum(shares) / len(shares),
            cv=cluster.cv,
        )
        for i in range(2)
    ]


def best_of(cluster: LiveCluster) -> str:
    found = predict_goodput(cluster, PHASES, {})
    return NAMES[max(found, key=lambda phase: found[phase].value)]


# ---- goodput ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (cluster_of((100.0, 100.0, 100.0, 33.0)), "ps"),
        (cluster_of((100.0,) * 8, cv=0.3), "ps"),
        # An exchange that takes as long as a whole step: send less, or less often.
        (cluster_of((100.0,) * 4, exchange_s=0.16), "allreduce(codec=int8)"),
        # The ring of a codec or of local steps has more hops than the sums of allreduce.
        (cluster_of((100.0,) * 4, latency_s=0.05), "allreduce"),
        # One server receives the gradients of all 32 workers.
        (cluster_of((100.0,) * 32, exchange_s=0.02), "allreduce(codec=int8)"),
    ],
)
def test_the_best_candidate_of_a_known_cluster(cluster: LiveCluster, expected: str) -> None:
    assert best_of(cluster) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_is_recovered_from_what_it_measures(name: str) -> None:
    strategy = parse_strategy(name)
    truth = cluster_of((100.0, 90.0, 110.0, 100.0), exchange_s=0.05, cv=0.1)
    found = LiveCluster(4, 64)
    assert found.measure(Observation(strategy, windows_of(truth, strategy)))
    assert found.speeds == pytest.approx(truth.speeds)
    assert found.exchange_s == pytest.approx(0.05, rel=0.1)
    for other in PHASES.values():
        expected = truth.estimate(other).step_s
        assert found.estimate(other).step_s == pytest.approx(expected, rel=0.05)


def test_a_probe_tells_latency_from_bandwidth() -> None:
    probe = ExchangeProbe(message_s=0.02, small_s=0.12, gradient_s=0.17, gradient_bytes=800_000)
    truth = LiveCluster(4, 64, probe)
    truth.set_speeds((100.0,) * 4)
    assert truth.exchange_s == pytest.approx(0.05)
    assert truth.estimate(PHASES[3]).step_s > truth.estimate(PHASES[0]).step_s
    # The links have become twice as slow since the probe.
    truth.set_exchange(0.10)
    found = LiveCluster(4, 64, probe)
    assert found.measure(Observation(PHASES[0], windows_of(truth, PHASES[0])))
    assert found.latency_s == pytest.approx(0.02)
    assert found.exchange_s == pytest.approx(0.10, rel=0.05)


def test_a_probe_that_explains_the_run_is_kept() -> None:
    probe = ExchangeProbe(message_s=0.001, small_s=0.006, gradient_s=0.056, gradient_bytes=800_000)
    truth = LiveCluster(4, 64, probe)
    truth.set_speeds((100.0,) * 4)
    truth.set_exchange(0.055)
    for strategy in PHASES.values():
        found = LiveCluster(4, 64, probe)
        assert found.measure(Observation(strategy, windows_of(truth, strategy)))
        assert found.exchange_s == pytest.approx(0.05)


def test_a_probed_latency_is_lowered_if_it_exceeds_the_communication() -> None:
    probe = ExchangeProbe(message_s=0.05, small_s=0.30, gradient_s=0.35, gradient_bytes=800_000)
    truth = cluster_of((100.0,) * 4, exchange_s=0.03)
    found = LiveCluster(4, 64, probe)
    assert found.measure(Observation(PHASES[0], windows_of(truth, PHASES[0])))
    assert found.latency_s < 0.03
    # As little as explains the step up to the error of the model.
    expected = truth.estimate(PHASES[0]).step_s
    assert found.estimate(PHASES[0]).step_s == pytest.approx(1.1 * expected, rel=0.02)


def test_a_step_that_hides_its_exchange_does_not_make_links_faster() -> None:
    """All of the encoded exchange was hidden; `ps` would still saturate the link of its server."""
    probe = ExchangeProbe(message_s=0.0, small_s=0.0, gradient_s=0.04, gradient_bytes=800_000)
    ps, encoded = PHASES[1], PHASES[3]
    truth = LiveCluster(16, 64, probe)
    truth.set_speeds((100.0,) * 16)
    saturated_s = truth.estimate(ps).step_s
    assert saturated_s > 2 * truth.estimate(encoded).step_s
    truth.set_exchange(0.0)
    found = LiveCluster(16, 64, probe)
    assert found.measure(Observation(encoded, windows_of(truth, encoded)))
    assert found.estimate(encoded).step_s < 1.11 * truth.estimate(encoded).step_s
    assert found.estimate(ps).step_s > 1.5 * found.estimate(encoded).step_s


def test_a_worker_without_work_leaves_the_cluster_unknown() -> None:
    windows = windows_of(cluster_of((100.0, 100.0)), PHASES[0])
    idle = [
        ThroughputWindow(0, w.began, w.ended, w.samples, w.loss, (100.0, 0.0), 0.0) for w in windows
    ]
    assert not LiveCluster(2, 64).measure(Observation(PHASES[0], idle))


# ---- decisions --------------------------------------------------------------------------------


def horizon(workers: int = 4, **changes: Any) -> RunHorizon:
    facts: dict[str, Any] = {
        "samples_per_epoch": 1000,
        "epochs": 10,
        "batch": 64,
        "schedule": parse_schedule("constant"),
        **changes,
    }
    return RunHorizon(workers=workers, **facts)


def policy_of(**changes: Any) -> AutoPolicy:
    return AutoPolicy(horizon(**changes), PHASES, tuple(PHASES.values()))


def history_of(samples: int, windows: list[ThroughputWindow], **changes: Any) -> History:
    history = History(samples=samples, **changes)
    for one in windows:
        history.throughput.append(one)
    return history


def row(epoch: int, loss: float | None, accuracy: float | None = None) -> EpochRow:
    return EpochRow(epoch=epoch, samples=1000 * epoch, val_loss=loss, val_acc=accuracy)


def test_the_run_starts_with_the_best_synchronous_candidate_by_probed_speeds() -> None:
    """The others depend on an exchange that has not been measured."""
    names = ("allreduce", "ps", "allreduce(balance=auto)")
    phases = tuple(parse_strategy(name) for name in names)
    policy = AutoPolicy(
        horizon(speeds=(100.0, 100.0, 100.0, 25.0)), dict(enumerate(phases)), phases
    )
    decision = policy.decide(History())
    assert decision is not None
    assert (decision.phase, decision.cause) == (2, "start")
    assert "workers differ in speed by x4.00" in decision.reason


def test_without_probed_speeds_it_starts_with_the_first_candidate() -> None:
    decision = policy_of().decide(History())
    assert decision is not None
    assert decision.phase == 0


def test_it_changes_when_that_pays_and_explains_why() -> None:
    slow = cluster_of((100.0, 100.0, 100.0, 30.0))
    decision = policy_of().decide(history_of(2000, windows_of(slow, PHASES[0])))
    assert decision is not None
    assert (decision.phase, decision.cause, decision.snapshot) == (1, "gain", True)
    assert decision.reason.startswith("auto: allreduce makes 120 samples/s, ps ")
    assert "s of the remaining 66.7 s" in decision.reason


def test_stale_gradients_and_local_steps_come_later() -> None:
    """The smaller the gain, the longer the run stays with a synchronous candidate."""
    slow = windows_of(cluster_of((100.0, 100.0, 100.0, 30.0)), PHASES[0])
    early = policy_of().decide(history_of(1000, slow))
    assert early is not None
    assert early.phase == 0
    assert "for ps (330) it is too early" in early.reason

    def first_change(windows: list[ThroughputWindow], batch: int = 64) -> int:
        policy = policy_of(batch=batch)
        for samples in range(100, 10_000, 100):
            decision = policy.decide(history_of(samples, windows))
            if decision is not None and decision.phase == 1:
                return samples
        raise AssertionError("no change")

    # After 20 batches, less the samples until a decision takes effect.
    assert first_change(slow) == 1200
    assert first_change(slow, batch=16) == 200
    jitter = windows_of(cluster_of((100.0,) * 4, cv=0.15), PHASES[0])
    assert 1200 < first_change(jitter) <= 2500


def test_a_short_run_does_not_start_with_local_steps() -> None:
    """However slow the links are: it begins with full progress per sample."""
    probe = ExchangeProbe(message_s=0.2, small_s=1.2, gradient_s=1.3, gradient_bytes=800_000)

    def start(epochs: int | None) -> str:
        policy = policy_of(speeds=(100.0,) * 4, exchange=probe, epochs=epochs)
        decision = policy.decide(History())
        assert decision is not None
        return NAMES[decision.phase]

    assert start(epochs=20) == "local_sgd(h=4)"
    assert start(epochs=10) == "allreduce"
    assert start(epochs=None) == "allreduce"


def test_a_run_starts_with_the_first_candidate_unless_another_is_clearly_better() -> None:
    """A codec must promise more than the error of a prediction, an exact candidate 3%."""
    names = ("allreduce", "allreduce(balance=auto)", "allreduce(codec=int8)")
    phases = tuple(parse_strategy(name) for name in names)

    def start(slowest: float, exchange_s: float) -> str:
        probe = ExchangeProbe(0.0, 0.0, exchange_s, 800_000)
        facts = horizon(speeds=(100.0, 100.0, 100.0, slowest), exchange=probe)
        decision = AutoPolicy(facts, dict(enumerate(phases)), phases).decide(History())
        assert decision is not None
        return names[decision.phase]

    assert start(98.0, 0.01) == "allreduce"
    assert start(90.0, 0.01) == "allreduce(balance=auto)"
    assert start(100.0, 0.05) == "allreduce(codec=int8)"


def test_without_validation_data_it_says_what_it_judges_by() -> None:
    decision = policy_of(validates=False).decide(History())
    assert decision is not None
    assert decision.reason.endswith(
        "without validation data, changes are judged by the training loss"
    )


def test_it_stays_where_nothing_is_to_be_gained() -> None:
    calm = cluster_of((100.0,) * 4)
    decision = policy_of().decide(history_of(1000, windows_of(calm, PHASES[1], 1), phase=1))
    assert decision is not None
    assert decision.phase == 1
    assert decision.cause in ("best", "no gain")  # All candidates are equally good.


def test_it_does_not_change_when_the_effect_could_not_be_seen() -> None:
    slow = cluster_of((100.0, 100.0, 100.0, 30.0))
    decision = policy_of().decide(history_of(9900, windows_of(slow, PHASES[0])))
    assert decision is not None
    assert (decision.phase, decision.cause) == (0, "too late")


def test_what_was_measured_corrects_what_is_predicted() -> None:
    """`ps` was tried and made half of what was expected: the run does not return to it."""
    slow = cluster_of((100.0, 100.0, 100.0, 50.0))
    tried = [
        ThroughputWindow(1, w.began, w.ended, w.samples // 2, 1.0, slow.speeds, 3.0)
        for w in windows_of(slow, PHASES[1], 1)
    ]
    now = windows_of(slow, PHASES[0], now=5.0)
    decision = policy_of().decide(history_of(2000, [*tried, *now]))
    assert decision is not None
    assert decision.phase != 1


def test_every_change_raises_the_bar() -> None:
    jitter = windows_of(cluster_of((100.0,) * 4, cv=0.15), PHASES[0])
    assert policy_of().decide(history_of(3000, jitter)).cause == "gain"  # type: ignore[union-attr]
    changes = [SwitchRow(samples=1, before="ps", after="allreduce", cause="gain")] * 3
    decision = policy_of().decide(history_of(3000, jitter, switches=changes))
    assert decision is not None
    assert decision.cause == "no gain"


def test_a_change_after_which_the_loss_rises_is_undone() -> None:
    calm = cluster_of((100.0,) * 4)
    before = windows_of(calm, PHASES[0], loss=0.5) * 2
    after = windows_of(calm, PHASES[1], 1, loss=0.9, now=9.0) * 2
    change = SwitchRow(samples=2000, before="allreduce", after="ps", cause="gain")
    history = history_of(3000, [*before, *after], phase=1, switches=[change])
    decision = policy_of().decide(history)
    assert decision is not None
    assert (decision.phase, decision.cause, decision.restore) == (0, "regressed", True)
    assert "the training loss rose from 0.5 to 0.9" in decision.reason


def test_a_change_after_which_validation_falls_is_undone() -> None:
    change = SwitchRow(samples=2000, before="allreduce", after="ps", cause="gain")
    rows = [row(1, 0.9, 0.7), row(2, 0.5, 0.9), row(3, 0.8, 0.6)]
    history = history_of(3000, [], phase=1, switches=[change], rows=rows, val_rows=500)
    decision = policy_of().decide(history)
    assert decision is not None
    assert decision.restore
    # A difference that chance explains does not count.
    history.rows[-1] = row(3, 0.51, 0.89)
    assert policy_of().decide(history) is None


def test_a_candidate_that_failed_is_tried_again_at_a_lower_learning_rate() -> None:
    slow = windows_of(cluster_of((100.0, 100.0, 100.0, 30.0)), PHASES[0])
    failed = SwitchRow(samples=2000, before="ps", after="allreduce", cause="regressed")
    two = {0: PHASES[0], 1: PHASES[1]}

    def decide(samples: int) -> str:
        policy = AutoPolicy(
            horizon(schedule=parse_schedule("milestones(5)")),
            two,
            tuple(two.values()),
        )
        decision = policy.decide(history_of(samples, slow, switches=[failed]))
        assert decision is not None
        return decision.cause

    assert decide(3000) == "best"
    assert decide(6000) in ("gain", "slower")


def test_the_best_validated_state_is_returned() -> None:
    rows = [row(1, 0.9, 0.7), row(2, 0.3, 0.95), row(3, 0.8, 0.8)]
    history = history_of(3000, [], rows=rows, val_rows=500)
    policy = policy_of()
    decision = policy.conclude(history)
    assert decision is not None
    assert (decision.restore, decision.best) == (True, True)
    assert "returns the state of that epoch" in decision.reason
    # Without a change, a worse loss alone may be overfitting at the same accuracy.
    history.rows[-1] = row(3, 0.31, 0.95)
    assert policy.conclude(history) is None
    history.switches.append(SwitchRow(samples=2500, before="allreduce", after="ps", cause="gain"))
    assert policy.conclude(history) is not None


def test_a_run_never_ends_worse_than_before_any_of_its_changes() -> None:
    """Also if the best epoch came after the change, and its loss before it was in between."""
    change = SwitchRow(samples=1000, before="allreduce", after="ps", cause="gain")
    rows = [row(1, 0.30, 0.90), row(2, 0.28, 0.91), row(3, 0.29, 0.91)]
    history = history_of(3000, [], rows=rows, val_rows=500, switches=[change], train_seconds=1.0)
    assert policy_of().conclude(history) is None  # Better than before the change.
    history.rows[-1] = row(3, 0.31, 0.91)
    decision = policy_of().conclude(history)
    assert decision is not None
    assert (decision.restore, decision.best) == (True, True)
    assert "in epoch 2" in decision.reason


@settings(max_examples=300, deadline=None)
@given(
    losses=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=8),
    accuracies=st.none() | st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    changes=st.lists(st.integers(0, 8500), max_size=4),
)
def test_the_returned_validation_loss_is_not_above_any_before_a_change(
    losses: list[float], accuracies: list[float] | None, changes: list[int]
) -> None:
    policy, history = policy_of(), history_of(0, [], val_rows=500)
    kept = math.inf
    for epoch, loss in enumerate(losses, 1):
        history.rows.append(row(epoch, loss, accuracies and accuracies[epoch - 1]))
        if policy.keeps_state(history):
            kept = loss
    history.samples = 1000 * len(losses)
    history.switches += [
        SwitchRow(samples=at, before="allreduce", after="ps", cause="gain")
        for at in sorted(changes)
        if at <= history.samples
    ]
    decision = policy.conclude(history)
    returned = kept if decision is not None and decision.restore else losses[-1]
    last_change = max((change.samples for change in history.switches), default=-1)
    before = [r.val_loss for r in history.rows if r.samples <= last_change]
    assert all(loss is None or returned <= loss for loss in before)
    if accuracies is None:
        assert returned == min(losses)


def test_the_cost_of_changes_is_reported() -> None:
    def decided(seconds: float, strategy: str, chosen: str, cause: str) -> DecisionRow:
        return DecisionRow(
            samples=0,
            seconds=seconds,
            strategy=strategy,
            chosen=chosen,
            cause=cause,
            reason="",
            figures={"gain": 0.5},
        )

    switches = [
        SwitchRow(samples=500, before="allreduce", after="ps", cause="gain", pause_s=0.2),
        SwitchRow(samples=900, before="ps", after="allreduce", cause="slower", pause_s=0.3),
    ]
    decisions = [
        decided(0.0, "allreduce", "allreduce", "start"),
        decided(5.0, "allreduce", "ps", "gain"),
        decided(8.0, "ps", "allreduce", "slower"),
    ]
    history = history_of(3000, [], switches=switches, decisions=decisions, train_seconds=100.0)
    decision = policy_of().conclude(history)
    assert decision is not None
    assert (decision.cause, decision.restore) == ("summary", False)
    assert decision.measurements["explored_s"] == pytest.approx(2.0)
    assert "2.0% of the training time" in decision.reason
    assert policy_of().conclude(history_of(3000, [])) is None


def test_states_are_kept_at_the_lowest_validation_loss() -> None:
    policy = policy_of()
    assert policy.keeps_state(history_of(1000, [], rows=[row(1, 0.9)]))
    assert not policy.keeps_state(history_of(2000, [], rows=[row(1, 0.9), row(2, 0.95)]))
    assert not policy.keeps_state(history_of(1000, [], rows=[row(1, None)]))


# ---- the spec ---------------------------------------------------------------------------------


def test_text_and_candidates() -> None:
    assert str(parse_strategy("auto")) == "auto"
    assert [str(p) for p in Auto().phases] == [str(parse_strategy(t)) for t in DEFAULT_CANDIDATES]
    two = parse_strategy("auto(allreduce, ps(sync=ssp(3)))")
    assert str(two) == "auto(allreduce, ps(sync=ssp(3)))"
    assert len(two.phases) == 2
    planned = parse_strategy("auto(start=local_sgd(h=8))")
    assert str(planned) == "auto(start=local_sgd(h=8))"
    assert str(planned.phases[-1]) == "local_sgd(h=8)"


def test_a_given_start_comes_before_probed_speeds() -> None:
    spec = parse_strategy("auto(start=local_sgd(h=8))")
    policy = make_policy(spec, horizon(speeds=(1.0, 2.0, 3.0, 4.0)))  # type: ignore[arg-type]
    decision = policy.decide(History())
    assert decision is not None
    assert str(spec.phases[decision.phase]) == "local_sgd(h=8)"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("auto(ps)", "has one candidate"),
        ("auto(allreduce, switch(allreduce, ps, at=50%))", "cannot be a candidate"),
        ("auto(allreduce, ps, when=plateau)", "auto has no option 'when'"),
        ("auto(allreduce, pss)", "did you mean 'ps'"),
    ],
)
def test_mistakes_are_one_clear_line(text: str, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint) as caught:
        parse_strategy(text)
    assert "\n" not in str(caught.value)


def test_candidates_that_do_not_fit_are_left_out_and_named() -> None:
    spec = parse_strategy("auto(allreduce, ps(sync=kasync(8)), grouped(size=3))")
    decision = make_policy(spec, horizon(2)).decide(History())  # type: ignore[arg-type]
    assert decision is not None
    expected = "not possible with these workers: ps(sync=kasync(8)), grouped(size=3)"
    assert expected in decision.reason


def test_one_worker_is_single() -> None:
    spec = Auto()
    assert [str(p) for p in spec.usable(1).values()] == ["single"]
    assert spec.servers_for(1) == 0
    decision = make_policy(spec, horizon(1)).decide(History())
    assert decision is not None
    assert str(spec.phases[decision.phase]) == "single"


def test_a_switch_by_itself_is_auto_with_two_candidates() -> None:
    policy = make_switch_policy(parse_strategy("switch(allreduce, ps, when=auto)"), horizon())
    assert isinstance(policy, AutoPolicy)
    decision = policy.decide(History())
    assert decision is not None
    assert decision.phase == 0  # It begins with the first.


# ---- whole runs -------------------------------------------------------------------------------


def unequal_pool(*factors: float) -> Pool:
    return Pool(
        hosts=tuple(
            Host(host=f"m{i}", cores=4, measured={"any": StepCost(per_sample_s=0.01 * factor)})
            for i, factor in enumerate(factors)
        ),
        link=Link(mbit_s=1000, latency_ms=0.1),
        jitter=Jitter(cv=0.1),
    )


def simulate(tmp_path: Path, strategy: str, pool: Pool, seed: int = 1) -> Any:
    job = Job(
        model="mlp-128", data="digits", epochs=6, batch=64, seed=seed, checkpoint_every="never"
    )
    out = tmp_path / f"{strategy.partition('(')[0]}-{seed}"
    return run_twin(job, parse_strategy(strategy), TwinOptions(out=out, pool=pool, threads=1))


def test_a_simulated_run_with_a_straggler_is_faster_and_as_accurate(tmp_path: Path) -> None:
    pool = unequal_pool(1, 1, 1, 3)
    chosen = simulate(tmp_path, "auto", pool)
    reference = simulate(tmp_path, "allreduce", pool)
    assert chosen["seconds"] < 0.6 * reference["seconds"]
    assert chosen["test_acc"] > reference["test_acc"] - 0.02
    assert chosen["samples"] == reference["samples"]
    start = chosen["decisions"][0]
    assert (start["cause"], start["chosen"]) == ("start", "allreduce(balance=auto)")


def test_a_run_on_a_slow_link_starts_with_a_strategy_that_sends_less(tmp_path: Path) -> None:
    pool = unequal_pool(1, 1, 1, 1).model_copy(update={"link": Link(mbit_s=10, latency_ms=1.0)})
    chosen = simulate(tmp_path, "auto", pool)
    reference = simulate(tmp_path, "allreduce", pool)
    assert chosen["decisions"][0]["chosen"] != "allreduce"
    assert chosen["seconds"] < reference["seconds"]
    assert chosen["samples"] == reference["samples"]


def test_real_processes_choose_and_end_with_exact_samples(tmp_path: Path) -> None:
    job = Job(model="mlp-128", data="digits", epochs=3, batch=64, seed=1)
    result = train(job, "auto", workers=2, out=tmp_path / "run")
    assert result["status"] == "done"
    assert result["strategy"] == "auto"
    assert result["samples"] == 3 * 1297
    assert result["decisions"][0]["cause"] == "start"
    assert result["test_acc"] is not None
    assert result["test_acc"] > 0.8


def test_a_real_run_with_one_worker_is_single(tmp_path: Path) -> None:
    job = Job(model="mlp-128", data="digits", epochs=1, batch=64, seed=1)
    result = train(job, "auto", workers=1, out=tmp_path / "run")
    assert (result["status"], result["servers"]) == ("done", 0)
    alone = train(job, "single", workers=1, out=tmp_path / "single")
    assert result["test_loss"] == alone["test_loss"]


def test_a_run_recalls_what_an_earlier_one_measured(tmp_path: Path) -> None:
    job = Job(model="mlp-128", data="digits", epochs=1, batch=64, seed=1)
    earlier = train(job, "auto(allreduce, ps)", workers=2, out=tmp_path / "first")
    # A run of this length may end before its first decision: add one as a longer run has it.
    rows = [*earlier["decisions"], {"figures": {"corrections": {"ps": 0.5, "allreduce": 1.0}}}]
    done = json.dumps({**earlier, "decisions": rows})
    (tmp_path / "first" / "result.json").write_text(done)
    again = train(job, "auto(allreduce, ps)", workers=2, out=tmp_path / "again")
    assert "corrected by an earlier run for 2 candidates" in again["decisions"][0]["reason"]
    other = train(
        Job(model="mlp-128", data="digits", epochs=1, batch=32, seed=1),
        "auto(allreduce, ps)",
        workers=2,
        out=tmp_path / "other",
    )
    assert "earlier run" not in other["decisions"][0]["reason"]


def test_the_runs_of_a_comparison_do_not_recall_each_other(tmp_path: Path) -> None:
    job = Job(model="mlp-128", data="digits", epochs=1, batch=64, seed=1)
    earlier = train(job, "auto(allreduce, ps)", workers=2, out=tmp_path / "0-auto")
    rows = [*earlier["decisions"], {"figures": {"corrections": {"ps": 0.5, "allreduce": 1.0}}}]
    done = json.dumps({**earlier, "decisions": rows})
    (tmp_path / "0-auto" / "result.json").write_text(done)
    compare(job, ["auto(allreduce, ps)"], workers=2, out=tmp_path)
    result = json.loads((tmp_path / "1-auto-seed1" / "result.json").read_text())
    assert "earlier run" not in result["decisions"][0]["reason"]


def test_recalled_corrections_change_the_start() -> None:
    probe = ExchangeProbe(message_s=0.0, small_s=0.0, gradient_s=0.0, gradient_bytes=800_000)
    facts: dict[str, Any] = {"speeds": (100.0,) * 4, "exchange": probe}
    auto = parse_strategy("auto(allreduce, allreduce(codec=int8))")
    first = make_switch_policy(auto, horizon(**facts)).decide(History())
    assert first is not None
    assert first.phase == 0
    recalled = {"allreduce": 0.3}
    second = make_switch_policy(auto, horizon(**facts, recalled=recalled)).decide(History())
    assert second is not None
    assert second.phase == 1

"""Thousands of fault schedules against the protocol, in virtual time; an injected bug is found."""

from __future__ import annotations

import pytest

import fault_schedules
from fault_schedules import FaultCase, Violation, draw_case, run_case, run_cases
from paceline.protocol.clock import Push, SspClock
from paceline.protocol.ledger import Ledger
from paceline.protocol.push_pace import PushPace

CHUNKS, EACH = 10, 250


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_protocol_holds_under_schedules_of_trouble(chunk: int) -> None:
    played, survived = run_cases(range(chunk * EACH, (chunk + 1) * EACH))
    assert played == EACH
    assert survived > EACH // 10  # machines did die, and runs were resumed


def test_a_case_is_replayed_from_its_line() -> None:
    for seed in range(50):
        case = draw_case(seed)
        assert FaultCase.parse(str(case)) == case
        assert run_case(case) == run_case(case)


def test_nothing_passes_a_connection_after_a_lost_message() -> None:
    """A worker that misses one plan must not receive the next one, which would skip samples."""
    line = (
        "workers=3 samples=34 batch=3 epochs=1 clip=0 every=19 faults=lose seed=103313 "
        "strategy=allreduce"
    )
    assert run_case(FaultCase.parse(line)) == 1


def test_a_bound_that_is_overstepped_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_schedules, "STRATEGIES", ("ps(sync=ssp(2))",))
    monkeypatch.setattr(
        SspClock, "__init__", lambda self, n, bound: _init(self, n, bound + 1), raising=True
    )
    with pytest.raises(Violation, match=r"a lag of 3 under ps\(sync=ssp\(2\)\)") as raised:
        run_cases(range(300))
    line = str(raised.value).split('"')[1]
    case = FaultCase.parse(line)
    assert case.faults == ()  # no trouble is needed for it
    assert (case.workers, case.epochs, case.clip) == (2, 1, False)
    with pytest.raises(Violation):
        run_case(case)


def _init(clock: SspClock, workers: int, bound: float) -> None:
    super(SspClock, clock).__init__(workers)
    clock._bound, clock._held, clock._round = bound, [], []


def test_a_lease_that_is_handed_out_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Ledger.take

    def careless(self: Ledger, holder: int, count: int, limit: int) -> object:
        entry = usual(self, holder, count, limit)
        if entry is not None and entry.hi - entry.lo > 1:
            self.leased_up_to -= 1
        return entry

    monkeypatch.setattr(Ledger, "take", careless)
    with pytest.raises(Violation, match="trained twice"):
        run_cases(range(40))


def test_a_gradient_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = PushPace._update

    def careless(self: PushPace, pushes: list[Push]) -> object:
        return usual(self, pushes[:1] if len(pushes) > 1 else pushes)

    monkeypatch.setattr(PushPace, "_update", careless)
    with pytest.raises(Violation):
        run_cases(range(200))


def test_a_report_that_is_counted_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.protocol.coordinator import Coordinator

    monkeypatch.setattr(Coordinator, "_is_repeated", lambda self, event: False)
    with pytest.raises(Violation, match="repeat"):
        run_cases(range(400))

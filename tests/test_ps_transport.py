"""The worker side of the parameter server over an in-process transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch

from paceline.codecs.compressor import Compressor
from paceline.comm.flat_layout import FlatLayout
from paceline.protocol.messages import ApplyUpdate, GradientPushed, GradientRef, Lease, StepStats
from paceline.protocol.shard import Handle
from paceline.state import Section
from paceline.strategies.ps.messages import PushHeader
from paceline.strategies.ps.spec import ParameterServer
from paceline.strategies.ps.store import ParameterStore, PendingGradient, ShardState, Slot
from paceline.strategies.ps.transport import Connected, Pulled, WaitForExchange
from paceline.strategies.ps.worker import ParameterServerRunner
from paceline.strategies.registry import parse_strategy
from paceline.strategies.runner import CommReport, PhaseContext, Replica, TrainStep, WorkerContext
from paceline.telemetry.phase_clock import PhaseClock


class StoreTransport:
    """Reaches a store in the same process; never blocks."""

    kind: Literal["simulated"] = "simulated"
    bytes_sent = bytes_received = 0

    def __init__(self, store: ParameterStore) -> None:
        self.store = store
        self.version = 0

    def push(self, header: PushHeader, gradient: torch.Tensor) -> None:
        self.store.gradients[header.worker, header.handle] = PendingGradient(
            gradient.clone(), frozenset(header.missing), header.options
        )

    def request(self, at_least: int, *, after: Handle | None = None, exact: bool = False) -> None:
        assert self.version >= at_least

    def receive(self, out: torch.Tensor) -> Pulled:
        out.copy_(self.store.weights)
        return Pulled(self.version, 0)

    def load(self, state: ShardState) -> None:
        self.store.load(state)

    def request_slots(self, at_least: int) -> None:
        assert self.version >= at_least

    def receive_slots(self) -> list[Slot]:
        return [slot._replace(value=slot.value.clone()) for slot in self.store.slots()]

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        self.store.close()


class InlineExchanges:
    """Pushes at once, and pulls when the weights are needed."""

    def start(self, push: Callable[[], None], pull: Callable[[], None]) -> WaitForExchange:
        def wait(timeout_s: float) -> float:
            pull()
            return 0.0

        push()
        return wait

    def close(self) -> None:
        return


class ApplyAtOnce:
    """A coordinator that makes an update of every push."""

    def __init__(self, transport: StoreTransport) -> None:
        self._transport = transport

    def send(self, message: Any) -> None:
        assert isinstance(message, GradientPushed)
        self._transport.version += 1
        part = GradientRef(message.worker, message.handle, 1.0)
        order = ApplyUpdate(self._transport.version, (part,), 1.0, None)
        self._transport.store.gather_gradient(order)
        self._transport.store.step(order, 1.0)
        self._transport.store.release_gradients(order)


def make_model() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(5, 2)


def gradient_step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().sum().backward()


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_real_runner_needs_neither_processes_nor_threads(exclusive: bool, overlap: bool) -> None:
    """With overlap each gradient is computed on weights that miss the update before it."""
    threads = threading.active_count()
    model, plain = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    spec = parse_strategy(f"ps(overlap={str(overlap).lower()})")
    assert isinstance(spec, ParameterServer)
    transport = StoreTransport(ParameterStore())

    def connect(
        spec: ParameterServer,
        context: WorkerContext,
        layout: FlatLayout,
        compressors: Sequence[Compressor],
    ) -> Connected:
        return Connected(
            transports=(transport,),
            send_buffer=layout.new_buffer(),
            report=CommReport(backend="simulated", reason=""),
            exchanges=InlineExchanges() if overlap else None,
        )

    nobody: Any = None
    control: Any = ApplyAtOnce(transport)
    context = WorkerContext(
        rank=0,
        size=1,
        replica=Replica(model, optimizer, exclusive=exclusive),
        group=nobody,
        control=control,
        clock=PhaseClock(time.time()),
        token="",
        timeout_s=1.0,
        phase=PhaseContext(servers=(("nowhere", 0),)),
    )
    runner = ParameterServerRunner(spec, context, connect)
    runner.import_state(Section({f"weights/{n}": p for n, p in make_model().named_parameters()}))
    versions = [[p.detach().clone() for p in plain.parameters()]]
    for step in range(6):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        work = TrainStep(Lease(step, 0, 0, 4, 0, 4), step, 0, StepStats(4, 4, 0.0, 0))
        runner.begin_step(work)
        gradient_step(model, batch)
        runner.finish_step(work)
        if not exclusive:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(77.0)  # Another worker's weights.
        used = versions[max(0, len(versions) - 2)] if overlap else versions[-1]
        _load(plain, used)
        gradient_step(plain, batch)
        _load(plain, versions[-1])
        reference.step()
        versions.append([p.detach().clone() for p in plain.parameters()])
    runner.sync_weights(6)
    for parameter, wanted in zip(model.parameters(), versions[-1], strict=True):
        assert torch.equal(parameter, wanted)
    state = runner.export_state()
    for name, parameter in plain.named_parameters():
        wanted = reference.state[parameter]["momentum_buffer"]
        assert torch.equal(state.tensors[f"slots/{name}/momentum_buffer"], wanted)
    runner.close()
    assert threading.active_count() == threads


def _load(model: torch.nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)

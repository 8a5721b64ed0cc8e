"""Simulation of the parameter server."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.plan.cost_model import encoded_bytes
from paceline.specs.strategy import WorkerGroups
from paceline.strategies.ps.spec import ParameterServer
from paceline.twin.push_pull import PushPullRules, PushPullSimulation
from paceline.twin.simulator import Simulator
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


class ParameterServerSimulation(PushPullSimulation):
    def __init__(self, spec: ParameterServer, simulator: Simulator, groups: WorkerGroups) -> None:
        work, codec = simulator.work, spec.codec
        push_bytes = encoded_bytes(codec, work)
        rules = PushPullRules(
            push_bytes=push_bytes,
            pull_bytes=push_bytes if codec is not None and codec.suits_weights else work.bytes,
            servers=spec.servers_for(simulator.plan.workers),
            shards=spec.shards_in_estimates(work.bytes),
            overlap=spec.overlap,
            aggregates=spec.sync.aggregates,
        )
        super().__init__(simulator, rules)

    @staticmethod
    def updates(
        spec: ParameterServer, backend: GradientBackend, groups: WorkerGroups
    ) -> WeightUpdates:
        from paceline.strategies.ps.simulated import ServedReplicas
        from paceline.strategies.ps.worker import ParameterServerRunner

        return ServedReplicas(backend, partial(ParameterServerRunner, spec))

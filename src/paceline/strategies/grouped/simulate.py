"""Simulation of groups: synchronous inside a group, push/pull between groups and servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from paceline.plan.cost_model import allreduce_s
from paceline.protocol.messages import LeaseGranted
from paceline.specs.strategy import WorkerGroups
from paceline.strategies.grouped.spec import Grouped
from paceline.twin.push_pull import PendingPush, PushPullRules, PushPullSimulation
from paceline.twin.simulator import Simulator
from paceline.twin.timeline import Callback
from paceline.twin.updates import WeightUpdates

if TYPE_CHECKING:
    from paceline.twin.gradient_backend import GradientBackend


@dataclass
class GroupStep:
    """One step of a group: the leases of its members, and when each computed."""

    members: tuple[int, ...]
    leases: dict[int, tuple[LeaseGranted, float]] = field(default_factory=dict)
    """Lease of each member, and when it arrived."""
    computed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Start and end of each member's computation."""


class GroupedSimulation(PushPullSimulation):
    """The first worker of a group pulls and pushes for all of its members."""

    def __init__(self, spec: Grouped, simulator: Simulator, groups: WorkerGroups) -> None:
        nbytes = float(simulator.work.bytes)
        servers = spec.servers_for(simulator.plan.workers)
        rules = PushPullRules(push_bytes=nbytes, pull_bytes=nbytes, servers=servers)
        super().__init__(simulator, rules)
        self._group_of = {w: group for group in groups for w in group}
        self._gathering: dict[tuple[int, ...], GroupStep] = {}

    @staticmethod
    def updates(spec: Grouped, backend: GradientBackend, groups: WorkerGroups) -> WeightUpdates:
        from paceline.strategies.grouped.worker import GroupedRunner
        from paceline.strategies.ps.simulated import ServedReplicas

        return ServedReplicas(backend, partial(GroupedRunner, spec), groups)

    def on_lease(self, worker: int, granted: LeaseGranted, now: float) -> None:
        """A group starts its step when every member has its lease."""
        members = self._group_of[worker]
        step = self._gathering.setdefault(members, GroupStep(members))
        step.leases[worker] = (granted, now)
        if len(step.leases) < len(members):
            return
        del self._gathering[members]
        begins = max(at_s for _, at_s in step.leases.values())
        for member, (_, at_s) in step.leases.items():
            state = self.workers[member]
            state.add_wait(begins)
            if state.idle_since is None:
                state.wait_s += begins - at_s
        version = max(lease.version for lease, _ in step.leases.values())

        def start(at_s: float) -> None:
            for member in members:
                self._compute_member(step, member, at_s)

        self._pull_for_group(step, version, begins, start)

    def _pull_for_group(self, step: GroupStep, version: int, now: float, then: Callback) -> None:
        leader = step.members[0]

        def answer(at_s: float) -> None:
            if self.is_gone(leader):
                return
            arrive = self.answer_pull(leader, at_s) + self._broadcast_s(step.members)
            for worker in step.members[1:]:
                self.simulator.updates.pull(worker)
            for worker in step.members:
                self.workers[worker].base = self.version

            def taken(ended: float) -> None:
                for worker in step.members:
                    self.workers[worker].comm_s += ended - now
                then(ended)

            self.fleet.cores[leader].run(arrive, self.pull_own_s, taken)

        self.when_applied(version, now + self.latency[leader], answer)

    def _broadcast_s(self, members: tuple[int, ...]) -> float:
        """The leader broadcasts the weights to its group: half of an all-reduce."""
        hosts = [self.fleet.hosts[w] for w in members]
        return allreduce_s(self.simulator.pool, hosts, self.rules.pull_bytes) / 2

    def _compute_member(self, step: GroupStep, member: int, now: float) -> None:
        lease = step.leases[member][0].lease
        epoch = lease.epoch + lease.start / self.simulator.work.samples

        def computed(at_s: float) -> None:
            if self.is_gone(member):
                return  # The others of its group wait for it.
            self.workers[member].busy_s += at_s - now
            step.computed[member] = (now, at_s + self.fleet.delay(member, epoch))
            if len(step.computed) == len(step.members):
                last = max(end for _, end in step.computed.values())
                self.simulator.timeline.schedule(last, lambda t: self._sum_in_group(step, t))

        if lease.samples:
            self.fleet.compute_one(member, lease.samples, now, epoch, computed)
        else:
            computed(now)

    def _sum_in_group(self, step: GroupStep, now: float) -> None:
        """Sums the members' gradients at the leader, which pushes the sum."""
        if any(self.is_gone(member) for member in step.members):
            return
        simulator, leader = self.simulator, step.members[0]
        nbytes = simulator.work.bytes
        hosts = [self.fleet.hosts[w] for w in step.members]
        exchange_s = allreduce_s(simulator.pool, hosts, nbytes * simulator.fleet.link_slowness(now))
        summed = now + exchange_s
        push_bytes = self.rules.push_bytes
        sent = self.transfer(self.inbound, leader, summed + self.push_own_s, push_bytes)
        size = len(step.members)
        self.bytes_sent += push_bytes + nbytes * (size > 1) * size
        self.bytes_before = self.bytes_sent
        leases = [step.leases[member][0].lease for member in step.members]
        handle = self.workers[leader].handle + 1
        outcomes = simulator.updates.push_group(step.members, leases, handle)
        for member, outcome in zip(step.members, outcomes, strict=True):
            state, granted = self.workers[member], step.leases[member][0]
            began, end = step.computed[member]
            state.wait_s += now - end
            state.comm_s += sent - now if member == leader else exchange_s
            if outcome.diverged is not None:
                simulator.report_divergence(member, outcome, granted.lease, now)
            at_s = sent if member == leader else summed
            push = PendingPush(member, granted, state.base, outcome, end - began)
            self.post_push(push, at_s, gradient=member == leader)
            state.idle_since = at_s

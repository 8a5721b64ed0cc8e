"""One fault schedule of the membership: the coordinator of real runs, and what happens around it.

Workers and servers are plain objects whose weights are the samples that they contain, so at the end
the weights themselves show whether each sample was trained once.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque

from elastic_server import FakeServer, Violation
from elastic_worker import Exchange, FakeWorker, World
from paceline.protocol.coordinator import Coordinator
from paceline.protocol.exchange_probe import ExchangeProbe
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.journal import entry_from_plain, entry_to_plain, replay_journal
from paceline.protocol.messages import ExchangeFailed, Message, ServerReady, WorkerReady
from paceline.protocol.pace import Send, SendToServers
from paceline.protocol.run_spec import (
    EmitEvent,
    EndRun,
    InterruptWorker,
    ReleaseWorker,
    RunSpec,
    WriteJournal,
)
from paceline.strategies.registry import make_pace, make_switch_policy, parse_strategy

MAX_EVENTS = 100_000


class ElasticPlay:
    """A run in which every next event is chosen at random."""

    def __init__(
        self,
        strategy: str,
        *,
        workers: int,
        seed: int,
        faults: int,
        joins: int,
        leaves: int = 0,
        newcomers: int = 0,
        restarts: int = 0,
        server_faults: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        rng = self.random
        self.samples, self.batch = rng.randint(12, 40), rng.randint(workers, 8)
        self.epochs = rng.randint(1, 3)
        self.plan = RunSpec(
            strategy=parse_strategy(strategy),
            workers=workers,
            min_workers=rng.choice((1, 1, rng.randint(1, workers), workers)),
            clip=rng.choice((None, 1.0)),
            checkpoint_samples=rng.choice((None, 9)),
            journaled=restarts > 0,
        )
        self.coordinator = Coordinator(
            self.plan, now=0.0, paces=make_pace, policies=make_switch_policy
        )
        self.world = World(self.coordinator, self.samples, exchanges={0: Exchange(workers)})
        self.workers, self.zombies = self.world.workers, self.world.zombies
        for number in range(workers):
            self.workers[number] = FakeWorker(self.world, number, rank=number, size=workers)
        self.faults, self.joins = faults, joins
        self.leaves, self.newcomers = leaves, newcomers
        self.next_number = workers
        self.restarts = restarts
        """Times that the coordinator is lost, and another one continues."""
        self.journal: list[str] = []
        self.lost: list[int] = []
        self.returning: list[int] = []
        """Lost workers that are started again."""
        self.renew: tuple[int, int] | None = None
        self.server_faults = server_faults
        self.dead_servers: list[FakeServer] = []
        """Servers whose end the coordinator does not know yet."""
        self.lost_servers: list[int] = []
        self.end: EndRun | None = None
        self.now = 0.0

    # ---- the play -----------------------------------------------------------------------------

    def run(self) -> EndRun:
        for worker in self.workers.values():
            worker.say(self.ready(worker.number))
        for server in range(self.plan.servers):
            self.start_server(server)
        for _ in range(MAX_EVENTS):
            if self.end is not None:
                self.check_end()
                return self.end
            self.now += self.random.random()
            self.next_event()
            self.check()
        raise Violation("the run does not end")

    def next_event(self) -> None:
        rng = self.random
        if self.restarts and rng.random() < 0.02:
            self.restart_coordinator()
            return
        living = [w for w in self.workers.values() if w.alive]
        if self.faults and rng.random() < 0.02 and self.coordinator.live_workers > 1:
            self.faults -= 1
            self.strike(living)
            return
        if self.returning and rng.random() < 0.05:
            self.join(self.returning.pop(0))
            return
        if self.lost and self.joins and rng.random() < 0.05:
            self.joins -= 1
            self.join(self.lost.pop(rng.randrange(len(self.lost))))
            return
        room = self.batch - len(self.workers) - len(self.lost) - len(self.returning)
        if self.newcomers and room > 0 and rng.random() < 0.01:
            self.newcomers -= 1
            self.join(self.next_number)
            self.next_number += 1
            return
        if self.leaves and rng.random() < 0.02:
            leaver = rng.choice(living).number
            if self.coordinator.why_not_leave(leaver) is None:
                self.leaves -= 1
                self.carry_out(self.coordinator.retire(leaver, self.now))
                return
        if self.play_with_servers():
            return
        everybody = [*living, *self.zombies]
        choices: list[tuple[str, FakeWorker | FakeServer]]
        choices = [("hear", worker) for worker in everybody if worker.outbox]
        choices += [("act", worker) for worker in everybody if worker.can_act()]
        if not choices and self.returning:
            self.join(self.returning.pop(0))
            return
        servers = self.world.servers.values()
        choices += [("serve", s) for s in servers if s.alive and (s.orders or s.norms)]
        if not choices and self.dead_servers:
            self.report_server()
            return
        if not choices:
            if self.renew is not None:
                view, number = self.renew
                self.renew = None
                text = f"an exchange of worker {number} failed"
                self.carry_out(self.coordinator.renew(view, text, self.now))
                return
            raise Violation("everybody waits: the run is stuck")
        kind, worker = rng.choice(choices)
        if isinstance(worker, FakeServer):
            if worker.norms:
                norm = worker.norms.popleft()
                self.carry_out(self.coordinator.handle(norm, self.now, worker.view))
            else:
                worker.serve()
        elif kind == "hear":
            message, view = worker.outbox.popleft()
            if isinstance(message, ExchangeFailed):
                self.renew = (view, worker.number)
            self.hear(worker, message, view)
        else:
            worker.act()

    # ---- servers ------------------------------------------------------------------------------

    def start_server(self, number: int) -> None:
        port = len(self.world.servers) + 1
        self.world.servers[port] = FakeServer(number, port)
        self.carry_out(self.coordinator.handle(ServerReady(number, "127.0.0.1", port), self.now))

    def play_with_servers(self) -> bool:
        """Loses a server, notices a loss or starts one again; returns whether it did."""
        rng = self.random
        living = [s for s in self.world.servers.values() if s.alive]
        if self.server_faults and living and rng.random() < 0.02:
            victim = rng.choice(living)
            dead = {s.number for s in self.dead_servers}
            members = [s for s in self.coordinator.view.servers if s not in dead]
            is_member = victim.number not in self.coordinator.servers.lost
            if not is_member or self.coordinator.servers.can_spare(victim.number, members):
                self.server_faults -= 1
                victim.alive, victim.silent = False, rng.random() < 0.3
                self.dead_servers.append(victim)
                return True
        if self.dead_servers and rng.random() < 0.1:
            self.report_server()
            return True
        if self.lost_servers and rng.random() < 0.05:
            self.start_server(self.lost_servers.pop(rng.randrange(len(self.lost_servers))))
            return True
        return False

    def report_server(self) -> None:
        server = self.dead_servers.pop(self.random.randrange(len(self.dead_servers)))
        if not self.coordinator.can_lose_server(server.number):
            raise Violation(f"server {server.number} cannot be lost")
        self.lost_servers.append(server.number)
        self.carry_out(self.coordinator.lose_server(server.number, "lost", self.now))

    def ready(self, number: int) -> WorkerReady:
        probe = ExchangeProbe(0.001, 0.001, 0.01, 1000)
        facts = (number, self.samples, self.batch, self.epochs, ("val",))
        return WorkerReady(*facts, speed=100.0 + number, cv=0.1, exchange=probe)

    def hear(self, worker: FakeWorker, message: Message, view: int) -> None:
        """Lets the coordinator handle a message, which has no effect from outside the view."""
        history, before = self.coordinator.history, self.coordinator.view.number
        counted = (history.samples, history.updates, len(history.rows))
        actions = self.coordinator.handle(message, self.now, view)
        is_foreign = worker in self.zombies or view != before
        if is_foreign and not isinstance(message, WorkerReady):
            now = (history.samples, history.updates, len(history.rows))
            if actions or now != counted:
                name = type(message).__name__
                raise Violation(f"{name} of view {view} has an effect in view {before}")
        self.carry_out(actions)

    def strike(self, living: list[FakeWorker]) -> None:
        """Kills a worker or cuts it off, or several at the same time: a partition."""
        rng = self.random
        count = 1 if rng.random() < 0.6 else rng.randint(2, max(2, len(living) - 1))
        is_cut = rng.random() < 0.3
        for victim in rng.sample(living, min(count, len(living))):
            returns = rng.random() < 0.5
            if self.end is None and self.coordinator.can_lose(victim.number, returns=returns):
                self.lose(victim, is_cut, returns=returns)

    def lose(self, victim: FakeWorker, is_cut: bool, *, returns: bool) -> None:
        """Kills a worker, or cuts it off: then it continues in its old view."""
        if is_cut:
            self.zombies.append(victim)
            # A worker is named in its first message: that of a lost one comes from nobody.
            victim.outbox = deque(m for m in victim.outbox if not isinstance(m[0], WorkerReady))
        else:
            # What it has sent may still arrive, or not.
            victim.alive = False
            while victim.outbox and self.random.random() < 0.7:
                message, view = victim.outbox.popleft()
                self.carry_out(self.coordinator.handle(message, self.now, view))
                if self.end is not None:
                    return
        if victim.number not in self.workers:
            return  # It has left with its last message.
        if not self.coordinator.can_lose(victim.number, returns=returns):
            victim.alive = True  # All others have left: its loss would end the run.
            return
        del self.workers[victim.number]
        (self.returning if returns else self.lost).append(victim.number)
        self.carry_out(self.coordinator.lose(victim.number, "lost", self.now, returns=returns))

    @property
    def memory(self) -> CoordinatorMemory | None:
        """Contents of the journal."""
        return replay_journal(entry_from_plain(json.loads(line)) for line in self.journal)

    def restart_coordinator(self) -> None:
        """Loses the coordinator; another one takes over the workers that are left."""
        memory = self.memory
        if memory is None or self.end is not None:
            return  # The workers do not wait for another one yet, or any more.
        self.restarts -= 1
        rng = self.random
        for _ in range(rng.randint(0, 20)):
            able = [w for w in self.workers.values() if w.alive and w.can_act()]
            if able:
                rng.choice(able).act()
        self.coordinator = self.world.coordinator = Coordinator(
            self.plan, now=self.now, paces=make_pace, policies=make_switch_policy, memory=memory
        )
        coordinator, members = self.coordinator, memory["position"].members
        self.renew = None
        for worker in list(self.workers.values()):
            worker.lose_coordinator()
            if worker.number not in members or not worker.alive:
                del self.workers[worker.number]
                self.lost.append(worker.number)
        self.lost += self.returning  # They end with the supervisor that started them.
        self.returning = []
        for number in members:
            if number not in self.workers and self.coordinator.can_lose(number, returns=True):
                if number in self.lost:  # Else it has left.
                    self.lost.remove(number)
                self.returning.append(number)
                self.carry_out(self.coordinator.lose(number, "lost", self.now, returns=True))
                if self.coordinator is not coordinator:
                    return  # It was lost, too.
        for worker in self.workers.values():
            worker.say(self.ready(worker.number))
        self.return_servers(memory["position"].servers)

    def return_servers(self, members: tuple[int, ...]) -> None:
        """Reports all servers to another coordinator, which does not wait for those that died."""
        alive = {s.number: s for s in self.world.servers.values() if s.alive}
        self.dead_servers.clear()
        self.lost_servers = [s for s in range(self.plan.servers) if s not in alive]
        for server in members:
            if server not in alive:
                if not self.coordinator.can_lose_server(server):
                    raise Violation(f"server {server} cannot be lost")
                self.carry_out(self.coordinator.lose_server(server, "lost", self.now))
        for server in alive.values():
            server.norms.clear()
            server.forget_pushes()
            ready = ServerReady(server.number, "127.0.0.1", server.port, server.shard.version)
            self.carry_out(self.coordinator.handle(ready, self.now))
            if server.last_norm is not None:
                self.carry_out(self.coordinator.handle(server.last_norm, self.now, server.view))

    def join(self, number: int) -> None:
        worker = self.workers[number] = FakeWorker(self.world, number, view=-1, holds_state=False)
        self.coordinator.members.add(number, self.now)
        worker.say(self.ready(number))

    def carry_out(self, actions: list[object]) -> None:
        # A coordinator may be lost in the middle, unless its workers end with these actions.
        is_last = self.restarts > 0 and self.random.random() < 0.01 and self.memory is not None
        is_last &= not any(isinstance(action, EndRun) for action in actions)
        count = self.random.randint(0, len(actions)) if is_last else len(actions)
        for action in actions[:count]:
            if isinstance(action, WriteJournal):
                self.journal.append(json.dumps(entry_to_plain(action.entry)))
            elif isinstance(action, Send):
                if action.worker in self.workers:
                    self.workers[action.worker].inbox.append(action.message)
            elif isinstance(action, SendToServers):
                for server in self.world.servers.values():
                    if server.alive and server.number in action.holders:
                        server.orders.append(action.message)
            elif isinstance(action, InterruptWorker):
                worker = self.workers.get(action.worker)
                if worker is not None:
                    worker.ended_view = action.view
            elif isinstance(action, ReleaseWorker):
                if self.workers.pop(action.worker).plan:
                    raise Violation(f"worker {action.worker} left before its work was done")
            elif isinstance(action, EndRun):
                self.end = action
            else:
                assert isinstance(action, EmitEvent)
        if is_last:
            self.restart_coordinator()

    # ---- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        history = self.coordinator.history
        if history.samples > self.samples * self.epochs:
            raise Violation(f"{history.samples} samples are counted")
        twice = [
            s for server in self.world.servers.values() for s, n in server.weights.items() if n > 1
        ]
        twice += [s for w in self.workers.values() for s, n in w.weights.items() if n > 1]
        if twice:
            raise Violation(f"sample {twice[0]} was trained twice")
        for worker in self.workers.values():
            if worker.has_runner and not worker.has_servers():
                self.check_whole_updates(worker)

    def check_whole_updates(self, worker: FakeWorker) -> None:
        """Under a synchronous strategy the weights contain batches in order, and nothing else."""
        if not worker.weights:
            return
        epoch = max(e for e, _ in worker.weights)
        last = [p for e, p in worker.weights if e == epoch]
        if len(worker.weights) != epoch * self.samples + len(last) or len(last) != max(last) + 1:
            raise Violation(f"worker {worker.number} holds a part of an update")
        if len(last) % self.batch and len(last) != self.samples:
            raise Violation(f"worker {worker.number} holds a part of a batch")

    def check_end(self) -> None:
        assert self.end is not None
        if "no other worker holds" in (self.end.error or ""):
            if any(w.holds_state for w in self.world.members()):
                raise Violation(
                    f"the run ended although a worker holds its state: {self.end.error}"
                )
            return
        if self.end.status != "done":
            raise Violation(f"the run ended {self.end.status}: {self.end.error}")
        expected = Counter((e, p) for e in range(self.epochs) for p in range(self.samples))
        servers = self.coordinator.servers
        known = {*self.coordinator.view.servers, *servers.joining} - servers.lost.keys()
        if missing := {s.number for s in self.world.servers.values() if s.alive} - known:
            raise Violation(f"servers {missing} were forgotten")
        if self.coordinator.history.samples != expected.total():
            raise Violation(f"{self.coordinator.history.samples} samples are counted")
        for worker in self.world.members():
            if worker.weights != expected:
                lacking = expected - worker.weights
                raise Violation(f"worker {worker.number} ends without {len(lacking)} samples")

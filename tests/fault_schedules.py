"""Fault injection for the protocol: seeded delays, duplicates, losses and crashes.

    python tests/fault_schedules.py --count 20000 --seed 7      run many; shrinks a failing one
    python tests/fault_schedules.py "strategy=ps workers=3 ..." replay one

A message may be delayed, duplicated or lost (then its connection is broken and the run fails);
machines crash. An elastic run continues without them, and they may return; any other failed run is
resumed from its last checkpoint, on the machines available then.
The invariants are checked at every event; at the end every sample of every epoch must have been
trained exactly once in the final history.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fault_invariants import ElasticAudit, InvariantChecker, SampleAudit, Violation
from paceline.cluster.pool import DownPeriod, Host, Jitter, Pool
from paceline.errors import SpecError
from paceline.plan.cost_model import Workload
from paceline.protocol.history import CoordinatorMemory
from paceline.protocol.messages import Message
from paceline.protocol.run_spec import RunSpec
from paceline.protocol.switch_policy import RunHorizon
from paceline.specs.schedule import Constant
from paceline.specs.strategy import Strategy
from paceline.strategies.registry import make_switch_policy, parse_strategy
from paceline.twin.simulator import Simulator
from paceline.twin.strategy_simulation import StrategySimulation
from paceline.twin.timeline import Callback

FAULTS = ("delay", "repeat", "lose", "die")
MAX_FAILURES = 6
"""After this many failures, no more faults are injected, so that the run can end."""

STRATEGIES = (
    "single",
    "allreduce",
    "allreduce(balance=auto)",
    "ps",
    "ps(sync=bsp)",
    "ps(sync=ssp(0))",
    "ps(sync=ssp(2))",
    "ps(sync=dssp(1, 4))",
    "ps(sync=kasync(2))",
    "ps(sync=gba, servers=2)",
    "ps(overlap=true)",
    "ps(sync=gba, overlap=true)",
    "grouped(size=2)",
    "local_sgd(h=3)",
    "diloco(h=4)",
    "switch(allreduce, ps, at=50%)",
    "switch(ps, allreduce, at=samples(13))",
    "switch(allreduce, ps(sync=bsp, servers=2), single, ps, at=(10%, 40%, 90%))",
    "switch(ps(sync=ssp(1)), grouped(size=2), ps(sync=dssp), at=(30%, 60%))",
    "switch(allreduce, ps, when=auto)",
    "switch(allreduce, ps, when=straggler(greedy, windows=1))",
    "switch(allreduce, ps, when=straggler(elastic, windows=1))",
)


@dataclass(frozen=True)
class FaultCase:
    """One fault schedule, which can be replayed from its text form."""

    strategy: str
    workers: int
    samples: int
    batch: int
    epochs: int
    clip: bool
    every: int
    """Samples between checkpoints; 0 disables them."""
    faults: tuple[str, ...]
    seed: int
    elastic: bool = False
    """The run continues with one worker, and lost workers return."""

    def __str__(self) -> str:
        faults = ",".join(self.faults) or "none"
        return (
            f"workers={self.workers} samples={self.samples} batch={self.batch} "
            f"epochs={self.epochs} clip={int(self.clip)} every={self.every} faults={faults} "
            f"seed={self.seed} elastic={int(self.elastic)} strategy={self.strategy}"
        )

    @classmethod
    def parse(cls, line: str) -> FaultCase:
        head, _, strategy = line.partition("strategy=")
        values = dict(part.split("=", 1) for part in head.split())
        faults = () if values["faults"] == "none" else tuple(values["faults"].split(","))
        numbers = {k: int(values[k]) for k in ("workers", "samples", "batch", "epochs", "seed")}
        return cls(
            strategy=strategy.strip(),
            clip=values["clip"] == "1",
            elastic=values.get("elastic") == "1",
            every=int(values["every"]),
            faults=faults,
            **numbers,
        )

    @property
    def spec(self) -> Strategy:
        return parse_strategy(self.strategy)

    @property
    def is_valid(self) -> bool:
        """True if a run with these sizes is valid."""
        try:
            self.spec.check_workers(self.workers)
            make_switch_policy(
                self.spec,
                RunHorizon(
                    workers=self.workers,
                    samples_per_epoch=self.samples,
                    epochs=self.epochs,
                    batch=self.batch,
                    schedule=Constant(),
                ),
            )
        except SpecError:
            return False
        return self.batch >= self.workers and self.spec.servers_for(self.workers) <= self.workers


class FaultySimulator(Simulator):
    """Delays, repeats or loses messages; each connection keeps its order."""

    LATE, TWICE, LOST = 0.3, 0.1, 0.004

    def __init__(
        self, *args: Any, rng: random.Random, faults: Sequence[str], **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._rng, self._faults = rng, faults
        self._last: dict[object, float] = {}
        self.failures.expected |= "lose" in faults

    def send(
        self, worker: int, message: Message, at_s: float, by: StrategySimulation | None = None
    ) -> None:
        number, view = self.members[worker], self.view
        if number in self.failures.died_at or self._loses(number):
            return

        def arrive(now: float) -> None:
            if self.is_sent(number, at_s, by):
                self.handle(message, now, view)

        arrives = at_s + self.fleet.latency[worker]
        self._deliver(("up", number), arrives, arrive)
        if "repeat" in self._faults and self._rng.random() < self.TWICE:
            self._deliver(("up", number), arrives + self._rng.expovariate(2.0), arrive)

    def send_push(
        self,
        worker: int,
        message: Message,
        at_s: float,
        gradient: Callback,
        by: StrategySimulation | None = None,
    ) -> None:
        number = self.members[worker]

        def arrive(now: float) -> None:
            if self.is_sent(number, at_s, by):
                gradient(now)

        if number not in self.failures.died_at:
            self._deliver(("push", number), at_s + self.fleet.latency[worker], arrive)
            self.send(worker, message, at_s, by)

    def receive(self, number: int, message: Message, now: float) -> None:
        if number in self.failures.died_at or self._loses(number):
            return
        start, deliver = self.failures.starts_of(number), super().receive

        def arrive(at_s: float) -> None:
            if self.failures.starts_of(number) == start:
                deliver(number, message, at_s)

        self._deliver(("down", number), now, arrive)

    def order(self, message: Message, now: float) -> None:
        obey = partial(self.views.serving.on_order, message)
        self._deliver("order", now, obey)
        if "repeat" in self._faults and self._rng.random() < self.TWICE:
            self._deliver("order", now + self._rng.expovariate(2.0), obey)

    def _loses(self, number: int) -> bool:
        """A lost message means a broken connection: nothing passes it afterwards."""
        if "lose" not in self._faults or self._rng.random() >= self.LOST:
            return False
        self.failures.end_worker(number, f"worker {number} was lost", self.timeline.now)
        return True

    def _deliver(self, connection: object, at_s: float, callback: Callback) -> None:
        if "delay" in self._faults and self._rng.random() < self.LATE:
            at_s += self._rng.expovariate(3.0)
        # Bytes of one connection do not overtake each other.
        at_s = max(at_s, self._last.get(connection, 0.0))
        self._last[connection] = at_s
        self.timeline.schedule(at_s, callback)


def draw_case(seed: int) -> FaultCase:
    """Generates the case of a seed: sizes, strategy and kinds of faults."""
    rng = random.Random(seed)
    while True:
        case = FaultCase(
            strategy=rng.choice(STRATEGIES),
            workers=rng.randint(1, 5),
            samples=rng.randint(8, 60),
            batch=rng.randint(3, 16),
            epochs=rng.randint(1, 3),
            clip=rng.random() < 0.25,
            every=rng.choice((0, 7, 19)),
            faults=tuple(f for f in FAULTS if rng.random() < 0.5),
            seed=seed,
            elastic=rng.random() < 0.5,
        )
        if case.is_valid:
            return case


def run_case(case: FaultCase) -> int:
    """Runs a case to its end, resuming after failures; returns the number of failures."""
    rng = random.Random(case.seed + 1)
    seen: Counter[tuple[int, int]] = Counter()
    memory: CoordinatorMemory | None = None
    workers = case.workers
    for failures in range(MAX_FAILURES + 1):
        faults = case.faults if failures < MAX_FAILURES else ()
        audit, status, error = run_until_failure(case, workers, faults, rng, seen.copy(), memory)
        if status == "done":
            check_complete(case, audit.seen)
            return failures
        if status != "failed" or not ("died" in error or "lost" in error):
            raise Violation(f"the run ended {status}: {error}")
        if audit.saved is not None:
            memory, seen = audit.saved
            if memory["history"]["epoch"] >= case.epochs:
                # It failed after its last checkpoint: there is nothing left to resume.
                check_complete(case, seen)
                return failures + 1
        # The number of machines changes between two attempts.
        scales = case.spec.worker_count(2) > 1
        wanted = rng.randint(1, case.workers) if scales else 1
        if dataclasses.replace(case, workers=wanted).is_valid:
            workers = wanted
    raise Violation("the run did not finish without faults")


def check_complete(case: FaultCase, seen: Counter[tuple[int, int]]) -> None:
    expected = Counter((e, p) for e in range(case.epochs) for p in range(case.samples))
    if seen != expected:
        raise Violation(f"not every sample was trained: {expected - seen}")


def run_until_failure(
    case: FaultCase,
    workers: int,
    faults: Sequence[str],
    rng: random.Random,
    seen: Counter[tuple[int, int]],
    memory: CoordinatorMemory | None,
) -> tuple[SampleAudit, str, str]:
    spec = case.spec
    work = Workload(
        model="case",
        data="case",
        shapes=((10, 10),),
        item_bytes=4,
        flops_per_sample=1e9,
        samples=case.samples,
        batch=case.batch,
        epochs=case.epochs,
        evaluated={},
        slots=0,
    )
    hosts = []
    for index in range(workers):
        dies = "die" in faults and rng.random() < 0.15
        hosts.append(
            Host(
                host=f"m{index}",
                cores=2,
                speed=rng.choice((0.3, 1.0, 1.0, 2.0)),
                down=(draw_failure(rng, case.elastic),) if dies else (),
                startup_s=rng.expovariate(1.0),
            )
        )
    pool = Pool(hosts=tuple(hosts), jitter=Jitter(cv=0.5))
    audit = ElasticAudit(seen) if case.elastic else SampleAudit(seen)
    plan = RunSpec(
        strategy=spec,
        workers=workers,
        clip=1.0 if case.clip else None,
        checkpoint_samples=case.every or None,
        min_workers=1 if case.elastic else 0,
    )
    seed = rng.randrange(2**31)
    simulator = FaultySimulator(
        *(plan, pool, work, audit),
        seed=seed,
        memory=copy.deepcopy(memory),
        rng=rng,
        faults=faults,
        restarts=3,
    )
    InvariantChecker(simulator, spec)
    end = simulator.run()
    return audit, end.status, end.error or ""


def draw_failure(rng: random.Random, returns: bool) -> DownPeriod:
    """Returns when a machine fails; if it returns, up to 30 seconds later."""
    from_s = rng.expovariate(0.5)
    to_s = from_s + rng.uniform(0.1, 30.0) if returns and rng.random() < 0.7 else math.inf
    return DownPeriod(from_s=from_s, to_s=to_s)


# ---- shrinking --------------------------------------------------------------------------------


def fails(case: FaultCase) -> str | None:
    """Returns the violation of a case, if any."""
    return try_case(case)[1]


def try_case(case: FaultCase) -> tuple[int, str | None]:
    """Returns the number of failures that the case survived, and the violation, if any."""
    try:
        return run_case(case), None
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"


def simpler_cases(case: FaultCase) -> Iterator[FaultCase]:
    """Yields simpler cases, the simplest first."""
    for fault in case.faults:
        yield dataclasses.replace(case, faults=tuple(f for f in case.faults if f != fault))
    if case.clip:
        yield dataclasses.replace(case, clip=False)
    if case.every:
        yield dataclasses.replace(case, every=0)
    if case.elastic:
        yield dataclasses.replace(case, elastic=False)
    for name, minimum in (("epochs", 1), ("workers", 1), ("samples", 1), ("batch", 1)):
        now = getattr(case, name)
        for value in sorted({minimum, (minimum + now) // 2, now - 1}):
            if minimum <= value < now:
                yield dataclasses.replace(case, **{name: value})
    phases = case.spec.phases
    if len(phases) > 1:
        for phase in phases:
            yield dataclasses.replace(case, strategy=str(phase))


def shrink(case: FaultCase) -> tuple[FaultCase, str]:
    """Returns the smallest case that still fails, and its violation."""
    why = fails(case)
    assert why is not None
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in simpler_cases(case):
            if not candidate.is_valid:
                continue
            # Another seed may still fail after the reduction.
            for seed in range(case.seed, case.seed + 8):
                tried = dataclasses.replace(candidate, seed=seed)
                found = fails(tried)
                if found is not None:
                    case, why, shrunk = tried, found, True
                    break
            if shrunk:
                break
    return case, why


def run_cases(seeds: range) -> tuple[int, int]:
    """Runs the cases of these seeds; returns their number and the failures they survived.

    Raises Violation with the command that replays the smallest failing case.
    """
    survived = 0
    for seed in seeds:
        case = draw_case(seed)
        failures, why = try_case(case)
        if why is not None:
            smallest, violation = shrink(case)
            raise Violation(f'{violation}\nreplay: python tests/fault_schedules.py "{smallest}"')
        survived += failures
    return len(seeds), survived


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/fault_schedules.py")
    parser.add_argument("line", nargs="?", help="a case to replay")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.line:
        try:
            case = FaultCase.parse(args.line)
        except (KeyError, ValueError):
            parser.error(f"{args.line!r} is not a case; copy the whole line that was printed")
        failures = run_case(case)
        print(f"passed, after {failures} failures")
        return
    try:
        count, survived = run_cases(range(args.seed, args.seed + args.count))
    except Violation as violation:
        print(violation, file=sys.stderr)
        sys.exit(1)
    print(f"{count} schedules passed; {survived} failures were survived by resuming")


if __name__ == "__main__":
    main()

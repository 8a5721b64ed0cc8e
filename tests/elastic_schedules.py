"""Fault schedules of the membership: workers are lost, return with an old view, join and leave.

python tests/elastic_schedules.py --count 20000 --seed 7      run many
python tests/elastic_schedules.py --only 4711                 replay one
"""

from __future__ import annotations

import argparse
import random
import sys

from elastic_play import ElasticPlay
from elastic_server import Violation

STRATEGIES = (
    "allreduce",
    "allreduce(balance=auto)",
    "local_sgd(h=3)",
    "diloco(h=4)",
    "ps",
    "ps(sync=bsp)",
    "ps(sync=ssp(0))",
    "ps(sync=ssp(2))",
    "ps(sync=dssp(1, 4))",
    "ps(sync=kasync(2))",
    "ps(sync=gba)",
    "ps(servers=2, copies=3)",
    "ps(sync=bsp, servers=2)",
    "ps(sync=gba, copies=3)",
    "switch(allreduce, ps, at=50%)",
    "switch(ps, allreduce, at=30%)",
    "switch(local_sgd(h=3), ps(sync=bsp), allreduce, at=(30%, 60%))",
    "switch(allreduce, ps, when=straggler(greedy, windows=1))",
    "auto",
)


def run_schedule(seed: int) -> int:
    """Runs the schedule of a seed; returns the number of views."""
    rng = random.Random(seed)
    play = ElasticPlay(
        rng.choice(STRATEGIES),
        workers=rng.randint(2, 5),
        seed=seed,
        faults=rng.randint(0, 6),
        joins=rng.randint(0, 4),
        leaves=rng.choice((0, 0, 1, 3)),
        newcomers=rng.choice((0, 0, 1, 3)),
        restarts=rng.choice((0, 0, 1, 3)),
        server_faults=rng.randint(0, 4),
    )
    play.run()
    return play.coordinator.view.number


def run_schedules(seeds: range) -> int:
    """Runs many; returns the number of views. Raises Violation with the first bad seed."""
    views = 0
    for seed in seeds:
        try:
            views += run_schedule(seed)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Violation(
                f"{why}\nreplay: python tests/elastic_schedules.py --only {seed}"
            ) from error
    return views


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/elastic_schedules.py")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    if args.only is not None:
        print(f"passed, with {run_schedule(args.only)} changes of the view")
        return
    try:
        views = run_schedules(range(args.seed, args.seed + args.count))
    except Violation as violation:
        print(violation, file=sys.stderr)
        sys.exit(1)
    print(f"{args.count} schedules passed, with {views} changes of the view")


if __name__ == "__main__":
    main()

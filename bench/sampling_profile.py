"""Profiles the processes of a run by sampling them from outside with py-spy.

python bench/sampling_profile.py PY_SPY WORKLOAD STRATEGY [--workers 2] [--save]

PY_SPY is the program, from a separate environment. Every sample of a running (not sleeping) thread
counts for the deepest function of Paceline on its stack, and for the role of its process: worker,
server or coordinator. Fractions refer to all samples during training; the time in which servers and
the coordinator wait for messages is excluded, that of a worker is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import paceline
from results_store import keep
from workloads import WORKLOADS, Workload

HERE = Path(__file__).parent
RATE, SHOWN = 250, 12
TIMES_LONGER = {"mlp-300-100": 5, "resnet20": 4, "mlp-wide": 4}
"""Than in the bench: starting up should not fill the picture."""


def train(name: str, strategy: str, workers: int) -> None:
    found = WORKLOADS[name]
    steps = found.steps * TIMES_LONGER[name]
    longer = Workload(found.name, found.shape, found.batch_per_worker, steps)
    with tempfile.TemporaryDirectory() as folder:
        paceline.train(longer.job(workers), strategy, workers, out=f"{folder}/run", threads=1)


WAITING = ("Channel.receive_head", "socket.accept", "Condition.wait", "EpollSelector.select")
"""py-spy takes a thread that waits in these for a running one."""


def role_of(frames: list[str]) -> str | None:
    """Returns the role; None outside training: startup, reading data, waiting for commands."""
    if any("worker/training_loop.py" in frame for frame in frames):
        return "worker"
    if any("strategies/ps/server.py" in frame for frame in frames):
        return None if any("warm_up" in frame for frame in frames) else "server"
    if any("launch/supervisor.py" in f or "launch/hub.py" in f for f in frames):
        return "coordinator"
    return None


def read(raw: Path) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for line in raw.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = stack.split(";")
        role = role_of(frames)
        if role is None or (role != "worker" and frames[-1].startswith(WAITING)):
            continue
        ours = [frame for frame in frames if "paceline/" in frame]
        name = ours[-1].rsplit(":", 1)[0].replace("paceline/", "")
        found.setdefault(role, Counter())[name] += int(count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spy")
    parser.add_argument("workload", choices=tuple(TIMES_LONGER))
    parser.add_argument("strategy")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        train(given.workload, given.strategy, given.workers)
        return
    inner = [given.spy, given.workload, given.strategy, "--workers", str(given.workers), "--inside"]
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        record = [given.spy, "record", "--subprocesses", "--rate", str(RATE), "--format", "raw"]
        command = [*record, "--output", str(raw), "--", sys.executable, __file__, *inner]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
        found = read(raw)
    total = sum(sum(counts.values()) for counts in found.values())
    body: dict[str, dict[str, float]] = {}
    for role, counts in found.items():
        print(f"{role}: {100 * sum(counts.values()) / total:.1f} % of the samples")
        body[role] = {name: count / total for name, count in counts.most_common(SHOWN)}
        for name, share in body[role].items():
            print(f"  {100 * share:5.1f} %  {name}")
    if given.save:
        word = "".join(c if c.isalnum() else "-" for c in given.strategy).strip("-")
        keep(f"profile-{given.workload}-{word}", {"shares": body})


if __name__ == "__main__":
    main()

"""Kills, stops and cuts off processes of real runs at random moments, and checks what remains.

    python bench/faults.py --count 200 --seed 1 --out bench/results/faults.jsonl
    python bench/faults.py --out bench/results/faults.jsonl --show-only

Each case is drawn from the seed and its number: strategy, workers, place (this machine, or network
namespaces over SSH), fault (kill, stop for a while, cut all connections), target (worker, server,
coordinator) and moment, from the start of the run to after its usual end. A run that fails is
finished with `paceline resume`. Cases in the file are skipped, so the loop can be interrupted.

Checked after each case: no hang, no process left, nothing left in /dev/shm, each sample counted
once, and a test accuracy within the range of undisturbed runs of the strategy. Requires root, and
for namespaces what the tests on several machines need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network_namespaces import Lab, Machine, make_lab, why_not

STRATEGIES = (
    "allreduce(via=shared)", "allreduce(via=network)", "allreduce(shares=4)", "ps",
    "ps(via=network)", "ps(servers=2)", "ps(sync=bsp)", "ps(sync=ssp(2))", "local_sgd(h=4)",
    "switch(allreduce, ps, at=50%)",
)  # fmt: skip
KINDS = ("kill", "stop", "cut")
TARGETS = ("worker", "server", "coordinator")
EPOCHS, ROWS = 12, 1297
JOB = ("--model", "mlp-128", "--data", "digits", "--epochs", EPOCHS)
BASELINES = 3
ATTEMPTS = 3
"""Attempts at an undisturbed run, which other programs may disturb."""
SPREAD = 0.03
"""Accuracy below the lowest undisturbed run that is accepted: 9 of 300 images."""
DEADLINE_S = 900.0
"""Generous, because other programs may use the machine."""
LEAVE_S = 15.0
RESUMES = 3
POLL_S = 0.02
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Case:
    """One fault: what, whom, and when, as a fraction of the usual duration."""

    index: int
    strategy: str
    workers: int
    place: str
    kind: str
    target: str
    number: int
    moment: float
    pause_s: float
    elastic: bool
    """The run may continue with one worker (`--min-workers 1`)."""

    @classmethod
    def draw(cls, seed: int, index: int, places: tuple[str, ...]) -> Case:
        rng = random.Random(f"{seed}/{index}")
        strategy, workers = rng.choice(STRATEGIES), rng.choice((2, 3))
        targets = TARGETS if "ps" in strategy else ("worker", "coordinator")
        target = rng.choice(targets)
        return cls(
            index=index,
            strategy=strategy,
            workers=workers,
            place=rng.choice(places),
            kind=rng.choice(KINDS),
            target=target,
            number=rng.randrange(workers) if target == "worker" else 0,
            moment=round(rng.uniform(0.02, 1.05), 4),
            pause_s=round(rng.uniform(1.0, 5.0), 2),
            elastic=rng.random() < 0.5,
        )


@dataclass
class Outcome:
    """The outcome of a case; one line of the file."""

    result: str = "failed"
    """survived, resumed, failed, or hang."""
    hit: bool = False
    """False if the run had ended before the fault."""
    seconds: float = 0.0
    resumes: int = 0
    orphans: list[str] = field(default_factory=list)
    shm: list[str] = field(default_factory=list)
    views: int = 0
    """Changes of the members of the run."""
    adopted: bool = False
    """Another coordinator has continued with the workers of the lost one."""
    samples: int | None = None
    accuracy: float | None = None
    error: str = ""
    at: str = ""
    """The last event of the run before the fault."""

    @property
    def is_exact(self) -> bool:
        return self.samples == EPOCHS * ROWS


class Run:
    """One run as a process, with every process below it."""

    def __init__(
        self,
        arguments: list[object],
        env: dict[str, str],
        log: Path,
        family: dict[int, psutil.Process] | None = None,
    ) -> None:
        """`family`: processes of the run before, which this one may continue with."""
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli.main", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        self.family = {} if family is None else family

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.popen.pid).children(recursive=True):
                self.family.setdefault(process.pid, process)

    def wait(self, deadline_s: float) -> int | None:
        """Waits for the end; None, and everything killed, after the deadline."""
        deadline = time.monotonic() + deadline_s
        while (code := self.popen.poll()) is None:
            self.look()
            if time.monotonic() > deadline:
                os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait()
                return None
            time.sleep(POLL_S)
        return code

    def orphans(self, others: Callable[[], list[str]]) -> list[str]:
        """Returns the processes that are left some seconds after the end, and kills them."""
        deadline = time.monotonic() + LEAVE_S
        while True:
            left = [p for p in self.family.values() if is_alive(p)]
            elsewhere = others()
            if (not left and not elsewhere) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        found = [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in left] + elsewhere
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_pid(out: Path, case: Case, run: Run) -> int | None:
    """Returns the process of the target; None until it has started."""
    if case.target == "coordinator":
        return run.popen.pid
    path = out / "events" / f"{case.target}-{case.number}.jsonl"
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["kind"] == case.target:
                return int(event["pid"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def cut_connections(pid: int) -> None:
    """Resets all TCP connections of a process."""
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.raddr and connection.status == psutil.CONN_ESTABLISHED:
            words = f"sport = :{connection.laddr.port} and dport = :{connection.raddr.port}"
            subprocess.run(["ss", "-K", *words.split()], capture_output=True, timeout=10)


def inject(case: Case, pid: int, machine: Machine | None) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if case.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif case.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(case.pause_s)
            os.kill(pid, signal.SIGCONT)
        elif machine is None:
            cut_connections(pid)
        else:
            machine.cut_off()
            time.sleep(case.pause_s)
            machine.cut_off(cut=False)


def last_event(out: Path) -> str:
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
        lines = (out / "events" / "run.jsonl").read_text(encoding="utf-8").splitlines()
        return str(json.loads(lines[-1])["kind"])
    return "startup"


def try_case(case: Case, lab: Lab | None, usual_s: float, folder: Path, seed: int) -> Outcome:
    out, log, outcome = folder / "run", folder / "log", Outcome()
    env, options = make_environment(lab), list[object]()
    machine: Machine | None = None
    if lab is None:
        options += ["--workers", case.workers]
    else:
        pool = lab.write_pool(folder / "pool.yaml", all={"python": sys.executable})
        options += ["--pool", pool, "--project", folder]
        machine = lab.machines[case.number % len(lab.machines)]
    shm = set(os.listdir(SHM))
    command = ["train", *JOB, "--strategy", case.strategy, "--seed", seed, "--timeout", 30]
    if case.elastic:
        command += ["--min-workers", 1]
    run = Run([*command, *options, "--quiet", "--out", out], env, log)
    began = time.monotonic()
    while time.monotonic() - began < case.moment * usual_s and run.popen.poll() is None:
        run.look()
        time.sleep(POLL_S)
    while run.popen.poll() is None and (pid := find_pid(out, case, run)) is None:
        time.sleep(POLL_S)
    if run.popen.poll() is None and pid is not None:
        run.look()
        outcome.at, outcome.hit = last_event(out), True
        inject(case, pid, machine)
    code = run.wait(DEADLINE_S)
    while code not in (0, None) and outcome.resumes < RESUMES:
        outcome.error = outcome.error or read_last_line(log)
        outcome.resumes += 1
        again = ["resume", out, "--quiet"] if (out / "run.json").exists() else [
            *command, *options, "--quiet", "--out", out
        ]  # fmt: skip
        run = Run(again, env, log, run.family)
        code = run.wait(DEADLINE_S)
    # Only now: the workers of a lost coordinator wait for the next one.
    outcome.orphans = run.orphans(lab.find_left if lab is not None else list)
    outcome.seconds = round(time.monotonic() - began, 2)
    outcome.shm = sorted(n for n in set(os.listdir(SHM)) - shm if is_left(n))
    outcome.result = "hang" if code is None else "failed" if code else "survived"
    if outcome.result == "survived" and outcome.resumes:
        outcome.result = "resumed"
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        outcome.samples, outcome.accuracy = result["samples"], result["test_acc"]
        outcome.views = len(result["views"])
        outcome.adopted = any("coordinator was" in row["reason"] for row in result["views"])
    if outcome.result in ("failed", "hang"):
        outcome.error = f"{outcome.error} / {read_last_line(log)}"
    return outcome


def is_left(name: str) -> bool:
    """Returns whether a shared segment remains, and no live process has it open."""
    if not name.startswith("paceline-"):
        return False
    time.sleep(1.0)  # Other runs of this machine unlink theirs within moments.
    return (SHM / name).exists() and not any(
        name in text for text in map(read_maps, Path("/proc").glob("[0-9]*/maps"))
    )


def read_maps(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def read_last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1][:300] if lines else ""


def make_environment(lab: Lab | None) -> dict[str, str]:
    return {**os.environ, **({"HOME": str(lab.home)} if lab is not None else {})}


@contextlib.contextmanager
def made_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-faults-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def measure_baseline(strategy: str, workers: int, lab: Lab | None) -> dict[str, Any]:
    """Undisturbed runs with several seeds: their accuracies, and the median time of the command."""
    accuracies, seconds, failures = [], [], list[str]()
    while len(accuracies) < BASELINES:
        with made_folder() as folder:
            options: list[object] = ["--workers", workers]
            if lab is not None:
                pool = lab.write_pool(folder / "pool.yaml", all={"python": sys.executable})
                options = ["--pool", pool, "--project", folder]
            seed, log = len(accuracies), folder / "log"
            words = ["train", *JOB, "--strategy", strategy, "--seed", seed, *options]
            run = Run([*words, "--quiet", "--out", folder / "run"], make_environment(lab), log)
            began = time.monotonic()
            if run.wait(DEADLINE_S) != 0:
                failures.append(read_last_line(log))
                print(f"an undisturbed run failed: {failures[-1]}", flush=True)
                if len(failures) == ATTEMPTS:
                    raise SystemExit("undisturbed runs fail: the machine is too busy, or broken")
                continue
            seconds.append(time.monotonic() - began)
            result = json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))
            accuracies.append(result["test_acc"])
    middle = sorted(seconds)[BASELINES // 2]
    return {"accuracies": accuracies, "seconds": middle, "failures": failures}


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_cases(options: argparse.Namespace) -> None:
    """Runs the cases that the file does not contain, and appends them to it."""
    places = ("local", "namespaces") if why_not() is None else ("local",)
    if options.local:
        places = ("local",)
    rows = read_rows(options.out)
    known = {(row["seed"], row["case"]["index"]) for row in rows if "case" in row}
    baselines = {tuple(row["baseline"]): row for row in rows if "baseline" in row}
    with contextlib.ExitStack() as stack:
        labs: dict[int, Lab] = {}
        for index in range(options.first, options.count):
            if (options.seed, index) in known:
                continue
            case = Case.draw(options.seed, index, places)
            lab = None
            if case.place == "namespaces":
                if case.workers not in labs:
                    folder = stack.enter_context(made_folder())
                    labs[case.workers] = stack.enter_context(make_lab(folder, case.workers))
                lab = labs[case.workers]
            key = (case.strategy, case.workers, case.place)
            if key not in baselines:
                row = {"baseline": key, **measure_baseline(case.strategy, case.workers, lab)}
                append(options.out, row)
                baselines[key] = row
            baseline = baselines[key]
            with made_folder() as folder:
                outcome = try_case(case, lab, baseline["seconds"], folder, index % BASELINES)
            good = outcome.accuracy is not None and (
                outcome.accuracy >= min(baseline["accuracies"]) - SPREAD
            )
            append(options.out, {
                "seed": options.seed, "case": asdict(case), **asdict(outcome),
                "exact": outcome.is_exact, "accurate": good,
            })  # fmt: skip
            print(
                f"{index}: {case.kind} {case.target} {case.number} of {case.strategy}, "
                f"{case.workers} workers, {case.place}{', elastic' if case.elastic else ''}, "
                f"at {outcome.at}: {outcome.result}"
                f"{'' if outcome.is_exact else ', samples differ'} {outcome.error[:160]}",
                flush=True,
            )


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def group_of(row: dict[str, Any]) -> tuple[str, ...]:
    case = row["case"]
    return case["kind"], case["target"], case["place"], "1" if case["elastic"] else "all"


def show(path: Path) -> None:
    """Prints a Markdown table: what was tried, and what held."""
    rows = [row for row in read_rows(path) if "case" in row]
    names = (
        *("Fault", "Target", "Place", "Min. workers", "Tried", "Hit", "Survived", "Resumed"),
        *("Failed", "Hang", "Orphans", "Left in /dev/shm", "Samples exact", "Accuracy"),
    )
    print("| " + " | ".join(names) + " |")
    print("|---|---|---|---|" + "---:|" * 10)
    for group in [*sorted({group_of(row) for row in rows}), None]:
        mine = [row for row in rows if group is None or group_of(row) == group]
        counts = Counter(r["result"] for r in mine)
        cells = [
            *(group or ("all", "", "", "")), len(mine), sum(r["hit"] for r in mine),
            *(counts[name] for name in ("survived", "resumed", "failed", "hang")),
            sum(bool(r["orphans"]) for r in mine), sum(bool(r["shm"]) for r in mine),
            sum(r["exact"] for r in mine), sum(r["accurate"] for r in mine),
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    for row in rows:
        if row["result"] in ("failed", "hang") or row["orphans"] or row["shm"] or not row["exact"]:
            print(f"\ncase {row['case']['index']}: {row['case']}: {row['result']}: {row['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local", action="store_true", help="only on this machine")
    parser.add_argument("--show-only", action="store_true")
    options = parser.parse_args()
    if not options.show_only:
        run_cases(options)
    show(options.out)


if __name__ == "__main__":
    main()

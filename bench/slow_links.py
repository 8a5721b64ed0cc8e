"""Measures time to accuracy over slow links next to plain DDP. Requires root and MNIST.

    python bench/slow_links.py --data-dir FOLDER [--mbit 100] [--delay 0] [--repeats 3] [--save]

Three machines are network namespaces with their own SSH servers, as in the tests; `tc` limits the
sending rate, `delay.py` delays received packets (after `make delays`). `mlp-300-100` on MNIST to a
validation accuracy of 0.97, total wall time from the start of the first process, evaluation after
each epoch on both sides. DDP is measured with several batches and scaled learning rates, and with
its PowerSGD hook. Settings were chosen once, by hand, for both sides; runs that did not reach the
accuracy are listed as such.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import network_namespaces as machines_here
from delay import RULE
from results_store import keep

HERE = Path(__file__).parent
DELAYS = HERE.parent / ".peers" / "delays" / "bin" / "python"
GOAL, EPOCHS, LIMIT_S = 0.97, 12, 600
DDP = {
    "ddp, batch 128": (128, 0.05, "plain"),
    "ddp, batch 512": (512, 0.1, "plain"),
    "ddp, batch 2048": (2048, 0.2, "plain"),
    "ddp with PowerSGD, batch 128": (128, 0.05, "powersgd"),
}
OURS = {
    "single, on one of them": "single",
    "allreduce": "allreduce",
    "allreduce(codec=powersgd(2))": "allreduce(codec=powersgd(2))",
    "local_sgd(h=16)": "local_sgd(h=16)",
    "diloco(h=50)": "diloco(h=50)",
    "diloco(h=50, outer_momentum=0.5)": "diloco(h=50, outer_momentum=0.5)",
    "ps(codec=topk(0.01))": "ps(codec=topk(0.01))",
    "ps(codec=topk(0.01), overlap=true)": "ps(codec=topk(0.01), overlap=true)",
}


def run(lab: machines_here.Lab, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli.main", *map(str, words)]
    env = {**os.environ, "HOME": str(lab.home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)


def time_ddp(
    lab: machines_here.Lab, pool: Path, folder: Path, data: Path, name: str
) -> float | None:
    batch, lr, kind = DDP[name]
    args = (data, batch, lr, kind, GOAL, EPOCHS)
    out = folder / "launch"
    done = run(lab, "launch", HERE / "ddp_mnist.py", "--pool", pool, "--out", out, "--", *args)
    lines = re.findall(r"accuracy ([\d.]+) seconds ([\d.]+)", done.stdout)
    for accuracy, seconds in lines:
        if float(accuracy) >= GOAL:
            return float(seconds)
    print(done.stdout[-500:] + done.stderr[-500:] if not lines else f"{name}: {lines[-1]}")
    return None


def time_ours(
    lab: machines_here.Lab, pool: Path, folder: Path, data: Path, name: str
) -> float | None:
    out = folder / "run"
    if OURS[name] == "single":
        summary = yaml.safe_load(pool.read_text())
        pool = folder / "one.yaml"
        pool.write_text(yaml.safe_dump({"hosts": summary["hosts"][:1]}))
    words = ("--model", "mlp-300-100", "--data", "mnist", "--data-dir", data, "--batch", 128)
    words += ("--optimizer", "sgd(momentum=0.9)", "--lr", 0.05, "--epochs", EPOCHS, "--quiet")
    words += ("--until", f"val_acc>={GOAL}")
    done = run(
        lab,
        "train",
        *words,
        "--strategy",
        OURS[name],
        "--pool",
        pool,
        "--out",
        out,
        "--checkpoint-every",
        "never",
        "--threads",
        1,
    )
    if done.returncode:
        print(f"{name}: {done.stderr[-300:]}")
        return None
    result = json.loads((out / "result.json").read_text())
    for row in result["history"]:
        if row["val_acc"] is not None and row["val_acc"] >= GOAL:
            return float(row["seconds"])
    print(f"{name}: {result['val_acc']}")
    return None


@contextlib.contextmanager
def delayed(lab: machines_here.Lab, delay_ms: float) -> Iterator[float]:
    """Delays packets between machines; yields the round trip as measured by TCP."""
    if delay_ms and not DELAYS.exists():
        raise SystemExit("--delay requires another environment; run `make delays`")
    helpers: list[subprocess.Popen[str]] = []
    try:
        for machine in lab.machines if delay_ms else ():
            inside = ("ip", "netns", "exec", machine.namespace)
            machines_here.run(*inside, "iptables", *RULE)
            # With priority: load from other processes must not increase the delay.
            first = ("nice", "-n", "-20", str(DELAYS))
            command = [*inside, *first, str(HERE / "delay.py"), str(delay_ms)]
            helpers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for helper in helpers:
            assert helper.stdout is not None
            if helper.stdout.readline().strip() != "ready":
                raise SystemExit("bench/delay.py did not start")
        yield measure_round_trip(lab)
    finally:
        for helper in helpers:
            helper.kill()


def measure_round_trip(lab: machines_here.Lab) -> float:
    """Returns the milliseconds until the second machine has accepted a connection of the first."""
    first, second = lab.machines[:2]
    script = (
        "import socket, time\n"
        "for _ in range(10):\n"
        "    began = time.perf_counter()\n"
        f"    socket.create_connection(({second.name!r}, {second.port}), 5).close()\n"
        "    print((time.perf_counter() - began) * 1000)\n"
    )
    inside = ("ip", "netns", "exec", first.namespace, sys.executable, "-c", script)
    return statistics.median(map(float, machines_here.run(*inside).split()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.0, help="ms, one way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="names that contain one of these words")
    parser.add_argument("--skip", default="", help="names that contain one of these words")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    data = given.data_dir.resolve()
    found: dict[str, list[float | None]] = {}
    only, skip = ([name for name in names.split(",") if name] for names in (given.only, given.skip))
    names = [
        name
        for name in (*DDP, *OURS)
        if (not only or any(w in name for w in only)) and not any(w in name for w in skip)
    ]
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        lab = stack.enter_context(machines_here.make_lab(Path(name) / "lab"))
        for machine in lab.machines:
            tc = ("tc", "-n", machine.namespace, "qdisc", "add", "dev", "eth0")
            rate = ("tbf", "rate", f"{given.mbit}mbit", "burst", "64kb", "latency", "50ms")
            machines_here.run(*tc, "root", *rate)
        round_trip_ms = stack.enter_context(delayed(lab, given.delay))
        links = {"mbit_s": given.mbit, "delay_ms": given.delay, "round_trip_ms": round_trip_ms}
        print(f"round trip between machines: {round_trip_ms:.2f} ms", flush=True)
        pool = lab.write_pool(Path(name) / "pool.yaml", all={"python": sys.executable})
        for repeat in range(given.repeats):
            for side in names[repeat % len(names) :] + names[: repeat % len(names)]:
                with tempfile.TemporaryDirectory() as place:
                    act = time_ddp if side in DDP else time_ours
                    seconds = act(lab, pool, Path(place), data, side)
                found.setdefault(side, []).append(seconds)
                if given.save:
                    kind = f"slow-links-{given.mbit}mbit-{given.delay:g}ms"
                    keep(kind, {"goal": GOAL, "links": links, "seconds": found})
                summary = "not reached" if seconds is None else f"{seconds:.1f} s"
                print(f"{repeat + 1}/{given.repeats} {side}: {summary}", flush=True)
    reached: dict[str, Any] = {}
    for side, values in found.items():
        good = [v for v in values if v is not None]
        if len(good) == len(values):
            reached[side] = statistics.median(good)
    print(
        f"\n| at {given.mbit} Mbit/s, {given.delay:g} ms | seconds to {GOAL} | x sooner than DDP |"
    )
    print("|---|---:|---:|")
    base = reached.get("ddp, batch 128")
    for side, values in found.items():
        span = ", ".join("not reached" if v is None else f"{v:.1f}" for v in values)
        ratio = f"{base / reached[side]:.2f}" if base and side in reached else ""
        print(f"| {side} | {span} | {ratio} |")


if __name__ == "__main__":
    main()

"""Recovery after the loss of a worker next to torchft, and real losses next to the twin.

    python bench/recovery.py --torchft .peers/torchft/bin/python --json bench/results/recovery.json
    python bench/recovery.py --twin 3 --json bench/results/recovery.json

Recovery: three workers train; one is killed again and again, and started again at once. Measured
from the kill: until the others complete a step without it (lost), and until all three complete a
step together (replaced). Paceline and torchft alternate.

Twin: runs whose workers each have a quarter of a core and are killed twice, next to the same run in
virtual time. Step times, startup and regrouping of the twin come from another real run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic_job import CASES

WORKERS, LOSSES = 3, 5
MODEL, STEPS = "resnet20", 100_000
DEADLINE_S = 400.0


# ---- Paceline ---------------------------------------------------------------------------------


def events_of(out: Path, process: str = "run") -> list[dict[str, Any]]:
    path = out / "events" / f"{process}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # The last line is being written.
    return found


def ends_of_steps(out: Path, worker: int) -> list[float]:
    """Returns when each step of a worker ended, in seconds of the run."""
    windows = [e for e in events_of(out, f"worker-{worker}") if e["kind"] == "steps"]
    return [w["began"] + us / 1e6 for w in windows for us in w["end"]]


def paceline_run(
    job: Path, out: Path, *more: object, workers: int = WORKERS
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline", "train", job, "--workers", workers, "--threads", 1]
    command += ["--quiet", "--out", out, *more]
    log = (out.parent / f"{out.name}.log").open("wb")
    return subprocess.Popen(
        [str(w) for w in command], stdout=log, stderr=log, start_new_session=True
    )


def wait_for(out: Path, process: subprocess.Popen[bytes], condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            log = (out.parent / f"{out.name}.log").read_text(errors="replace")
            raise SystemExit(f"the run ended early or made no progress: {log[-500:]}")
        time.sleep(0.02)


def views(out: Path) -> list[dict[str, Any]]:
    return [e["row"] for e in events_of(out) if e["kind"] == "view"]


def recover_paceline(folder: Path) -> list[dict[str, float]]:
    """Kills a worker several times; returns the seconds of both recoveries each time."""
    out = folder / "paceline"
    job = CASES[MODEL].write(folder / "job.py", STEPS, WORKERS)
    run = paceline_run(job, out, "--min-workers", 1, "--restarts", LOSSES + 1)
    try:
        wait_for(out, run, lambda: len(ends_of_steps(out, 0)) > 20)
        kills: list[float] = []
        for count in range(LOSSES):
            started = [e for e in events_of(out, "worker-1") if e["kind"] == "worker"][-1]
            wall_s = time.time()
            os.kill(started["pid"], signal.SIGKILL)
            kills.append(wall_s - wall_start(out))
            wait_for(out, run, lambda: len(views(out)) >= 2 * (count + 1))  # noqa: B023
            reached = len(ends_of_steps(out, 0)) + 20
            wait_for(out, run, lambda: len(ends_of_steps(out, 0)) > reached)  # noqa: B023
    finally:
        run.terminate()
        run.wait(60)
    ends = ends_of_steps(out, 0)
    rows = views(out)
    found = []
    for killed, lost, joined in zip(kills, rows[::2], rows[1::2], strict=True):
        first = [min(t for t in ends if t > row["seconds"]) for row in (lost, joined)]
        found.append(
            {
                "lost_s": first[0] - killed,
                "replaced_s": first[1] - killed,
                "join_pause_s": joined["pause_s"],
            }
        )
    return found


def wall_start(out: Path) -> float:
    """Returns the wall time at which the run's clock was 0."""
    path = out / "events" / "run.jsonl"
    newest = events_of(out)[-1]["t"]
    return path.stat().st_mtime - newest


# ---- torchft ----------------------------------------------------------------------------------


def torchft_worker(rank: int) -> None:
    """One replica group that trains for ever and prints `time step participants` per step."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from paceline import models

    case = CASES[MODEL]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = models.build(case.model, input_shape=case.shape, classes=10)
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
        use_async_quorum=True,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn((case.share, *case.shape), generator=generator)
    targets = torch.randint(0, 10, (case.share,), generator=generator)
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        print(time.time(), manager.current_step(), manager.num_participants(), flush=True)


def recover_torchft(folder: Path, python: Path) -> list[dict[str, float]]:
    launcher = subprocess.Popen(
        [str(python), __file__, "--torchft-lighthouse"], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    address = launcher.stdout.readline().strip()
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "GLOO_SOCKET_IFNAME": "lo",
           "RUST_LOG": "error"}  # fmt: skip

    def start(rank: int, number: int) -> subprocess.Popen[bytes]:
        log = (folder / f"torchft-{rank}-{number}.log").open("wb")
        errors = (folder / f"torchft-{rank}-{number}.err").open("wb")
        words = [str(python), __file__, "--torchft-worker", str(rank)]
        return subprocess.Popen(words, env=env, stdout=log, stderr=errors)

    def steps() -> list[tuple[float, int]]:
        lines = (folder / "torchft-0-0.log").read_text().splitlines()
        rows = [line.split() for line in lines if len(line.split()) == 3]
        return [(float(t), int(participants)) for t, _, participants in rows]

    def wait(condition: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit("torchft made no progress")
            time.sleep(0.02)

    members = {rank: start(rank, 0) for rank in range(WORKERS)}
    found = []
    try:
        wait(lambda: sum(n == WORKERS for _, n in steps()) > 20)
        for count in range(LOSSES):
            killed = time.time()
            members[1].kill()
            members[1].wait()
            members[1] = start(1, count + 1)
            wait(lambda: any(t > killed and n < WORKERS for t, n in steps()))  # noqa: B023
            lost = min(t for t, n in steps() if t > killed and n < WORKERS)
            wait(lambda: any(t > lost and n == WORKERS for t, n in steps()))  # noqa: B023
            whole = min(t for t, n in steps() if t > lost and n == WORKERS)
            found.append({"lost_s": lost - killed, "replaced_s": whole - killed})
            wait(lambda: sum(t > whole for t, _ in steps()) > 20)  # noqa: B023
    finally:
        for process in [*members.values(), launcher]:
            process.kill()
            process.wait()
    return found


def serve_lighthouse() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=10
    )
    print(lighthouse.address(), flush=True)
    signal.pause()


# ---- the twin ---------------------------------------------------------------------------------


def elapsed(out: Path) -> tuple[float, dict[str, Any]]:
    """Returns the seconds from the first step to the end of the last epoch, and the result."""
    began = next(e["t"] for e in events_of(out) if e["kind"] == "phase")
    result = json.loads((out / "result.json").read_text())
    return result["history"][-1]["seconds"] - began, result


def compare_with_twin(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Runs with two losses, real and simulated from another real run."""
    import yaml

    job = CASES["mlp-300-100"].write(folder / "twin.py", 1600, WORKERS)
    slow = [word for w in range(WORKERS) for word in ("--slow", f"worker={w},cores=0.25")]
    faults = ["--fault", "kill worker=1 at=30%", "--fault", "kill worker=2 at=70%"]
    elastic = ["--min-workers", 1, "--restarts", 3]
    found = []
    for strategy in ("allreduce", "ps"):
        common = [*slow, *elastic, "--strategy", strategy]
        for index in range(repeats):
            calm, lossy = folder / f"calm-{strategy}-{index}", folder / f"lossy-{strategy}-{index}"
            first = folder / f"first-{strategy}-{index}"
            for out, more in ((calm, []), (first, faults[:2]), (lossy, faults)):
                if paceline_run(job, out, *common, *more).wait(DEADLINE_S):
                    raise SystemExit((folder / f"{out.name}.log").read_text()[-500:])
            rows = views(first)
            fault = next(e["t"] for e in events_of(first) if e["kind"] == "fault")
            cluster, virtual = folder / f"{strategy}-{index}.yaml", folder / f"v-{strategy}-{index}"
            twin = [sys.executable, "-m", "paceline", "twin", "--quiet", "--depth", "cost"]
            twin += ["--strategy", strategy, "--force"]
            calibrate = ["--calibrate", calm, "--write-cluster", cluster]
            subprocess.run([*map(str, [*twin, *calibrate]), "--out", str(virtual)], check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
            pool = yaml.safe_load(cluster.read_text())
            pool["regroup_s"] = rows[0]["pause_s"]
            for host in pool["hosts"]:
                # From the restart, 0.3 s after the kill, to the report that it is ready.
                host["startup_s"] = rows[1]["seconds"] - rows[1]["pause_s"] - fault - 0.3
            cluster.write_text(yaml.safe_dump(pool))
            more = [*elastic, *faults, "--cluster", cluster, "--out", virtual, job]
            subprocess.run([str(w) for w in [*twin, *more]], check=True, stdout=subprocess.DEVNULL)
            real_s, real = elapsed(lossy)
            virtual_s, simulated = elapsed(virtual)
            calm_s, _ = elapsed(calm)
            found.append(
                {
                    "strategy": strategy,
                    "calm_s": calm_s,
                    "real_s": real_s,
                    "twin_s": virtual_s,
                    "error": virtual_s / real_s - 1,
                    "real_views": len(real["views"]),
                    "twin_views": len(simulated["views"]),
                    "regroup_s": pool["regroup_s"],
                    "startup_s": pool["hosts"][0]["startup_s"],
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


# ---- results ----------------------------------------------------------------------------------


def show(body: dict[str, Any]) -> None:
    if "recovery" in body:
        print("| | losses | lost, median | worst | replaced, median | worst |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, rows in body["recovery"].items():
            cells = []
            for key in ("lost_s", "replaced_s"):
                values = [row[key] for row in rows]
                cells += [f"{statistics.median(values):.2f} s", f"{max(values):.2f} s"]
            print(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")
    for row in body.get("twin", ()):
        print(f"{row['strategy']}: real {row['real_s']:.1f} s, twin {row['twin_s']:.1f} s, "
              f"{100 * row['error']:+.1f}%")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torchft", type=Path, help="interpreter that has torchft")
    parser.add_argument("--rounds", type=int, default=1, help="of five losses each")
    parser.add_argument("--twin", type=int, default=0, help="runs next to the twin")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--torchft-worker", type=int)
    parser.add_argument("--torchft-lighthouse", action="store_true")
    options = parser.parse_args()
    if options.torchft_lighthouse:
        serve_lighthouse()
    if options.torchft_worker is not None:
        torchft_worker(options.torchft_worker)
    body: dict[str, Any] = {}
    if options.json.exists():
        body = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="paceline-recovery-") as name:
        if options.torchft is not None:
            both: dict[str, list[dict[str, float]]] = {"Paceline": [], "torchft": []}
            for index in range(options.rounds):
                folder = Path(name) / str(index)
                folder.mkdir()
                both["Paceline"] += recover_paceline(folder)
                both["torchft"] += recover_torchft(folder, options.torchft)
                print(json.dumps(both), flush=True)
            body["recovery"] = both
        if options.twin:
            body["twin"] = compare_with_twin(Path(name), options.twin)
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    show(body)


if __name__ == "__main__":
    main()

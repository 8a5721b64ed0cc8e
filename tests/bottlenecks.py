"""Runs with injected bottlenecks, each produced by a real cause.

A CPU quota is that of a control group, a slow disk is a throttled block device, and a slow link is
shaped in a separate network namespace. `why_not` gives the reason if one cannot be produced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.job import Job

GROUPS = Path("/sys/fs/cgroup")
ROWS = 2048
SHAPE = (1, 28, 28)
ROW_BYTES = 4096
"""Direct reads come in blocks: a row's 3,136 bytes lie in one of these."""
LONG_S = 120.0


# ---- what is trained -------------------------------------------------------------------------


class Steady(torch.nn.Sequential):
    """Some milliseconds of computing a step, few bytes to exchange."""

    def __init__(self) -> None:
        nn = torch.nn
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 49, 10),
        )


class Wide(torch.nn.Sequential):
    """Much to exchange and to update, little to compute."""

    def __init__(self, width: int = 1500) -> None:
        nn = torch.nn
        super().__init__(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS, *SHAPE, generator=generator)
    return inputs, torch.randint(0, 10, (ROWS,), generator=generator)


class PythonTransform(torch.utils.data.Dataset[Any]):
    """Rows that a loop of Python code works on, as a careless augmentation does."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_rows()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        total = 0
        for k in range(6000):
            total += k * k % 7
        return self.inputs[index], int(self.targets[index])


class FromDisk(torch.utils.data.Dataset[Any]):
    """Rows that are read from a file one by one, past the page cache."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: int | None = None
        self._buffer: Any = None

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import mmap

        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            self._buffer = mmap.mmap(-1, ROW_BYTES)  # Direct reads want an aligned buffer.
        os.preadv(self._file, [self._buffer], index * ROW_BYTES)
        row = torch.frombuffer(bytearray(self._buffer), dtype=torch.float32)[:784]
        return row.reshape(SHAPE).clone(), index % 10


def write_rows(path: Path) -> None:
    inputs, _ = make_rows()
    with path.open("wb") as file:
        for row in inputs:
            file.write(row.numpy().tobytes().ljust(ROW_BYTES, b"\0"))
        file.flush()
        os.fsync(file.fileno())


def _fields(**fields: Any) -> dict[str, Any]:
    """Long runs: they are ended from outside, when enough has been seen."""
    return {"epochs": 100_000, "batch": 64, "checkpoint_every": "never", **fields}


def steady_data() -> Any:
    return make_rows(), None, None


def python_data() -> Any:
    return PythonTransform(), None, None


def disk_data() -> Any:
    return FromDisk(os.environ["PACELINE_TEST_ROWS"]), None, None


def steady() -> Job:
    return Job(model=Steady, data=steady_data, **_fields(lr=0.001))


def python_transform() -> Job:
    return Job(model=Steady, data=python_data, **_fields(lr=0.001))


def from_disk() -> Job:
    return Job(model=Steady, data=disk_data, **_fields(lr=0.001))


def chatty() -> Job:
    model = functools.partial(Wide, 300)
    return Job(model=model, data=steady_data, **_fields(lr=0.001))


def heavy_updates() -> Job:
    return Job(
        model=functools.partial(Wide, 4000),
        data=steady_data,
        **_fields(lr=1e-4, batch=4, optimizer="adam"),
    )


# ---- causes ----------------------------------------------------------------------------------


@dataclass
class Cause:
    """How to start a run, and what to do to it once it trains."""

    name: str
    rule: str | None
    """The rule that must fire; None for a run with nothing wrong."""
    job: str = "steady"
    options: tuple[str, ...] = ("--strategy", "allreduce")
    needs: tuple[str, ...] = ()
    inject: Callable[[Path], contextlib.AbstractContextManager[None]] | None = None
    """Entered when the run trains, with its folder; left at the end."""
    around: Callable[[Path], contextlib.AbstractContextManager[Surrounding]] | None = None
    who: str | None = None


@dataclass
class Surrounding:
    """What a run is started in."""

    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    preexec: Callable[[], None] | None = None


def _new_group(controller: str) -> Path:
    path = GROUPS / controller / f"paceline-test-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def _remove_group(path: Path) -> None:
    deadline = time.monotonic() + 5
    while True:
        try:
            path.rmdir()
            return
        except OSError:  # Its processes are still ending.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def quota_on_worker_1(folder: Path) -> Iterator[None]:
    group = _new_group("cpu")
    (group / "cpu.cfs_quota_us").write_text("15000")
    pid = read_events(folder, "worker-1")[0]["pid"]
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (GROUPS / "cpu" / "cgroup.procs").write_text(str(pid))
        _remove_group(group)


@contextlib.contextmanager
def rows_on_disk(tmp: Path) -> Iterator[Surrounding]:
    write_rows(tmp / "rows")
    yield Surrounding(environment={"PACELINE_TEST_ROWS": str(tmp / "rows")})


@contextlib.contextmanager
def slow_disk(folder: Path) -> Iterator[None]:
    """Once the run trains: its programs are in memory, its rows are not."""
    device = os.stat(folder).st_dev
    group = _new_group("blkio")
    number = f"{os.major(device)}:{os.minor(device)}"
    (group / "blkio.throttle.read_bps_device").write_text(f"{number} 1000000")
    pids = [read_events(folder, f"worker-{w}")[0]["pid"] for w in (0, 1)]
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                (GROUPS / "blkio" / "cgroup.procs").write_text(str(pid))
        _remove_group(group)


@contextlib.contextmanager
def thin_link(tmp: Path) -> Iterator[Surrounding]:
    name = f"pt-{uuid.uuid4().hex[:8]}"
    shape = ("root", "tbf", "rate", "80mbit", "burst", "128kb", "latency", "50ms")
    _command("ip", "netns", "add", name)
    try:
        _command("ip", "-n", name, "link", "set", "lo", "up")
        _command("tc", "-n", name, "qdisc", "add", "dev", "lo", *shape)
        yield Surrounding(prefix=("ip", "netns", "exec", name))
    finally:
        _command("ip", "netns", "del", name)


@contextlib.contextmanager
def one_core(tmp: Path) -> Iterator[Surrounding]:
    yield Surrounding(preexec=lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}))


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


CAUSES = {
    cause.name: cause
    for cause in (
        Cause("calm", None),
        Cause("calm ps", None, options=("--strategy", "ps")),
        Cause("quota", "quota", inject=quota_on_worker_1, needs=("cpu group",), who="worker-1"),
        Cause(
            "slow disk",
            "reading",
            job="from_disk",
            around=rows_on_disk,
            inject=slow_disk,
            needs=("blkio group",),
        ),
        # Processes of one machine would exchange through memory.
        Cause(
            "thin link",
            "link",
            job="chatty",
            options=("--strategy", "allreduce(via=network)"),
            around=thin_link,
            needs=("namespace",),
        ),
        Cause(
            "thin link to a server",
            "link",
            job="chatty",
            options=("--strategy", "ps(via=network)"),
            around=thin_link,
            needs=("namespace",),
            who="server-0",
        ),
        Cause("python transform", "gil", job="python_transform"),
        Cause("one core", "crowding", around=one_core),
        Cause(
            "busy server",
            "server",
            job="heavy_updates",
            options=("--strategy", "ps"),
            who="server-0",
        ),
        Cause(
            "slow worker",
            "straggler",
            options=("--strategy", "allreduce", "--slow", "worker=1,factor=3"),
            who="worker-1",
        ),
    )
}


def why_not(cause: Cause) -> str | None:
    """What keeps a cause from being made here; None if nothing does."""
    for need in cause.needs:
        if need == "namespace":
            if not (shutil.which("ip") and shutil.which("tc")):
                return "ip and tc are not installed"
            if os.geteuid() != 0:
                return "network namespaces need root"
        else:
            controller = need.split()[0]
            limit = {"cpu": "cpu.cfs_quota_us", "blkio": "blkio.throttle.read_bps_device"}
            base = GROUPS / controller
            if not (base / "cgroup.procs").exists() or not os.access(base, os.W_OK):
                return f"no control group of version 1 for {controller} that may be written"
            probe = _new_group(controller)
            found = (probe / limit[controller]).exists()
            _remove_group(probe)
            if not found:
                return f"control groups for {controller} know no {limit[controller]}"
    return None


# ---- running ---------------------------------------------------------------------------------


def read_events(folder: Path, who: str) -> list[dict[str, Any]]:
    path = folder / "events" / f"{who}.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_with(cause: Cause, tmp: Path, *, train_s: float, until: str | None = None) -> Path:
    """Train with something wrong for so many seconds, or until a rule fires; the run's folder."""
    folder = tmp / "run"
    around = cause.around or (lambda _: contextlib.nullcontext(Surrounding()))
    with around(tmp) as place:
        command = [*place.prefix, sys.executable, "-m", "paceline.cli.main", "train"]
        command += [f"{Path(__file__)}:{cause.job}", "--out", str(folder), "--workers", "2"]
        command += ["--threads", "1", "--quiet", *cause.options]
        log = (tmp / "log").open("wb")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **place.environment},
            start_new_session=True,
            preexec_fn=place.preexec,
        )
        try:
            _wait(
                process,
                tmp,
                lambda: any(e["kind"] == "progress" for e in read_events(folder, "run")),
            )
            inject = cause.inject or (lambda _: contextlib.nullcontext())
            with inject(folder):
                began = time.monotonic()
                _wait(
                    process,
                    tmp,
                    lambda: (
                        time.monotonic() - began > train_s
                        or (until is not None and until in fired(read_events(folder, "run")))
                    ),
                )
                process.send_signal(signal.SIGTERM)
                process.wait(30)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
            log.close()
    return folder


def _wait(process: subprocess.Popen[bytes], tmp: Path, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            said = (tmp / "log").read_text(errors="replace")
            raise AssertionError(f"the run ended or never came to it: {said}")
        time.sleep(0.1)


def fired(events: list[dict[str, Any]]) -> set[str]:
    return {e["rule"] for e in events if e["kind"] == "verdict"}

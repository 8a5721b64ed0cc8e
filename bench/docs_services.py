"""Clusters and stores behind the addresses that README.md and docs/ use: started when needed.

    python bench/docs_services.py paceline reproduce switch --pool three.yaml --out runs/ssh

A Ray and a Spark cluster, HDFS, an S3 server and machines with SSH servers, all on this machine, by
the helpers of the tests. A command refers to them by the addresses of the pages; `Services.open`
starts what it names, and returns the command with real addresses. Called as a program, it runs
one command in this way, with the pools pool.yaml, three.yaml and nine.yaml.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import network_namespaces
import object_stores
import spark_cluster
from network_namespaces import Lab

ROOT = Path(__file__).resolve().parents[1]
MACHINES = 9
RAY_CPUS = 4
WAIT_S = 30


class NotHere(Exception):
    """A service cannot run on this machine, for the reason given."""


@dataclass(frozen=True)
class Opened:
    """A running service: replacements in commands, by pattern, and environment variables."""

    replaced: dict[str, str]
    environment: dict[str, str]


@contextlib.contextmanager
def run_ray(folder: Path, work: Path) -> Iterator[Opened]:
    if importlib.util.find_spec("ray") is None:
        raise NotHere("Ray is not installed")
    command = [sys.executable, str(ROOT / "tests/scripts/ray_cluster.py"), str(RAY_CPUS)]
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"no Ray cluster: {(folder / 'ray.log').read_text()[-2000:]}")
        yield Opened({r"10\.0\.0\.1:6379": address}, {})
    finally:
        process.stdin.close()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def run_spark(folder: Path, work: Path) -> Iterator[Opened]:
    if (reason := spark_cluster.why_not()) is not None:
        raise NotHere(reason)
    with spark_cluster.run_cluster(folder / "spark") as cluster:
        yield Opened({r"spark://10\.0\.0\.1:7077": cluster.master}, {})


@contextlib.contextmanager
def run_store(
    folder: Path,
    work: Path,
    name: str,
    run: Callable[[Path], contextlib.AbstractContextManager[object]],
) -> Iterator[Opened]:
    try:
        with run(folder / f"store-{name[:2]}") as store:
            assert isinstance(store, object_stores.Store)
            yield Opened({name: store.url}, store.environment)
    except object_stores.NotHere as error:
        raise NotHere(str(error)) from None


@contextlib.contextmanager
def run_machines(folder: Path, work: Path) -> Iterator[Opened]:
    """Writes pool.yaml and gpus.yaml (two machines), three.yaml and nine.yaml."""
    if (reason := network_namespaces.why_not()) is not None:
        raise NotHere(reason)
    with network_namespaces.make_lab(folder / "lab", MACHINES) as lab:
        write_pools(work, lab)
        names = {rf"\bs{i}\b": machine.name for i, machine in enumerate(lab.machines, start=1)}
        # Outside of pool.yaml, as in the page.
        names[r"10\.0\.0\.9"] = lab.machines[2].name
        yield Opened(names, {"HOME": str(lab.home)})


def write_pools(work: Path, lab: Lab) -> None:
    """In gpus.yaml the first machine is described as one with a GPU, so that it can be selected."""
    path = lab.write_pool(work / "nine.yaml", all={"python": sys.executable, "cores": 1})
    hosts = yaml.safe_load(path.read_text(encoding="utf-8"))["hosts"]
    with_gpu = {**hosts[0], "gpus": [{"model": "none", "count": 1}]}
    pools = {"pool": hosts[:2], "three": hosts[:3], "gpus": [with_gpu, hosts[1]]}
    for name, members in pools.items():
        (work / f"{name}.yaml").write_text(yaml.safe_dump({"hosts": members}), encoding="utf-8")


NEEDED = {
    r"10\.0\.0\.1:6379": run_ray,
    r"spark://": run_spark,
    r"hdfs://": partial(run_store, name=r"hdfs://namenode:8020", run=object_stores.run_hdfs),
    r"s3://": partial(run_store, name=r"s3://bucket", run=object_stores.run_s3),
    r"\b(pool|gpus|three|nine)\.yaml": run_machines,
}
"""Services by the pattern of a command that needs them."""


class Services:
    """Starts services once, in a folder, and ends all of them; pools are written to `work`."""

    def __init__(self, folder: Path, work: Path) -> None:
        self._folder, self._work = folder, work
        self._stack = contextlib.ExitStack()
        self._opened: dict[str, Opened | NotHere] = {}

    def open(self, text: str) -> tuple[str, dict[str, str]]:
        """Returns the command with real addresses, and its environment; raises NotHere."""
        environment: dict[str, str] = {}
        for pattern, run in NEEDED.items():
            if not re.search(pattern, text):
                continue
            if pattern not in self._opened:
                try:
                    self._opened[pattern] = self._stack.enter_context(run(self._folder, self._work))
                except NotHere as error:
                    self._opened[pattern] = error
            opened = self._opened[pattern]
            if isinstance(opened, NotHere):
                raise opened
            environment |= opened.environment
            for name, address in opened.replaced.items():
                text = re.sub(name, address, text)
        return text, environment

    def close(self) -> None:
        self._stack.close()


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder), Path(folder))
        try:
            text, environment = services.open(shlex.join(sys.argv[1:]))
            text = re.sub(r"(?<=--pool )(\w+\.yaml)", rf"{folder}/\1", text)
            command = [sys.executable, "-m", *shlex.split(text)]
            return subprocess.run(
                command, env={**os.environ, **environment}, check=False
            ).returncode
        finally:
            services.close()


if __name__ == "__main__":
    sys.exit(main())

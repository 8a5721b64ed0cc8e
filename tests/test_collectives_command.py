"""`paceline collectives`: measured collectives, the fit of the formulas, and its errors."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from conftest import RunCli, StartCli, wait_until
from network_namespaces import Lab, run
from paceline.cluster.pool import Host, Link, Pool
from paceline.cluster.pool_file import load_pool
from paceline.plan.cost_model import allreduce_s
from paceline.plan.link_fit import LinkFit, fit_errors, fit_links, held_out_sizes, write_fit
from paceline.specs.collectives import COLLECTIVES, member_counts


@dataclass
class Row:
    collective: str
    workers: int
    machines: int
    nbytes: int
    seconds: float


def make_rows(fit: LinkFit, spread: float = 0.0) -> list[Row]:
    noise = random.Random(1)
    rows = [
        Row(name, workers, workers, nbytes, 0.0)
        for name in COLLECTIVES
        for workers in (2, 3, 4)
        for nbytes in (1000, 10_000, 100_000, 1_000_000)
    ]
    for row in rows:
        row.seconds = fit.seconds(row) * (1 + spread * noise.uniform(-1, 1))
    return rows


def test_the_fit_finds_latency_and_bandwidth_despite_disturbed_points() -> None:
    true = LinkFit(0.0004, 11.9e6)
    exact = fit_links(make_rows(true))
    assert exact.latency_s == pytest.approx(true.latency_s, rel=1e-6)
    assert exact.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-6)
    rows = make_rows(true, spread=0.1)
    for row in rows[::7]:
        row.seconds *= 20  # another program had the processor
    found = fit_links(rows)
    assert found.latency_s == pytest.approx(true.latency_s, rel=0.1)
    assert found.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.1)
    errors = fit_errors(found, rows)
    assert errors is not None
    assert errors.median < 0.2
    assert errors.worst > 10
    assert fit_errors(found, [row for row in rows if row.nbytes < 100_000]) is None


@pytest.mark.parametrize("nbytes", [4, 1_000_000])
def test_points_of_one_size_give_a_fit_without_negative_numbers(nbytes: int) -> None:
    rows = [row for row in make_rows(LinkFit(0.001, 1e6)) if row.nbytes == 1000]
    for row in rows:
        row.nbytes = nbytes
    found = fit_links(rows)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0


def test_held_out_sizes_are_inside_and_never_all() -> None:
    assert held_out_sizes([1, 2, 3, 4, 5, 6]) == {2, 4}
    assert held_out_sizes([1, 2, 3]) == {2}
    assert held_out_sizes([1, 2]) == held_out_sizes([7]) == set()
    assert member_counts(2) == [2]
    assert member_counts(6) == [2, 4, 6]


def three_hosts(link: Link | None) -> tuple[Host, ...]:
    return tuple(Host(host=f"h{i}", cores=4, link=link) for i in range(3))


@pytest.mark.parametrize("doctored", [False, True], ids=["new pool", "pool of doctor"])
def test_the_cost_model_of_the_written_pool_equals_the_fit(doctored: bool) -> None:
    fit = LinkFit(0.0005, 11e6)
    link = Link(mbit_s=95.0, latency_ms=0.1) if doctored else None
    pool = Pool(hosts=three_hosts(link), collective="ring")
    written = write_fit(pool, pool.hosts, fit)
    assert (written.link == pool.link) == doctored
    for nbytes in (1e3, 1e6, 1e8):
        expected = 4 * (fit.latency_s + nbytes / 3 / fit.bytes_per_s)
        assert allreduce_s(written, written.slots, nbytes) == pytest.approx(expected, rel=0.01)


def test_links_that_are_faster_than_doctor_found_leave_nothing_to_the_processes() -> None:
    pool = Pool(hosts=three_hosts(Link(mbit_s=95.0)))
    written = write_fit(pool, pool.hosts, LinkFit(0.0, 20e6))
    assert (written.hop_ms, written.collective_gb_s) == (0.0, 1000.0)


def test_on_one_machine_the_fit_describes_its_processes() -> None:
    pool = Pool(hosts=(Host(host="h", cores=2, workers=4),), collective="ring")
    written = write_fit(pool, pool.slots, LinkFit(0.0005, 2e9))
    expected = 2 * 3 * (0.0005 + 1e6 / 4 / 2e9)
    assert allreduce_s(written, written.slots, 1e6) == pytest.approx(expected, rel=0.01)


def test_three_local_workers(run_cli: RunCli, tmp_path: Path) -> None:
    sizes = ("--sizes", "1k,100k,1M", "--rounds", 3)
    done = run_cli("collectives", "--workers", 3, *sizes, "--out", tmp_path / "run")
    assert done.code == 0, done.stderr
    assert "3 workers on 1 machine: measured / formula" in done.stdout
    assert "held-out sizes (*) from 100 kB: error of the formula" in done.stdout
    found = json.loads((tmp_path / "run" / "collectives.json").read_text())
    rows = {(row["collective"], row["workers"], row["nbytes"]): row for row in found["rows"]}
    expected = {(c, w, n) for c in COLLECTIVES for w in (2, 3) for n in (1000, 100_000, 1_000_000)}
    assert set(rows) == expected
    assert all(row["seconds"] > 0 for row in rows.values())
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / row["formula_s"])
    assert found["held_out_bytes"] == [100_000]
    assert "plotly" in (tmp_path / "run" / "collectives.html").read_text()
    again = run_cli("collectives", "--out", tmp_path / "run")
    assert again.code == 2
    assert "already contains a run" in again.stderr


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--workers", "1"], "--workers 1: a collective requires at least 2 workers; use more"),
        (["--workers", "0"], "--workers 0: a collective requires at least 2 workers; use more"),
        (["--sizes", "1k,big"], "--sizes must be sizes of 4 to 1,000,000,000 bytes"),
        (["--sizes", "1"], "--sizes must be sizes of 4 to 1,000,000,000 bytes"),
        (["--sizes", ""], "--sizes must be sizes of 4 to 1,000,000,000 bytes"),
        (["--rounds", "1"], "--rounds must be at least 3"),
        (["--timeout", "1"], "--timeout must be at least 2 s, got 1"),
        (["--write"], "--write requires --pool: the fit is written to the pool file"),
        (["--select", "gpu"], "--select requires --pool: it selects machines of the pool"),
        (["--pool", "POOL", "--workers", "2"], "--pool and --workers cannot be combined"),
        (["--pool", "POOL"], "with 1 worker: a collective requires at least 2 workers; use more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_leave_no_folder(
    run_cli: RunCli, tmp_path: Path, args: list[str], problem: str
) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(yaml.safe_dump({"hosts": [{"host": "localhost"}]}))
    given = [str(pool) if arg == "POOL" else arg for arg in args]
    done = run_cli("collectives", *given, "--out", tmp_path / "run")
    assert done.code == 2, done.stderr
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def find_worker(parent: int, rank: int) -> int | None:
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if f"worker-{rank}" in " ".join(process.cmdline()):
                return process.pid
        except psutil.Error:
            continue
    return None


def test_a_killed_worker_is_named(start_cli: StartCli, tmp_path: Path) -> None:
    args = ("--workers", 3, "--sizes", "50M", "--rounds", 1000, "--out", tmp_path / "run")
    started = start_cli("collectives", *args)
    pid = wait_until(lambda: find_worker(started.pid, 1), "worker 1 runs", 60)
    os.kill(pid, signal.SIGKILL)
    done = started.wait(30)
    assert done.code == 1, done.stderr
    assert f"worker 1 (pid {pid}) ended" in done.last_line
    assert "SIGKILL" in done.last_line


def limit_links(lab: Lab, rate: str) -> None:
    """Limits both directions; a small burst, so that messages of 100 kB have the rate."""
    for machine in lab.machines:
        limit = ("root", "tbf", "rate", rate, "burst", "5kb", "latency", "200ms")
        run("tc", "-n", machine.namespace, "qdisc", "add", "dev", "eth0", *limit)
        run("tc", "qdisc", "add", "dev", f"{machine.namespace}v0", *limit)


@pytest.mark.slow
@pytest.mark.exclusive
def test_limited_links_of_a_pool_are_found_and_written(
    lab: Lab, run_process: RunCli, tmp_path: Path
) -> None:
    limit_links(lab, "100mbit")
    pool = lab.write_pool(tmp_path / "pool.yaml", all={"python": sys.executable})
    sizes = ("--sizes", "1k,200k,500k,1M")
    args = ("--pool", pool, *sizes, "--write", "--json", "--out", tmp_path / "run")
    done = run_process("collectives", *args)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["machines"] for row in found["rows"]} == {2, 3}
    written = load_pool(pool).pool
    assert written.link.mbit_s == pytest.approx(found["bytes_per_s"] * 8 / 1e6, rel=1e-3)
    assert 85 < written.link.mbit_s < 105
    assert max(found["errors"][part]["worst"] for part in ("fitted", "held_out")) < 0.25
    assert written.link.latency_ms == pytest.approx(1e3 * found["latency_s"], rel=1e-3)

"""The doctor: its rules on plain data, its schedule, and real machines with real faults."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunCli
from network_namespaces import Lab
from paceline.cluster.diagnosis import Problem, diagnose
from paceline.cluster.doctor import Examination, MachineExamination, MachinePair, round_robin_pairs
from paceline.cluster.measurements import examination_to_json, find_link, update_pool
from paceline.cluster.pool import Gpu, Host, Pool, read_pool
from paceline.cluster.shell import LocalShell, RemoteProgram
from paceline.errors import HostError

ANSWERS_LATE = b"""import sys
lines = sys.stdin.buffer.readline(), sys.stdin.buffer.readline()
print('{"n": 1}', '{"n": 2}', sep="\\n")
"""


def test_an_answer_after_its_deadline_is_not_taken_for_the_next_one() -> None:
    async def talk() -> dict[str, Any]:
        local = LocalShell(Host(host="h1"))
        program = RemoteProgram(local, await local.open(None), "late")
        await program.write(b"%d\n" % len(ANSWERS_LATE) + ANSWERS_LATE)
        with pytest.raises(HostError, match=r"no answer to first within 0\.1 s"):
            await program.ask({"do": "first"}, 0.1)
        answer = await program.ask({"do": "second"}, 10)
        await program.end(10)
        return answer

    assert asyncio.run(talk()) == {"n": 2}


# ---- rules on plain data ---------------------------------------------------------------------


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """A new process: machines must see a user's process, with a user's environment."""
    return run_process


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "executable": "/usr/bin/python3",
        "packages": {"torch": "2.13.0", "numpy": "2.0"},
        "cores": 4,
        "memory_bytes": 8 << 30,
        "memory_free_bytes": 4 << 30,
        "load": 0.1,
        "disk_free_bytes": 50e9,
        "gpus": [],
        "home": "/home/u",
        **changes,
    }


def healthy(count: int = 3) -> Examination:
    """Machines with nothing wrong."""
    names = [f"h{i}" for i in range(1, count + 1)]
    machines = []
    for number, name in enumerate(names, start=1):
        own = f"10.0.0.{number}"
        machines.append(
            MachineExamination(
                host=Host(host=name),
                facts=facts(),
                address=own,
                addresses={own: "eth0"},
                clock_offset_s=0.01,
                clock_error_s=0.005,
                listening={0: 40000 + number, 29500: 29500},
                gflops=20.0 + number,
                routes={
                    other: {"source": own, "interface": "eth0", "mtu": 1500}
                    for other in names
                    if other != name
                },
            )
        )
    pairs = [
        MachinePair(
            source=a,
            target=b,
            reached={0: "ok", 29500: "ok"},
            latency_s=1e-4,
            bytes_per_s=125e6,
        )
        for a in names
        for b in names
        if a != b
    ]
    hosts = tuple(machine.host for machine in machines)
    return Examination(pool=Pool(hosts=hosts), machines=machines, pairs=pairs)


def only(found: Examination) -> Problem:
    (problem,) = diagnose(found)
    return problem


def test_healthy_machines_have_no_problem() -> None:
    assert diagnose(healthy()) == []
    assert diagnose(healthy(1)) == []


def test_unreachable_machine_is_told_with_its_remedy() -> None:
    found = healthy()
    error = HostError("h2", "key", "no key of ours is accepted", "paceline pool keys POOL")
    found.machines[1] = MachineExamination(host=Host(host="h2"), error=error)
    assert only(found) == Problem(
        host="h2", kind="key", what="no key of ours is accepted", fix="paceline pool keys POOL"
    )


def test_other_python_is_told_once_without_its_packages() -> None:
    found = healthy()
    found.of("h3").facts.update(python="3.9.2", packages={"torch": None, "numpy": None})
    problem = only(found)
    assert (problem.host, problem.kind) == ("h3", "python")
    assert problem.what == "Python 3.9.2 (/usr/bin/python3), the others have 3.11"
    found.of("h3").facts.update(python="3.11.2", packages=found.of("h1").facts["packages"])
    assert diagnose(found) == []  # the last figure of a version does no harm


def test_other_package_is_told_with_the_version_of_most() -> None:
    found = healthy()
    found.of("h1").facts["packages"] = {"torch": "2.4.0", "numpy": None}
    first, second = diagnose(found)
    assert (first.what, second.what) == (
        "torch 2.4.0, the others have 2.13.0",
        "numpy is missing, the others have 2.0",
    )
    assert first.fix == "ssh h1 'python3 -m pip install torch==2.13.0'"


def test_clock_counts_only_beyond_what_is_known_of_it() -> None:
    found = healthy()
    found.of("h2").clock_offset_s = -30.0
    assert only(found).what == "its clock is 30.0 s behind this machine's"
    found.of("h2").clock_error_s = 29.5
    assert diagnose(found) == []


def test_skewed_interface_is_reported_with_a_route_as_fix() -> None:
    found = healthy()
    found.of("h2").routes["h1"] = {"source": "10.9.0.2", "interface": "eth1", "mtu": 1500}
    problem = only(found)
    assert (problem.host, problem.kind, problem.level) == ("h2", "interface", "error")
    assert problem.what == (
        "it connects to h1 from 10.9.0.2 (eth1), but the others connect to it at 10.0.0.2 (eth0)"
    )
    assert problem.fix == "ssh h2 'sudo ip route replace 10.0.0.1 dev eth0 src 10.0.0.2'"


def test_translated_address_is_reported() -> None:
    found = healthy()
    found.of("h2").addresses = {"192.168.0.2": "eth0"}
    found.of("h2").routes["h1"]["source"] = "192.168.0.2"
    assert "is not on any of its interfaces" in only(found).what


def test_missing_route_and_different_mtu_are_reported() -> None:
    found = healthy()
    found.of("h1").routes["h3"]["source"] = None
    for route in found.of("h2").routes.values():
        route["mtu"] = 9000
    route_problem, mtu = diagnose(found)
    assert route_problem.what == "no route to h3 (10.0.0.3)"
    assert mtu.what == "MTU of 9000 bytes on eth0, the others have 1500"


def block(found: Examination, source: str, target: str, port: int) -> None:
    for pair in found.pairs:
        if (pair.source, pair.target) == (source, target):
            pair.reached[port] = "no answer"


def test_blocked_port_is_blamed_on_the_machine_that_blocks() -> None:
    found = healthy()
    for source in ("h1", "h3"):
        block(found, source, "h2", 29500)
    problem = only(found)
    assert problem.host == "h2"
    assert problem.what == "port 29500 blocked from h1: no answer, h3: no answer"
    assert problem.fix == (
        "ssh h2 'sudo iptables -I INPUT -p tcp -s 10.0.0.1,10.0.0.3 --dport 29500 -j ACCEPT'"
    )


def test_machine_that_lets_nothing_out_is_blamed_itself() -> None:
    found = healthy()
    for target in ("h2", "h3"):
        block(found, "h1", target, 0)
    problem = only(found)
    assert problem.host == "h1"
    assert "its own firewall blocks outgoing connections" in problem.what


def test_port_in_use_is_a_warning() -> None:
    found = healthy()
    found.of("h3").listening[29500] = None
    problem = only(found)
    assert (problem.what, problem.level) == ("port 29500 is in use by another program", "warning")


def test_slow_link_is_reported() -> None:
    found = healthy()
    for pair in found.pairs:
        if "h3" in (pair.source, pair.target):
            pair.bytes_per_s = 1.25e6
    assert only(found).what == "link eth0 carries 10 Mbit/s, the others 1000"


def test_hardware_that_differs_from_the_pool_is_reported() -> None:
    found = healthy()
    machine = found.of("h1")
    machine.host = Host(host="h1", gpus=(Gpu(count=2),))
    machine.facts["disk_free_bytes"] = 2e8
    machine.facts["load"] = 3.5
    found.of("h2").steps = {"failed": "data set cifar-10 is not there"}
    told = [(p.host, p.kind, p.level) for p in diagnose(found)]
    assert told == [
        ("h1", "gpu", "error"),
        ("h1", "disk", "error"),
        ("h2", "job", "error"),
        ("h1", "busy", "warning"),
    ]


def test_figures_go_into_the_pool() -> None:
    found = healthy()
    gpu = {"model": "RTX 2060", "memory_bytes": 6 << 30, "driver": "550"}
    found.of("h1").facts["gpus"] = [gpu, gpu]
    found.of("h1").steps = {
        "model": "mlp-128",
        "fixed_s": 1e-3,
        "per_sample_s": 2e-5,
        "update_s": 1e-4,
        "startup_s": 2.5,
    }
    found.of("h1").gpu_gflops = [1900.0, 1800.0]
    found.machines[2] = MachineExamination(
        host=Host(host="h3", cores=3), error=HostError("h3", "x", "y")
    )
    pool = update_pool(found)
    first = pool.hosts[0]
    assert (first.cores, first.memory_gb, first.gflops) == (4, 8.0, 21.0)
    assert first.gpus == (Gpu(count=2, model="RTX 2060", memory_gb=6.0, gflops=1800.0),)
    assert first.startup_s == 2.5
    assert first.link is not None
    assert (first.link.mbit_s, first.link.latency_ms) == (1000.0, 0.1)
    assert first.measured["mlp-128"].per_sample_s == 2e-5
    assert pool.hosts[2] == Host(host="h3", cores=3)
    json.dumps(examination_to_json(found, diagnose(found)))  # all of it is plain


def test_own_link_is_what_the_fastest_partner_shows() -> None:
    found = healthy()
    for pair in found.pairs:
        if {pair.source, pair.target} != {"h1", "h2"}:
            pair.bytes_per_s = 12.5e6  # h3 is slow
    link = find_link(found, "h1")
    assert link is not None
    assert link.mbit_s == 1000


@given(st.integers(2, 12))
def test_rounds_match_every_two_once(count: int) -> None:
    names = [f"h{i}" for i in range(count)]
    rounds = round_robin_pairs(names)
    met = [frozenset(pair) for matches in rounds for pair in matches]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(names, 2)))
    for matches in rounds:
        busy = [name for pair in matches for name in pair]
        assert len(busy) == len(set(busy))


# ---- real machines ---------------------------------------------------------------------------


def examine(run_cli: RunCli, pool: Path, *args: object) -> tuple[int, dict[str, Any]]:
    done = run_cli("doctor", "--pool", pool, "--json", *args)
    assert done.stdout, done.stderr
    return done.code, json.loads(done.stdout)


def errors_of(told: dict[str, Any]) -> set[tuple[str, str]]:
    return {(p["host"], p["kind"]) for p in told["problems"] if p["level"] == "error"}


def test_this_machine_needs_no_ssh(run_cli: RunCli, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("hosts:\n- host: localhost\n", encoding="utf-8")
    code, told = examine(run_cli, pool, "--write")
    assert code == 0
    assert told["ok"]
    assert read_pool(pool).hosts[0].gflops == pytest.approx(told["hosts"][0]["gflops"], abs=0.01)


def test_unknown_name_is_told_and_the_others_reported(run_cli: RunCli, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text("hosts:\n- host: nowhere.invalid\n- host: localhost\n", encoding="utf-8")
    code, told = examine(run_cli, pool)
    assert code == 1
    assert errors_of(told) == {("nowhere.invalid", "unknown")}
    assert [host["reachable"] for host in told["hosts"]] == [False, True]


def test_healthy_lab_and_its_measurements(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    pool = lab.write_pool(tmp_path / "pool.yaml", all={"python": sys.executable})
    limit = "rate 100mbit burst 64kb latency 50ms"
    lab.machines[0].inside(f"tc qdisc add dev eth0 root tbf {limit}")
    job = ("--model", "mlp-128", "--data", "digits", "--batch", 64)
    done = run_cli("doctor", "--pool", pool, "--write", *job)
    assert done.code == 0, done.stdout + done.stderr
    assert f"measurements written to {pool}" in done.stdout
    hosts = read_pool(pool).hosts
    rates = [host.link.mbit_s for host in hosts if host.link is not None]
    assert 80 < rates[0] < 105
    assert min(rates[1:]) > 500
    for host in hosts:
        assert host.gflops > 0.1
        assert host.measured["mlp-128"].per_sample_s > 0
    slow = [line for line in done.stdout.splitlines() if " link: " in line]
    assert len(slow) == 1
    assert lab.machines[0].name in slow[0]


def test_each_fault_is_named(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    """A dropped port, a route by another interface, a missing key; the rest is still reported."""
    first, second, third = lab.machines
    second.inside("iptables -A INPUT -p tcp --dport 29500 -j DROP")
    first.inside(f"ip route add {second.name} dev eth1 src {first.aside}")
    pool = lab.write_pool(tmp_path / "pool.yaml")
    code, told = examine(run_cli, pool)
    assert code == 1
    assert errors_of(told) == {(first.name, "interface"), (second.name, "port")}
    interface = next(p for p in told["problems"] if p["kind"] == "interface")
    assert f"from {first.aside} (eth1)" in interface["what"]
    port = next(p for p in told["problems"] if p["kind"] == "port")
    assert "port 29500 blocked from " in port["what"]

    lab.lock_out(third)
    code, told = examine(run_cli, pool)
    assert code == 1
    assert (third.name, "key") in errors_of(told)
    key = next(p for p in told["problems"] if p["kind"] == "key")
    assert key["fix"] == f"paceline pool keys {pool} --host {third.name}"
    assert [host["reachable"] for host in told["hosts"]] == [True, True, False]


def test_wrong_python_is_named(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    other = shutil.which("pypy3")
    if other is None:
        pytest.skip("no second version of Python here: Debian's pypy3 is one")
    pool = lab.write_pool(tmp_path / "pool.yaml", h2={"python": other})
    code, told = examine(run_cli, pool)
    assert code == 1
    assert errors_of(told) == {(lab.machines[1].name, "python")}
    assert told["problems"][0]["what"].startswith("Python 3.9")


def test_machines_that_do_not_answer_are_named(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    first, second, third = lab.machines
    first.kill()
    third.cut_off()
    known = lab.home / ".ssh" / "known_hosts"
    pool = lab.write_pool(tmp_path / "pool.yaml")
    code, told = examine(run_cli, pool, "--timeout", 3)
    assert code == 1
    assert errors_of(told) == {(first.name, "unreachable"), (third.name, "unreachable")}
    assert told["hosts"][1]["reachable"]

    lines = known.read_text().splitlines()
    known.write_text("\n".join(line for line in lines if not line.startswith(second.name)) + "\n")
    code, told = examine(run_cli, pool, "--timeout", 3)
    unknown = next(p for p in told["problems"] if p["host"] == second.name)
    assert (unknown["kind"], unknown["fix"]) == (
        "host_key",
        f"ssh-keyscan {second.name} >> ~/.ssh/known_hosts",
    )
    wrong = lines[2].split(" ", 1)[1]  # another machine's key under its name
    known.write_text(f"{second.name} {wrong}\n")
    code, told = examine(run_cli, pool, "--timeout", 3)
    changed = next(p for p in told["problems"] if p["host"] == second.name)
    assert "does not match known_hosts" in changed["what"]

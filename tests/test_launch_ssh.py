"""Launching scripts on a pool: who does what where, what is copied, how it ends; and real SSH."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunCli, StartCli, wait_until
from network_namespaces import Lab
from paceline.cluster.pool import Host
from paceline.cluster.shell import LocalShell, run_program
from paceline.errors import HostError, UsageError
from paceline.launch.hosts import RemoteHost, copy_project, run_guarded, watchdog_command
from paceline.launch.project import Project, find_project, read_project
from paceline.launch.script_tasks import (
    ScriptTask,
    TaskAddress,
    make_environment,
    place_tasks,
    read_roles,
)

SCRIPTS = Path(__file__).parent / "scripts"
AWKWARD = ["a b", "it's", 'say "hi"', "$(touch pwned)", "`id`", "*", "\\", "ü\n2", "", "--x=$HOME"]

# ---- roles -----------------------------------------------------------------------------------


@pytest.fixture
def run_cli(run_process: RunCli) -> RunCli:
    """A new process: machines must see a user's process, with a user's environment."""
    return run_process


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("boss=1", "unknown role 'boss'"),
        ("worker", "'worker' must be worker=NUMBER"),
        ("worker=two", "must be worker=NUMBER"),
        ("worker=1,worker=2", "worker is listed twice"),
        ("chief=2,worker=1", "chief=2 is not supported; at most one chief is allowed"),
        ("ps=2", "at least one chief or worker is required"),
    ],
)
def test_roles_that_cannot_be(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_roles(text)


def test_without_roles_ranks_lie_beside_each_other() -> None:
    hosts = [Host(host="a", workers=2), Host(host="b"), Host(host="c", workers=2)]
    tasks = place_tasks(hosts, None)
    assert [task.host.host for task in tasks] == ["a", "a", "b", "c", "c"]
    assert [task.local_rank for task in tasks] == [0, 1, 0, 0, 1]
    assert {task.role for task in tasks} == {"worker"}


def test_roles_go_round_the_machines() -> None:
    hosts = [Host(host=name) for name in "abc"]
    tasks = place_tasks(hosts, read_roles("ps=2,chief=1,worker=2"))
    assert [(task.who, task.host.host) for task in tasks] == [
        ("chief-0", "a"),
        ("worker-0", "b"),
        ("worker-1", "c"),
        ("ps-0", "a"),
        ("ps-1", "b"),
    ]


def places_of(tasks: list[ScriptTask]) -> list[TaskAddress]:
    return [
        TaskAddress(address=f"10.0.0.{task.site}", interface="eth7", port=2000 + task.rank)
        for task in tasks
    ]


ROLES = st.fixed_dictionaries(
    {
        "chief": st.integers(0, 1),
        "worker": st.integers(1, 6),
        "ps": st.integers(0, 3),
        "evaluator": st.integers(0, 1),
    }
)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.none() | ROLES)
def test_both_conventions_agree(sizes: list[int], roles: dict[str, int] | None) -> None:
    hosts = [Host(host=f"h{i}", workers=size) for i, size in enumerate(sizes)]
    tasks = place_tasks(hosts, roles)
    places = places_of(tasks)
    found = [make_environment(tasks, places, task, 1234) for task in tasks]
    assert [int(env["RANK"]) for env in found] == list(range(len(tasks)))
    assert {env["WORLD_SIZE"] for env in found} == {str(len(tasks))}
    assert {env["MASTER_ADDR"] for env in found} == {places[0].address}
    seats = {(task.site, env["LOCAL_RANK"]) for task, env in zip(tasks, found, strict=True)}
    assert len(seats) == len(tasks)
    for task, env in zip(tasks, found, strict=True):
        assert int(env["LOCAL_RANK"]) < int(env["LOCAL_WORLD_SIZE"])
        assert env["GLOO_SOCKET_IFNAME"] == "eth7"
        config = json.loads(env["TF_CONFIG"])
        assert config["task"] == {"type": task.role, "index": task.index}
        if task.role == "evaluator":
            assert "evaluator" not in config["cluster"]
        else:
            place = places[task.rank]
            listed = config["cluster"][task.role][task.index]
            assert listed == f"{place.address}:{place.port}"
    assert len({env["TF_CONFIG"].split('"task"')[0] for env in found}) == 1


# ---- the project -----------------------------------------------------------------------------


def fill(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


TREE = {
    ".gitignore": "*.bin\n!keep.bin\n/out/\nlogs/\n# a comment\n\\#odd\n",
    "train.py": "",
    "a.bin": "",
    "keep.bin": "",
    "out/x": "",
    "sub/out/x": "",
    "sub/logs/x": "",
    "sub/.gitignore": "!b.bin\n*.txt\n",
    "sub/b.bin": "",
    "sub/c.txt": "",
    "sub/deep/d.txt": "",
    "sub/deep/.gitignore": "!d.txt\n",
    "#odd": "",
    "with space/é.py": "",
}


def test_ignore_files_hold_as_in_git(tmp_path: Path) -> None:
    folder = fill(tmp_path / "p", TREE)
    git = ["git", "-C", str(folder), "-c", "core.quotepath=off"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=30)
    listed = subprocess.run(
        [*git, "ls-files", "-co", "--exclude-standard", "-z"],
        check=True,
        timeout=30,
        capture_output=True,
        text=True,
    ).stdout
    assert sorted(read_project(folder).files) == sorted(listed.rstrip("\0").split("\0"))


def test_own_ignore_file_has_the_last_word(tmp_path: Path) -> None:
    folder = fill(
        tmp_path / "p",
        {
            ".gitignore": "*.json\n",
            ".pacelineignore": "!config.json\ndata/\n",
            "config.json": "",
            "other.json": "",
            "data/x": "",
            ".git/HEAD": "",
            "__pycache__/x.pyc": "",
            "runs/1/run.json": "",
        },
    )
    found = read_project(folder, leave_out=folder / "runs")
    assert sorted(found.files) == [".gitignore", ".pacelineignore", "config.json"]


def test_project_is_found_around_the_script(tmp_path: Path) -> None:
    folder = fill(tmp_path / "p", {"pyproject.toml": "", "src/deep/train.py": ""})
    assert find_project(folder / "src/deep/train.py", None) == folder
    assert find_project(folder / "src/deep/train.py", folder / "src") == folder / "src"
    with pytest.raises(UsageError, match="was not found"):
        find_project(folder / "none.py", None)
    (tmp_path / "lone").mkdir()
    with pytest.raises(UsageError, match="is not inside --project"):
        find_project(folder / "src/deep/train.py", tmp_path / "lone")


def test_too_large_a_project_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "p", {"train.py": "x" * 100})
    with pytest.raises(UsageError, match=r"list data in \.pacelineignore"):
        read_project(folder, limit=50)


class OtherShell(LocalShell):
    """This machine, taken for another one, so that the project is copied."""


def other_machine() -> RemoteHost:
    host = Host(host="other")
    return RemoteHost(host=host, shell=OtherShell(host))


def copy_to(site: RemoteHost, project: Project) -> list[str]:
    told: list[str] = []
    asyncio.run(copy_project([site], project, ".", told.append))
    return told


def test_only_what_differs_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    folder = fill(tmp_path / "p", {"a.py": "one", "b/c.py": "two", "run.sh": "echo"})
    (folder / "run.sh").chmod(0o755)
    site = other_machine()
    assert copy_to(site, read_project(folder)) == ["other: 3 of 3 files copied, 10 bytes"]
    there = Path(site.folder).expanduser()
    assert (there / "b/c.py").read_text() == "two"
    assert os.access(there / "run.sh", os.X_OK)
    assert copy_to(site, read_project(folder)) == ["other: 0 of 3 files copied, 0 bytes"]

    (there / "written_there.txt").write_text("kept")
    (there / "a.py").write_text("two")  # as long as before, and changed over there
    shutil.rmtree(folder / "b")
    fill(folder, {"b": "file"})
    assert copy_to(site, read_project(folder)) == ["other: 2 of 3 files copied, 7 bytes"]
    assert (there / "a.py").read_text() == "one"
    assert (there / "b").read_text() == "file"
    assert (there / "written_there.txt").read_text() == "kept"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a//x"])
def test_nothing_is_written_outside_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    project = Project(folder=tmp_path / "p", files={path: (0, 0o644, "")})
    with pytest.raises(HostError, match="is outside of the folder"):
        copy_to(other_machine(), project)


# ---- the keeper ------------------------------------------------------------------------------


def keep(argv: list[str], **changes: Any) -> tuple[int | None, str, list[str]]:
    host = Host(host="localhost")
    lines: list[str] = []
    spec = {**watchdog_command(argv, {}, "/", None), **changes}
    site = RemoteHost(host=host, shell=LocalShell(host))
    status, words = asyncio.run(run_guarded(site, spec, lines.append))
    return status, words, lines


def test_keeper_passes_arguments_output_and_status() -> None:
    code = "import sys, json; print(json.dumps(sys.argv[1:])); sys.exit(7)"
    status, _, lines = keep([sys.executable, "-c", code, *AWKWARD])
    assert status == 7
    assert json.loads("".join(lines)) == AWKWARD


def test_watchdog_reports_signals_and_commands_that_cannot_run() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert keep([sys.executable, "-c", code])[0] == 128 + signal.SIGSEGV
    status, words, _ = keep(["/no/such/python"])
    assert status == 126
    assert "cannot run /no/such/python" in words


DETACHED = """
import os, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_keeper_ends_what_detached_itself() -> None:
    """In a session of its own, deaf to SIGTERM, its parent gone."""
    status, _, lines = keep([sys.executable, "-c", DETACHED, "leave"])
    assert status == 0
    assert is_gone(int(lines[0]))


def test_watchdog_ends_all_without_heartbeats() -> None:
    async def silent() -> tuple[int | None, str, list[str]]:
        host = Host(host="localhost")
        async with run_program(LocalShell(host), "watchdog", grace_s=10.0) as keeper:
            argv = [sys.executable, "-c", DETACHED, "stay"]
            await keeper.send(
                {**watchdog_command(argv, {}, "/", None), "beat_s": 1.0, "grace_s": 0.2}
            )
            lines = [line async for line in keeper.lines()]
            return await keeper.wait(), keeper.errors, lines

    status, words, lines = asyncio.run(silent())
    assert status == 128 + signal.SIGTERM
    assert words == "no heartbeat from the launcher for 1 s: stopped"
    assert is_gone(int(lines[0]))


# ---- on this machine, without SSH ------------------------------------------------------------


def write_local_pool(folder: Path, workers: int = 2) -> Path:
    path = folder / "pool.yaml"
    path.write_text(f"hosts:\n- host: localhost\n  workers: {workers}\n", encoding="utf-8")
    return path


def test_script_here_gets_its_arguments_intact(run_cli: RunCli, tmp_path: Path) -> None:
    folder = fill(
        tmp_path / "a 'project' $(x)",
        {"my script.py": "import json, sys; print(json.dumps(sys.argv[1:]))"},
    )
    pool = write_local_pool(tmp_path, 1)
    done = run_cli("launch", folder / "my script.py", "--pool", pool, "--", *AWKWARD)
    assert done.code == 0, done.stderr
    prefix, _, rest = done.stdout.splitlines()[0].partition("] ")
    assert prefix == "[worker 0 localhost"
    assert json.loads(rest) == AWKWARD
    assert not list(tmp_path.rglob("pwned"))


def test_failing_script_gives_its_status(run_cli: RunCli, tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('no luck')\ntime.sleep(600)"
    )
    fill(tmp_path, {"p/fail.py": code})
    pool = write_local_pool(tmp_path)
    began = time.monotonic()
    done = run_cli("launch", "p/fail.py", "--pool", pool, "--out", "run")
    assert time.monotonic() - began < 15
    assert done.code == 1
    assert done.last_line == "paceline: worker 1 on localhost failed with exit status 1"
    assert "no luck" in (tmp_path / "run/logs/worker-1.log").read_text()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", done.last_line[10:])


def test_ctrl_c_ends_all_here(start_cli: StartCli, tmp_path: Path) -> None:
    fill(tmp_path, {"p/wait.py": "import time; print('up', flush=True); time.sleep(600)"})
    command = start_cli("launch", "p/wait.py", "--pool", write_local_pool(tmp_path), "--out", "run")
    wait_until(lambda: command.so_far().count("] up") == 2, "both are up")
    os.kill(command.pid, signal.SIGINT)
    done = command.wait(15)
    assert done.code == 130
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "cancelled"


def test_options_that_cannot_be_combined(run_cli: RunCli, tmp_path: Path) -> None:
    fill(tmp_path, {"p/x.py": ""})
    pool = write_local_pool(tmp_path)
    for args, told in (
        (
            ("--pool", pool, "--workers", 2),
            "--pool and --workers cannot be combined: the pool file sets",
        ),
        (("--select", "gpu"), "--select requires --pool: it selects machines of the pool"),
        (("--dry-run",), "--dry-run requires --pool: it applies to machines of a pool"),
        (("--pool", pool, "--threads", 1), "--threads requires --strategy: without it the script"),
        (
            ("--pool", pool, "--strategy", "ps", "--roles", "ps=1,worker=1"),
            "--strategy and --roles cannot be combined: a strategy has workers and servers; use",
        ),
        (("--pool", pool, "--strategy", "ps", "--servers-on", "x"), "--servers-on x is not in the"),
        (("--pool", pool, "--engine", "ray"), "--pool and --engine cannot be combined: a run uses"),
        (("--engine", "sparkle"), "unknown --engine 'sparkle'; did you mean 'spark'?"),
        (("--pool", pool, "--select", "gpu"), "--select gpu: no machine in the pool has a GPU"),
        (("--pool", pool, "--venv"), "has no requirements.txt"),
        (("--pool", pool, "--roles", "ps=1"), "at least one chief or worker"),
    ):
        done = run_cli("launch", "p/x.py", *args)
        assert (done.code, len(done.lines)) == (2, 1), done.stderr
        assert told in done.last_line
    done = run_cli("launch", "p/none.py", "--pool", pool)
    assert (done.code, done.last_line) == (
        2,
        "paceline: script p/none.py was not found; use the path of a Python file",
    )
    assert not (tmp_path / "runs").exists()


def test_dry_run_says_all_and_does_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    fill(tmp_path, {"p/x.py": "", "p/data.bin": "", "p/.gitignore": "*.bin"})
    pool = tmp_path / "pool.yaml"
    pool.write_text("hosts:\n- host: nowhere.invalid\n- host: localhost\n", encoding="utf-8")
    roles = ("--roles", "chief=1,ps=1")
    done = run_cli("launch", "p/x.py", "--pool", pool, *roles, "--dry-run", "--", "it's $HOME")
    assert done.code == 0, done.stderr
    assert f"project {tmp_path / 'p'}: 2 files, 5 bytes" in done.stdout
    assert "nowhere.invalid: copied to ~/.paceline/launch/p-" in done.stdout
    assert "localhost: in place" in done.stdout
    assert "chief 0 on nowhere.invalid, rank 0:" in done.stdout
    assert """  python3 -u x.py 'it'"'"'s $HOME'""" in done.stdout
    assert not (tmp_path / "runs").exists()


# ---- three machines over SSH -----------------------------------------------------------------


def test_unchanged_ddp_script_on_three_machines(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    shutil.copy(SCRIPTS / "ddp.py", project)
    pool = lab.write_pool(tmp_path / "pool.yaml", all={"python": sys.executable})
    done = run_cli("launch", project / "ddp.py", "--pool", pool, "--out", "run")
    assert done.code == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "] rank " in line]
    for rank, machine in enumerate(lab.machines):
        start = f"[worker {rank} {machine.name}] rank {rank} of 3 on {machine.namespace} "
        assert sum(line.startswith(start) for line in said) == 1
    assert len({line.split("weights ")[1] for line in said}) == 1
    for rank in range(3):
        assert f"rank {rank} of 3" in (tmp_path / f"run/logs/worker-{rank}.log").read_text()


def test_script_that_reads_only_tf_config(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    shutil.copy(SCRIPTS / "tf_style.py", tmp_path / "p")
    pool = lab.write_pool(tmp_path / "pool.yaml")
    roles = "chief=1,worker=2,ps=1,evaluator=1"
    done = run_cli("launch", "p/tf_style.py", "--pool", pool, "--roles", roles)
    assert done.code == 0, done.stdout + done.stderr
    first, second, _ = lab.machines
    assert f"[chief 0 {first.name}] sum 11" in done.stdout
    assert f"[evaluator 0 {second.name}] evaluator sees ['chief', 'ps', 'worker']" in done.stdout


def test_arguments_and_paths_arrive_intact_over_ssh(
    lab: Lab, run_cli: RunCli, tmp_path: Path
) -> None:
    """Among them bytes that are no UTF-8, in arguments and in a file's name."""
    folder = fill(
        tmp_path / "a 'project' $(x)",
        {"my script.py": "import json, sys; print(json.dumps(sys.argv[1:]))"},
    )
    given = [*AWKWARD, os.fsdecode(b"\xff")]
    (folder / os.fsdecode(b"\xfe.txt")).write_text("")
    pool = lab.write_pool(tmp_path / "pool.yaml")
    done = run_cli("launch", folder / "my script.py", "--pool", pool, "--quiet", "--", *given)
    assert done.code == 0, done.stderr
    said = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    assert [json.loads(line) for line in said] == [given] * 3
    assert not list(tmp_path.rglob("pwned"))
    for machine in lab.machines:
        assert len(list(machine.home.rglob(os.fsdecode(b"\xfe.txt")))) == 1


def test_this_machine_takes_part_beside_others(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    """Without SSH to itself, and at the address where the others reach it."""
    code = "import os; print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'])"
    fill(tmp_path, {"p/show.py": code})
    machine = lab.machines[2]
    pool = tmp_path / "pool.yaml"
    other = {
        "host": machine.name,
        "port": machine.port,
        "user": "root",
        "python": sys.executable,
    }
    pool.write_text(json.dumps({"hosts": [{"host": "localhost"}, other]}), encoding="utf-8")
    done = run_cli("launch", "p/show.py", "--pool", pool)
    assert done.code == 0, done.stderr
    here = machine.name.rsplit(".", 1)[0] + ".254"
    assert f"[worker 0 localhost] {here} {lab.bridges[0]}" in done.stdout
    assert f"[worker 1 {machine.name}] {here} eth0" in done.stdout
    done = run_cli("doctor", "--pool", pool, "--json")
    assert done.code == 0, done.stdout
    told = json.loads(done.stdout)
    assert [host["address"] for host in told["hosts"]] == [here, machine.name]
    assert all(pair["mbit_s"] for pair in told["pairs"])


def test_more_processes_than_a_connection_takes(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    """OpenSSH opens ten sessions a connection; a machine may have more cores than that."""
    fill(tmp_path, {"p/rank.py": "import os; print('local', os.environ['LOCAL_RANK'])"})
    # One with an older Python, where there is one here.
    older = shutil.which("pypy3") or "python3"
    pool = lab.write_pool(tmp_path / "pool.yaml", h1={"workers": 12}, h2={"python": older})
    done = run_cli("launch", "p/rank.py", "--pool", pool)
    assert done.code == 0, done.stderr
    name = lab.machines[0].name
    said = {line for line in done.stdout.splitlines() if f" {name}] local " in line}
    assert said == {f"[worker {i} {name}] local {i}" for i in range(12)}


WAIT = "import os, time\nprint('up', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"


def start_waiting(lab: Lab, start_cli: StartCli, tmp_path: Path, script: str = WAIT) -> Any:
    fill(tmp_path, {"p/wait.py": script})
    pool = lab.write_pool(tmp_path / "pool.yaml", all={"python": sys.executable})
    command = start_cli("launch", "p/wait.py", "--pool", pool, "--out", "run")
    wait_until(lambda: command.so_far().count("] up") == 3, "all three are up", 60)
    return command


def all_gone(lab: Lab) -> bool:
    return not lab.find_left()


TRAIN = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
dist.barrier()
print("up", flush=True)
while True:
    dist.all_reduce(torch.ones(1000))
"""


@pytest.mark.parametrize("how", ["power", pytest.param("cable", marks=pytest.mark.slow)])
def test_lost_machine_ends_the_job_and_is_named(
    lab: Lab, start_cli: StartCli, tmp_path: Path, how: str
) -> None:
    """In the middle of an all-reduce; the others would fail or hang, the lost one is the cause."""
    command = start_waiting(lab, start_cli, tmp_path, TRAIN)
    victim = lab.machines[1]
    began = time.monotonic()
    if how == "power":
        victim.kill()
    else:
        victim.cut_off()
    done = command.wait(20)
    assert time.monotonic() - began < 15
    assert done.code == 1
    assert done.last_line == f"paceline: host {victim.name} was lost, with worker 1"
    wait_until(lambda: all_gone(lab), "nothing is left on any machine", 15)
    assert time.monotonic() - began < 20


def test_first_failure_ends_the_others(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '2': sys.exit(5)\ntime.sleep(600)"
    fill(tmp_path, {"p/fail.py": code})
    done = run_cli("launch", "p/fail.py", "--pool", lab.write_pool(tmp_path / "pool.yaml"))
    assert done.code == 5
    assert done.last_line == (
        f"paceline: worker 2 on {lab.machines[2].name} failed with exit status 5"
    )
    assert all_gone(lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_launcher_leaves_nothing(
    lab: Lab, start_cli: StartCli, tmp_path: Path, number: signal.Signals
) -> None:
    command = start_waiting(lab, start_cli, tmp_path)
    os.kill(command.pid, number)
    done = command.wait(15)
    wait_until(lambda: all_gone(lab), "nothing is left on any machine", 15)
    if number != signal.SIGKILL:
        assert done.code == 130


def test_second_launch_of_a_running_project_is_refused(
    lab: Lab, start_cli: StartCli, run_cli: RunCli, tmp_path: Path
) -> None:
    command = start_waiting(lab, start_cli, tmp_path)
    done = run_cli("launch", "p/wait.py", "--pool", tmp_path / "pool.yaml", "--out", "second")
    assert done.code == 1
    assert "another launch of this project is in progress" in done.stderr
    os.kill(command.pid, signal.SIGINT)
    command.wait(15)


def test_machine_that_cannot_be_used_is_named(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    fill(tmp_path, {"p/x.py": "print('ran')"})
    pool = lab.write_pool(tmp_path / "pool.yaml")
    lab.lock_out(lab.machines[2])
    done = run_cli("launch", "p/x.py", "--pool", pool, "--out", "run")
    assert done.code == 1
    assert done.last_line.startswith(
        f"paceline: host {lab.machines[2].name}: no local key is accepted for root: try "
    )
    assert "ran" not in done.stdout
    lab.machines[0].kill()
    done = run_cli("launch", "p/x.py", "--pool", pool, "--out", "run2")
    names = f"{lab.machines[0].name}, {lab.machines[2].name}"
    assert f"2 of 3 machines cannot be used: {names}" in done.last_line


@pytest.mark.slow
def test_environment_is_made_from_requirements(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    code = "import sys; print('prefix', sys.prefix)"
    fill(tmp_path, {"p/x.py": code, "p/requirements.txt": "# nothing to fetch\n"})
    pool = lab.write_pool(tmp_path / "pool.yaml", all={"python": os.path.realpath(sys.executable)})
    for round_ in range(2):
        done = run_cli("launch", "p/x.py", "--pool", pool, "--venv", "--out", f"run{round_}")
        assert done.code == 0, done.stderr
        said = [line for line in done.stdout.splitlines() if "] prefix " in line]
        for machine in lab.machines:
            assert sum(f"prefix {machine.home}/.paceline/launch/p-" in line for line in said) == 1
    log = (tmp_path / f"run1/logs/venv-{lab.machines[0].name}.log").read_text()
    assert log == "the environment already exists\n"

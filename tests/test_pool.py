"""Pools of machines: the file, the old blueprint, and which machines a selection takes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunCli
from network_namespaces import PASSWORD, Lab
from paceline.cluster.legacy_blueprint import is_blueprint, read_blueprint
from paceline.cluster.pool import SELECTIONS, Host, Pool, read_pool, select_hosts
from paceline.cluster.pool_file import load_pool, pool_from_mapping, write_pool
from paceline.errors import UsageError

EXAMPLES = Path(__file__).parents[1] / "examples"
PUBLISHED = {"all": "abcde", "gpu": "de", "cpu": "abc", "energy": "ab"}

AS_PRINTED = """{
"connections":[
{
"IP": "10.0.0.1"
"Password": "s3cret,{one}"
"GPUS": 0
"energy efficient": yes
},
{
"IP": \u201c10.0.0.2\u201d,
"username": "ada",
"Password": bare-s3cret
"GPUS": 1
"energy_efficient": no,
}
]
}
"""


def write(folder: Path, text: str, name: str = "pool.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_pool(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- selections ------------------------------------------------------------------------------


@pytest.mark.parametrize("word", PUBLISHED)
def test_published_selections(word: str) -> None:
    pool = read_pool(EXAMPLES / "published-pool.yaml")
    assert "".join(host.host for host in select_hosts(pool, [word])) == PUBLISHED[word]


def test_nothing_said_selects_all() -> None:
    assert len(select_hosts(read_pool(EXAMPLES / "published-pool.yaml"), [])) == 5


def test_empty_selection_is_the_users_mistake() -> None:
    pool = pool_from_mapping({"hosts": [{"host": "a"}, {"host": "b"}]}, "p")
    with pytest.raises(UsageError) as caught:
        select_hosts(pool, ["gpu"])
    assert str(caught.value) == (
        "--select gpu: no machine in the pool has a GPU; "
        "selections that match some of its 2 machines: all, cpu"
    )
    assert caught.value.exit_code == 2


def test_selections_cannot_be_combined() -> None:
    pool = read_pool(EXAMPLES / "published-pool.yaml")
    with pytest.raises(UsageError, match="--select gpu and --select cpu cannot be combined: "):
        select_hosts(pool, ["gpu", "cpu"])
    with pytest.raises(UsageError, match="unknown --select 'gpux'; did you mean 'gpu'"):
        select_hosts(pool, ["gpux"])


def test_flags_of_the_study_and_names_select_too() -> None:
    pool = read_pool(EXAMPLES / "published-pool.yaml")
    for word in ("gpu", "cpu"):
        assert select_hosts(pool, [f"{word}s"]) == select_hosts(pool, [word])
    assert [host.host for host in select_hosts(pool, ["d, b"])] == ["b", "d"]
    with pytest.raises(UsageError, match="--select x is not in the pool; known machines: a, b"):
        select_hosts(pool, ["a,x"])


def test_published_memory() -> None:
    pool = read_pool(EXAMPLES / "published-pool.yaml")
    assert [host.memory_gb for host in pool.hosts] == [8, 8, 32, 12, 32]


def test_one_worker_per_gpu_unless_configured() -> None:
    hosts = [
        {"host": "a"},
        {"host": "b", "gpus": [{"count": 3}, {"count": 1}]},
        {"host": "c", "gpus": [{"count": 4}], "workers": 1},
        {"host": "d", "workers": 2},
    ]
    pool = pool_from_mapping({"hosts": hosts}, "p")
    assert [host.workers for host in pool.hosts] == [1, 4, 1, 2]
    for text in (pool.to_yaml(), json.dumps(pool.to_plain())):
        assert pool_from_mapping(yaml.safe_load(text), "again") == pool
    assert "workers" not in pool.to_plain()["hosts"][1]
    blueprint = '{"connections": [{"IP": "10.0.0.1", "GPUS": 4, "energy_efficient": "no"}]}'
    plain, _ = read_blueprint(blueprint, "b")
    assert pool_from_mapping(plain, "b").hosts[0].workers == 4


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_gpu_and_cpu_divide_a_pool(machines: list[tuple[int, bool]]) -> None:
    hosts = [
        {"host": f"h{i}", "gpus": [{"count": gpus}] if gpus else [], "energy_efficient": green}
        for i, (gpus, green) in enumerate(machines)
    ]
    pool = pool_from_mapping({"hosts": hosts}, "random")
    sets: dict[str, set[str]] = {}
    for word in SELECTIONS:
        try:
            sets[word] = {host.host for host in select_hosts(pool, [word])}
        except UsageError:
            sets[word] = set()
    assert sets["gpu"] | sets["cpu"] == sets["all"] == {host.host for host in pool.hosts}
    assert not sets["gpu"] & sets["cpu"]
    assert sets["energy"] == {f"h{i}" for i, (_, green) in enumerate(machines) if green}


# ---- pool files ------------------------------------------------------------------------------


def test_yaml_and_json_are_the_same_pool(tmp_path: Path) -> None:
    text = (EXAMPLES / "published-pool.yaml").read_text(encoding="utf-8")
    as_json = write(tmp_path, json.dumps(yaml.safe_load(text)), "pool.json")
    assert read_pool(as_json) == read_pool(EXAMPLES / "published-pool.yaml")


def test_written_pool_reads_back(tmp_path: Path) -> None:
    for name in ("pool.yaml", "pool.json"):
        path = write(tmp_path, '{"hosts": [{"host": "a", "cores": 4}]}', name)
        found = load_pool(path)
        host = found.pool.hosts[0].model_copy(update={"gflops": 12.5})
        write_pool(found, found.pool.model_copy(update={"hosts": (host,)}))
        assert read_pool(path).hosts[0].gflops == 12.5
        assert load_pool(path).form == name.split(".")[1]


@given(
    st.lists(
        st.builds(
            dict,
            user=st.none() | st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True),
            port=st.integers(1, 65535),
            cores=st.integers(1, 512),
            energy_efficient=st.booleans(),
            gflops=st.floats(0.001, 1e6),
            labels=st.lists(st.text(max_size=12), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_pool_survives_yaml(machines: list[dict[str, Any]]) -> None:
    pool = Pool(hosts=tuple(Host(host=f"h{i}", **facts) for i, facts in enumerate(machines)))
    assert pool_from_mapping(yaml.safe_load(pool.to_yaml()), "again") == pool


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts:\n- host: a\n- host: b\n  speed: 0\n", "line 4: hosts.1.speed is 0: "),
        (
            "hosts:\n- host: a\n  coers: 4\n",
            "line 3: hosts.0.coers is unknown: did you mean 'cores'?",
        ),
        ("hosts:\n- user: ada\n", "line 2: hosts.0.host is missing"),
        ("hosts: []\n", "line 1: hosts is []: "),
        ("hosts:\n- host: [a\n", "line 3: "),
        ("hosts:\n- host: a\n- host: a\n", ": host 'a' is listed twice; set workers: 2 instead"),
        ("just words\n", ": must be a mapping with 'hosts', but contains a str"),
        ("", ": must be a mapping with 'hosts', but contains nothing"),
        ("hosts:\n- host: -oProxyCommand=x\n", "line 2: hosts.0.host is '-oProxyCommand=x': "),
        ("hosts:\n- host: a\n  link: {mbit_s: -1}\n", "line 3: hosts.0.link.mbit_s is -1: "),
    ],
)
def test_malformed_pool_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write(tmp_path, text))


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, '{"hosts":\n [{"host": "a"}\n', "pool.json")
    assert f"pool {path}, line 3: " in refusal(path)


def test_missing_pool_is_told(tmp_path: Path) -> None:
    message = refusal(tmp_path / "none.yaml")
    assert message == f"pool {tmp_path}/none.yaml cannot be read: No such file or directory"


@pytest.mark.parametrize(
    "text",
    [
        "hosts:\n- host: a\n  password: s3cret\n",
        "hosts:\n- host: a\n  Password: 's3cret\n",
        "hosts:\n- host: a\n  password: [s3cret\n",
        "hosts: s3cret\n",
        '{"hosts": [{"host": "a", "Password": "s3cret"}]}',
    ],
)
def test_refused_pool_never_shows_a_password(tmp_path: Path, text: str) -> None:
    message = refusal(write(tmp_path, text))
    if "assword" in text.split("s3cret")[0]:
        assert "s3cret" not in message


# ---- blueprints ------------------------------------------------------------------------------


def test_blueprint_as_printed(tmp_path: Path) -> None:
    found = load_pool(write(tmp_path, AS_PRINTED, "blueprint.json"))
    assert found.form == "blueprint"
    first, second = found.pool.hosts
    assert (first.host, first.user, first.gpu_count, first.energy_efficient) == (
        "10.0.0.1",
        None,
        0,
        True,
    )
    assert (second.host, second.user, second.gpu_count, second.energy_efficient) == (
        "10.0.0.2",
        "ada",
        1,
        False,
    )
    assert found.repairs == (
        "missing commas inserted (lines 4, 5, 6, 12, 13)",
        "extra commas removed (line 14)",
        "typographic quotes read as plain ones (line 10)",
        "unquoted yes read as true (line 7)",
        "unquoted no read as false (line 14)",
        "connection 1 (10.0.0.1) has no username: the name of the current user is used",
        "2 passwords were dropped: run `paceline pool keys` to install a key instead",
    )
    everything = repr(found) + found.pool.to_yaml()
    assert "s3cret" not in everything


def test_whole_blueprint_needs_no_repair_but_its_password() -> None:
    machine = {"IP": "h", "username": "u", "Password": "s3cret", "GPUS": 2}
    plain, repairs = read_blueprint(json.dumps({"connections": [machine]}), "b")
    assert plain == {"hosts": [{"host": "h", "user": "u", "gpus": [{"count": 2}]}]}
    assert len(repairs) == 1


@pytest.mark.parametrize("key", ["energy efficient", "energy_efficient", "Energy Efficient"])
@pytest.mark.parametrize("value", ["true", "yes", '"yes"', "True"])
def test_energy_is_read_however_it_is_written(key: str, value: str) -> None:
    text = f'{{"connections": [{{"IP": "h", "username": "u", "GPUS": 0, "{key}": {value}}}]}}'
    plain, _ = read_blueprint(text, "b")
    assert plain["hosts"][0]["energy_efficient"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"connections": []}', "blueprint b: 'connections' must be a list of machines"),
        ('{"connections": [{"GPUS": 1}]}', "blueprint b: connection 1 has no 'IP'"),
        ('{"connections": [{"IP": "h", "GPUS": -1}]}', "GPUS must be a non-negative integer"),
        ('{"connections": [{"IP": "h"', "line 1: missing closing '}'"),
        ('{"connections":\n[{"IP": "h}]}', "blueprint b, line 2: unterminated quote"),
        ('{"connections": [{"IP": "h"}]} x', "unexpected text after the closing brace"),
        ('{"connections": [{"IP": "h", "energy efficient": 7}]}', "must be yes or no"),
    ],
)
def test_blueprint_that_cannot_be_guessed(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_blueprint(text, "b")
    assert message in str(caught.value)


MACHINE = st.fixed_dictionaries(
    {
        "Password": st.text(
            st.characters(min_codepoint=33, max_codepoint=126), min_size=6, max_size=12
        ).map(lambda word: f"PW{word}PW"),
        "GPUS": st.integers(0, 8),
        "energy efficient": st.booleans(),
    }
)


@given(st.lists(MACHINE, min_size=1, max_size=5), st.data())
def test_torn_blueprints_are_read_and_hide_passwords(
    machines: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Any commas between lines may be missing, booleans may be bare words."""
    lines = ['{"connections": [']
    for i, machine in enumerate(machines):
        lines += ["{", f'"IP": "10.0.0.{i}",']
        for key, value in machine.items():
            word = json.dumps(value)
            if isinstance(value, bool) and data.draw(st.booleans()):
                word = "yes" if value else "no"
            lines.append(f"{json.dumps(key)}: {word}{data.draw(st.sampled_from([',', '']))}")
        lines.append(data.draw(st.sampled_from(["}", "},"])))
    lines.append("]}")
    text = "\n".join(lines)
    assert is_blueprint(text)
    plain, repairs = read_blueprint(text, "b")
    pool = pool_from_mapping(plain, "b")
    assert [host.gpu_count for host in pool.hosts] == [m["GPUS"] for m in machines]
    assert [h.energy_efficient for h in pool.hosts] == [m["energy efficient"] for m in machines]
    for machine in machines:
        assert machine["Password"] not in "\n".join([*repairs, pool.to_yaml(), repr(plain)])


@given(st.text(alphabet='{}[]",:\n yesno01\\x', max_size=60))
def test_any_rubbish_is_refused_in_one_line(rubbish: str) -> None:
    text = '{"connections": ' + rubbish
    message = ""
    try:
        plain, _ = read_blueprint(text, "b")
        pool_from_mapping(plain, "b")
    except UsageError as error:
        message = str(error)
    assert "\n" not in message


# ---- the command line ------------------------------------------------------------------------


def test_show_and_convert(run_cli: RunCli, tmp_path: Path) -> None:
    blueprint = write(tmp_path, AS_PRINTED, "blueprint.json")
    done = run_cli("pool", "convert", blueprint, "-o", "pool.yaml")
    assert done.code == 0, done.stderr
    assert "repaired: unquoted yes read as true (line 7)" in done.lines
    assert read_pool(tmp_path / "pool.yaml") == read_pool(blueprint)
    assert run_cli("pool", "convert", blueprint, "-o", "pool.yaml").code == 2
    done = run_cli("pool", "show", "pool.yaml", "--select", "energy")
    assert (done.code, done.stdout.splitlines()[-1]) == (0, "1 of 2 machines, 0 GPUs")
    done = run_cli("pool", "show", "pool.yaml", "--select", "gpu", "--select", "cpu")
    assert (done.code, len(done.lines)) == (2, 1)
    done = run_cli("doctor", "--pool", blueprint, "--write")
    assert done.code == 2
    assert "paceline pool convert" in done.last_line
    everything = "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.is_file() and path != blueprint
    )
    assert "s3cret" not in everything


def type_password(args: list[str], answers: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Run a command on a terminal of its own and answer what it asks: status, what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "paceline.cli.main", *args])
    shown, deadline = "", time.monotonic() + timeout_s
    waiting = dict(answers)
    try:
        while True:
            ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
            if not ready:
                pytest.fail(f"still asking after {timeout_s:g} s: {shown}")
            try:
                piece = os.read(terminal, 4096)
            except OSError:
                break  # the command has ended
            if not piece:
                break
            shown += piece.decode(errors="replace")
            for question, answer in list(waiting.items()):
                if question in shown:
                    os.write(terminal, answer.encode() + b"\n")
                    del waiting[question]
    finally:
        os.close(terminal)
        if waiting:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


def test_keys_are_installed_with_a_password(lab: Lab, run_cli: RunCli, tmp_path: Path) -> None:
    """One machine knows our key, one is given it, one refuses a wrong password."""
    first, second, third = lab.machines
    lab.lock_out(second)
    lab.lock_out(third)
    known = lab.home / ".ssh" / "known_hosts"
    lines = known.read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if second.name not in line))
    pool = lab.write_pool(tmp_path / "pool.yaml")
    code, shown = type_password(
        ["pool", "keys", str(pool)],
        {
            "is that right?": "y",
            f"password of root@{second.name}: ": PASSWORD,
            f"password of root@{third.name}: ": "wrong",
        },
        60,
    )
    assert code == 1
    assert f"{first.name} already accepts a key" in shown
    assert f"{second.name} now accepts {lab.key}.pub" in shown
    assert f"host {third.name}: the password was not accepted" in shown
    assert PASSWORD not in shown
    assert PASSWORD not in known.read_text()
    installed = second.home / ".ssh" / "authorized_keys"
    assert installed.read_text() == lab.key.with_suffix(".pub").read_text()
    assert installed.stat().st_mode & 0o777 == 0o600
    done = run_cli("pool", "keys", pool, "--host", second.name)
    assert (done.code, done.stdout) == (0, f"{second.name} already accepts a key\n")
    done = run_cli("pool", "keys", pool, "--host", "nobody")
    assert done.code == 2


def test_this_machine_needs_no_key(run_cli: RunCli, tmp_path: Path) -> None:
    pool = write(tmp_path, "hosts:\n- host: localhost\n")
    assert run_cli("pool", "keys", pool).stdout == "localhost does not need a key\n"


def test_missing_asyncssh_is_one_clear_line(tmp_path: Path) -> None:
    """As where Paceline was installed without its extra."""
    code = (
        "import sys; sys.modules['asyncssh'] = None\n"
        "sys.argv = ['paceline', 'doctor', '--pool', sys.argv[1]]\n"
        "from paceline.cli.main import main; main()"
    )
    pool = write(tmp_path, "hosts:\n- host: elsewhere\n")
    done = subprocess.run(
        [sys.executable, "-c", code, str(pool)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "paceline: SSH requires the package asyncssh; install paceline[ssh]"
    )

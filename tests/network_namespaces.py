"""Three machines on this one: network namespaces with their own SSH server, home and password.

They share the file system's programs and nothing else that matters: each has its own addresses,
interfaces, firewall, host name, home folder and `/etc/shadow`. Needs root, a kernel that allows
namespaces and bridges, and Debian's openssh-server, iproute2 and iptables; `why_not` says what is
missing. Everything is taken down again, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SSHD = "/usr/sbin/sshd"
PASSWORD = "correct horse 'battery' $(staple)"
READY_S = 20.0
TOOLS = {"ip": "iproute2", "iptables": "iptables", "unshare": "util-linux", "openssl": "openssl"}

CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile .ssh/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication yes
KbdInteractiveAuthentication no
MaxStartups 100:30:200
LogLevel ERROR
SetEnv PYTHONPATH={source}
Subsystem sftp internal-sftp
"""
SOURCE = Path(__file__).parents[1] / "src"


def run(*command: object, check: bool = True, timeout_s: float = 20.0) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=timeout_s
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why machines cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    missing += [] if Path(SSHD).exists() else ["openssh-server"]
    if missing:
        return f"Debian packages are missing: {' '.join(sorted(missing))}"
    name = f"plt{random.randrange(16**5):05x}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "bridge")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"the kernel allows no network namespaces or bridges here ({error})"
    finally:
        run("ip", "link", "del", name, check=False)
        run("ip", "netns", "del", name, check=False)
    return None


@dataclass
class Machine:
    name: str
    """As the pool calls it: its address."""
    namespace: str
    folder: Path
    port: int
    aside: str
    """Its address on the second network."""
    server: subprocess.Popen[bytes] | None = None

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def inside(self, command: str) -> str:
        return run("ip", "netns", "exec", self.namespace, *shlex.split(command))

    def pids(self) -> set[int]:
        """Everything that runs on it, its SSH server apart."""
        found = run("ip", "netns", "pids", self.namespace, check=False).split()
        own = {self.server.pid} if self.server else set()
        return {int(pid) for pid in found if not is_zombie(int(pid))} - own

    def commands(self) -> list[str]:
        """The command lines of all but SSH's own processes."""
        lines = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if line and not line.startswith("sshd"):
                    lines.append(f"{pid} {line.strip()[:200]}")
        return lines

    def start(self) -> None:
        script = (
            'mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/shadow" /etc/shadow && '
            'hostname "$2" && exec "$3" -D -e -f "$1/sshd_config"'
        )
        with (self.folder / "sshd.log").open("ab") as log:
            enter = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts"]
            self.server = subprocess.Popen(
                [*enter, "sh", "-c", script, "sh", str(self.folder), self.namespace, SSHD],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ["PATH"]},
            )
        deadline = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection((self.name, self.port), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > deadline or self.server.poll() is not None:
                    told = (self.folder / "sshd.log").read_text()
                    raise RuntimeError(f"no SSH server on {self.name}: {told}") from None
                time.sleep(0.02)

    def kill(self) -> None:
        """As if its power were cut: every process of it, at once.

        All are stopped before the first dies: an SSH server that still runs when a worker is gone
        reports that worker's end, which a machine without power cannot.
        """
        pids = [*self.pids(), *([self.server.pid] if self.server else [])]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if self.server is not None:
            self.server.wait(READY_S)
            self.server = None

    def cut_off(self, *, cut: bool = True) -> None:
        """Pull both cables, or plug them in again."""
        for link in ("eth0", "eth1"):
            run("ip", "-n", self.namespace, "link", "set", link, "down" if cut else "up")


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@dataclass
class Lab:
    folder: Path
    machines: list[Machine] = field(default_factory=list)
    bridges: list[str] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """The home of whoever sits in front of the machines: key, known hosts."""
        return self.folder / "home"

    @property
    def key(self) -> Path:
        return self.home / ".ssh" / "id_ed25519"

    def write_pool(self, path: Path, **changes: dict[str, Any]) -> Path:
        """A pool of all machines; `h2={...}` changes what it says of the second."""
        hosts = []
        for number, machine in enumerate(self.machines, start=1):
            facts = {"host": machine.name, "user": "root", "port": machine.port}
            hosts.append({**facts, **changes.get(f"h{number}", {}), **changes.get("all", {})})
        path.write_text(yaml.safe_dump({"hosts": hosts}), encoding="utf-8")
        return path

    def find_left(self) -> list[str]:
        return [f"{m.name}: {line}" for m in self.machines for line in m.commands()]

    def let_in(self, machine: Machine) -> None:
        """Put our public key where the machine looks for it."""
        folder = machine.home / ".ssh"
        folder.mkdir(parents=True, exist_ok=True)
        public = self.key.with_suffix(".pub").read_text()
        (folder / "authorized_keys").write_text(public)

    def lock_out(self, machine: Machine) -> None:
        (machine.home / ".ssh" / "authorized_keys").unlink(missing_ok=True)


def find_networks() -> tuple[str, str]:
    """Two networks of 10/8 that nothing here uses."""
    used = run("ip", "-4", "addr") + run("ip", "route")
    while True:
        first = f"10.{random.randrange(64, 128)}.{random.randrange(256)}"
        second = f"10.{random.randrange(128, 192)}.{random.randrange(256)}"
        if f" {first}." not in used and f" {second}." not in used:
            ipaddress.ip_network(f"{first}.0/24")
            return first, second


@contextlib.contextmanager
def make_lab(folder: Path, count: int = 3) -> Iterator[Lab]:
    lab = Lab(folder)
    tag = f"pl{random.randrange(16**4):04x}"
    try:
        build(lab, tag, count)
        yield lab
    finally:
        for machine in lab.machines:
            with contextlib.suppress(Exception):
                machine.kill()
        for machine in lab.machines:
            # Cables first: the kernel keeps a namespace, and with it these, for as long as it
            # tries to send what was under way when a test pulled them.
            for number in range(len(lab.bridges)):
                run("ip", "link", "del", f"{machine.namespace}v{number}", check=False)
            run("ip", "netns", "del", machine.namespace, check=False)
        for bridge in lab.bridges:
            run("ip", "link", "del", bridge, check=False)


def build(lab: Lab, tag: str, count: int) -> None:
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    networks = find_networks()
    (lab.home / ".ssh").mkdir(parents=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", lab.key)
    for number in range(len(networks)):
        bridge = f"{tag}b{number}"
        run("ip", "link", "add", bridge, "type", "bridge")
        lab.bridges.append(bridge)
        run("ip", "link", "set", bridge, "up")
    run("ip", "addr", "add", f"{networks[0]}.254/24", "dev", lab.bridges[0])
    shadow = run("openssl", "passwd", "-6", PASSWORD).strip()
    known = []
    for index in range(1, count + 1):
        name = f"{tag}h{index}"
        machine = Machine(
            name=f"{networks[0]}.{index}",
            namespace=name,
            folder=lab.folder / name,
            port=22 if index < 3 else 2200 + index,
            aside=f"{networks[1]}.{index}",
        )
        machine.home.mkdir(parents=True)
        run("ip", "netns", "add", name)
        lab.machines.append(machine)
        for number, address in enumerate((machine.name, machine.aside)):
            outer, inner = f"{name}v{number}", f"eth{number}"
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            run("ip", "link", "set", outer, "master", lab.bridges[number], "up")
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", inner)
            run("ip", "-n", name, "link", "set", inner, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", machine.folder / "host_key")
        public = (machine.folder / "host_key.pub").read_text().split()
        label = machine.name if machine.port == 22 else f"[{machine.name}]:{machine.port}"
        known.append(f"{label} {public[0]} {public[1]}\n")
        config = CONFIG.format(
            port=machine.port, address=machine.name, folder=machine.folder, source=SOURCE
        )
        (machine.folder / "sshd_config").write_text(config)
        write_accounts(machine, shadow)
        lab.let_in(machine)
    (lab.home / ".ssh" / "known_hosts").write_text("".join(known))
    for machine in lab.machines:
        machine.start()


def write_accounts(machine: Machine, shadow: str) -> None:
    """The machine's own passwd and shadow: root lives in its own home and has a password."""
    lines = Path("/etc/passwd").read_text().splitlines()
    root = f"root:x:0:0:root:{machine.home}:/bin/bash"
    (machine.folder / "passwd").write_text(
        "\n".join([root, *(line for line in lines if not line.startswith("root:"))]) + "\n"
    )
    lines = Path("/etc/shadow").read_text().splitlines()
    secret = f"root:{shadow}:19000:0:99999:7:::"
    (machine.folder / "shadow").write_text(
        "\n".join([secret, *(line for line in lines if not line.startswith("root:"))]) + "\n"
    )
    (machine.folder / "shadow").chmod(0o600)

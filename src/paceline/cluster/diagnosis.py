"""Rules that derive problems of a pool, with a fix for each, from the results of an examination.

The rules do no I/O, so they can be tested in isolation.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.cluster.doctor import Examination, MachineExamination, MachinePair
from paceline.cluster.shell import format_ssh_command

MIN_DISK_BYTES = 1e9
MAX_CLOCK_OFFSET_S = 1.0
"""Above this, the records of several machines cannot be compared."""
BUSY_FRACTION = 0.5
SLOW_LINK_FRACTION = 1 / 3


@dataclass(frozen=True)
class Problem:
    """A problem of one machine.

    `error`: a job on all machines is likely to fail. `warning`: it may run slowly.
    """

    host: str
    kind: str
    what: str
    fix: str
    level: Literal["error", "warning"] = "error"


def _problem(
    machine: MachineExamination,
    kind: str,
    what: str,
    command: str,
    level: Literal["error", "warning"] = "error",
) -> Problem:
    """Returns a problem that a command on the machine fixes or explains."""
    return Problem(machine.name, kind, what, format_ssh_command(machine.host, command), level)


def diagnose(found: Examination) -> list[Problem]:
    """Returns all problems in the order of the machines, errors first."""
    problems = [
        *_unreachable(found),
        *_versions(found),
        *_hardware(found),
        *_drivers(found),
        *_clocks(found),
        *_routes(found),
        *_mtus(found),
        *_ports(found),
        *_links(found),
        *_steps(found),
    ]
    order = {machine.name: index for index, machine in enumerate(found.machines)}
    return sorted(problems, key=lambda p: (p.level != "error", order[p.host]))


def _unreachable(found: Examination) -> Iterator[Problem]:
    for machine in found.machines:
        if (error := machine.error) is not None:
            yield Problem(machine.name, error.kind, error.problem, error.fix)


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _versions(found: Examination) -> Iterator[Problem]:
    machines = found.present
    if len(machines) < 2:
        return
    usual = statistics.mode([_short(machine.facts["python"]) for machine in machines])
    install = f"sudo apt-get install -y python{usual} python{usual}-venv"
    for machine in machines:
        python, executable = machine.facts["python"], machine.facts["executable"]
        if _short(python) != usual:
            what = f"Python {python} ({executable}), the others have {usual}"
            fix = format_ssh_command(machine.host, install)
            fix += f"; in the pool file: python: python{usual}"
            yield Problem(machine.name, "python", what, fix)
    # Packages belong to an interpreter; they are checked again once it is the right one.
    machines = [machine for machine in machines if _short(machine.facts["python"]) == usual]
    for package in machines[0].facts["packages"]:
        have = [m.facts["packages"].get(package) for m in machines]
        if not any(have):
            continue
        version = statistics.mode([v for v in have if v])
        for machine, installed in zip(machines, have, strict=True):
            if installed == version:
                continue
            requirement = f"{package}=={version.split('+')[0]}"
            what = f"{package} is missing" if installed is None else f"{package} {installed}"
            install = f"{machine.host.python or 'python3'} -m pip install {requirement}"
            yield _problem(machine, "package", f"{what}, the others have {version}", install)


def _hardware(found: Examination) -> Iterator[Problem]:
    for machine in found.present:
        facts, host = machine.facts, machine.host
        broken = [gpu["error"] for gpu in facts["gpus"] if "error" in gpu]
        working = len(facts["gpus"]) - len(broken)
        if broken:
            yield _problem(machine, "gpu", broken[0], "nvidia-smi; sudo reboot")
        elif working != host.gpu_count and host.gpu_count:
            what = f"the pool file lists {host.gpu_count} GPUs, but {working} respond"
            yield _problem(machine, "gpu", what, "nvidia-smi")
        free, load, cores = facts["disk_free_bytes"], facts["load"], facts["cores"]
        if free < MIN_DISK_BYTES:
            what = (
                f"only {free / 1e9:.2f} GB of disk space are free in {facts['home']}; "
                "at least 1 GB is required"
            )
            yield _problem(machine, "disk", what, "du -xsh ~/* ~/.cache | sort -h | tail")
        if load > BUSY_FRACTION * cores:
            what = f"other programs are using the CPU: load {load:.1f} on {cores} cores"
            command = "ps -eo pcpu,user,comm --sort=-pcpu | head"
            yield _problem(machine, "busy", what, command, "warning")


def _drivers(found: Examination) -> Iterator[Problem]:
    drivers = {
        machine.name: gpu["driver"]
        for machine in found.present
        for gpu in machine.facts["gpus"]
        if "driver" in gpu
    }
    usual = statistics.mode(drivers.values()) if drivers else ""
    for name, driver in drivers.items():
        if driver != usual:
            what = f"GPU driver {driver}, the others have {usual}"
            upgrade = "sudo apt-get install --only-upgrade nvidia-driver"
            yield _problem(found.of(name), "driver", what, upgrade, "warning")


def _clocks(found: Examination) -> Iterator[Problem]:
    for machine in found.present:
        offset = machine.clock_offset_s
        if offset is not None and abs(offset) - machine.clock_error_s > MAX_CLOCK_OFFSET_S:
            word = "ahead of" if offset > 0 else "behind"
            what = f"its clock is {abs(offset):.1f} s {word} this machine's"
            yield _problem(machine, "clock", what, "sudo timedatectl set-ntp true")


def _routes(found: Examination) -> Iterator[Problem]:
    """Compares the routes chosen by the kernel with the addresses that the machines use."""
    for machine in found.present:
        skewed: dict[tuple[str, str], list[str]] = {}
        for other, route in machine.routes.items():
            source = route["source"]
            if source is None:
                address = found.of(other).address
                what = f"no route to {other} ({address})"
                yield _problem(machine, "route", what, f"ip route get {address}")
            elif source != machine.address:
                skewed.setdefault((source, route["interface"] or "?"), []).append(other)
        usual = machine.addresses.get(machine.address or "")
        for (source, interface), others in skewed.items():
            named = ", ".join(others)
            if usual is None:
                what = (
                    f"its address {machine.address} is not on any of its interfaces (NAT): "
                    f"{named} see {source} ({interface})"
                )
                yield Problem(machine.name, "interface", what, f"in the pool file: host: {source}")
                continue
            commands = [
                f"sudo ip route replace {found.of(other).address} dev {usual} src {machine.address}"
                for other in others
            ]
            what = (
                f"it connects to {named} from {source} ({interface}), "
                f"but the others connect to it at {machine.address} ({usual})"
            )
            yield _problem(machine, "interface", what, " && ".join(commands))


def _mtus(found: Examination) -> Iterator[Problem]:
    used = [
        (str(route["mtu"]), route["interface"], machine)
        for machine in found.present
        for route in machine.routes.values()
        if route["mtu"] and route["source"] == machine.address
    ]
    usual = statistics.mode([size for size, _, _ in used]) if used else ""
    reported = set()
    for size, interface, machine in used:
        if size != usual and (size, interface, machine.name) not in reported:
            reported.add((size, interface, machine.name))
            what = f"MTU of {size} bytes on {interface}, the others have {usual}"
            command = f"sudo ip link set dev {interface} mtu {usual}"
            yield _problem(machine, "mtu", what, command, "warning")


def _ports(found: Examination) -> Iterator[Problem]:
    for machine in found.present:
        for port, actual in machine.listening.items():
            if actual is None:
                what = f"port {port} is in use by another program"
                command = f"sudo ss -ltnp 'sport = :{port}'"
                yield _problem(machine, "port", what, command, "warning")
    tried = sorted({port for pair in found.pairs for port in pair.reached})
    for port in tried:
        blocked = [p for p in found.pairs if p.reached.get(port, "ok") != "ok"]
        silent = _blocked_outbound(found, blocked, port)
        for name in silent:
            targets = ", ".join(p.target for p in blocked if p.source == name)
            what = (
                f"it cannot reach {f'port {port}' if port else 'ephemeral ports'} on any machine "
                f"({targets}), although others can: its own firewall blocks outgoing connections"
            )
            yield _problem(found.of(name), "port", what, "sudo iptables -L OUTPUT -n -v")
        rest = [p for p in blocked if p.source not in silent]
        for name in dict.fromkeys(p.target for p in rest):
            yield _blocked(found, name, port, [p for p in rest if p.target == name])


def _blocked_outbound(found: Examination, blocked: list[MachinePair], port: int) -> list[str]:
    """Returns machines that reach no other machine, although those are reachable from others."""
    names = []
    for machine in found.machines:
        mine = [p for p in found.pairs if p.source == machine.name and port in p.reached]
        reached_by_others = {
            p.target
            for p in found.pairs
            if p.source != machine.name and p.reached.get(port) == "ok"
        }
        if len(mine) > 1 and all(p in blocked and p.target in reached_by_others for p in mine):
            names.append(machine.name)
    return names


def _blocked(found: Examination, name: str, port: int, pairs: list[MachinePair]) -> Problem:
    machine = found.of(name)
    sources = [found.of(p.source) for p in pairs]
    allowed = ",".join(source.address or source.name for source in sources)
    label = f"port {port}" if port else f"ephemeral ports ({machine.listening[0]})"
    results = ", ".join(f"{p.source}: {p.reached[port]}" for p in pairs)
    ports = f" --dport {port}" if port else ""
    rule = f"sudo iptables -I INPUT -p tcp -s {allowed}{ports} -j ACCEPT"
    return _problem(machine, "port", f"{label} blocked from {results}", rule)


def _links(found: Examination) -> Iterator[Problem]:
    best = {
        machine.name: max(rates)
        for machine in found.present
        if (rates := link_rates(found, machine.name))
    }
    if len(best) < 3:
        return  # With two machines it is unknown which one is slow.
    usual = statistics.median(best.values())
    for name, rate in best.items():
        if rate < SLOW_LINK_FRACTION * usual:
            machine = found.of(name)
            interface = next((r["interface"] for r in machine.routes.values()), None) or "eth0"
            compared = f"{rate * 8 / 1e6:.0f} Mbit/s, the others {usual * 8 / 1e6:.0f}"
            what = f"link {interface} carries {compared}"
            yield _problem(machine, "link", what, f"sudo ethtool {interface}", "warning")


def link_rates(found: Examination, name: str) -> list[float]:
    """Returns bytes per second between a machine and each other one, in the slower direction."""
    rates: dict[str, list[float]] = {}
    for pair in found.pairs:
        if name in (pair.source, pair.target) and pair.bytes_per_s:
            other = pair.target if pair.source == name else pair.source
            rates.setdefault(other, []).append(pair.bytes_per_s)
    return [min(both) for both in rates.values()]


def _steps(found: Examination) -> Iterator[Problem]:
    for machine in found.present:
        steps = machine.steps or {}
        if "missing" in steps:
            python = machine.host.python or "python3"
            what = f"cannot time the job's model: {steps['missing']}"
            yield _problem(machine, "package", what, f"{python} -m pip install paceline")
        elif "failed" in steps:
            fix = "set another --data-dir, or copy the data to this machine"
            yield Problem(machine.name, "job", f"the job does not run: {steps['failed']}", fix)

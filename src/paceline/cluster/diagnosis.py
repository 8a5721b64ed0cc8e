"""What is wrong with a pool, told from what an examination found: the machine, why, and the remedy.

No input or output: the rules can be read, and tested, by themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.cluster.doctor import Examination, MachineExamination, MachinePair
from paceline.cluster.shell import format_ssh_command

GIGA = 1e9
LEAST_DISK_BYTES = 1e9
CLOCK_S = 1.0
"""With more, what several machines recorded cannot be put side by side."""
BUSY_SHARE = 0.5
SLOW_LINK = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`error`: a job over all machines is likely to fail. `warning`: it may suffer."""

    host: str
    kind: str
    what: str
    fix: str
    level: Literal["error", "warning"] = "error"


def diagnose(found: Examination) -> list[Problem]:
    """All problems, machine by machine, errors first."""
    problems = [
        *_unreachable(found),
        *_versions(found),
        *_hardware(found),
        *_clocks(found),
        *_routes(found),
        *_ports(found),
        *_links(found),
        *_steps(found),
    ]
    order = {machine.name: place for place, machine in enumerate(found.machines)}
    return sorted(problems, key=lambda p: (p.level != "error", order[p.host]))


def _present(found: Examination) -> list[MachineExamination]:
    return [machine for machine in found.machines if machine.facts]


def _unreachable(found: Examination) -> Iterator[Problem]:
    for machine in found.machines:
        if machine.error is not None:
            error = machine.error
            yield Problem(host=machine.name, kind=error.kind, what=error.problem, fix=error.fix)


def _usual(values: list[str]) -> str:
    """What most machines have; of several equally common the first machine's."""
    return max(values, key=lambda value: (values.count(value), -values.index(value)))


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _versions(found: Examination) -> Iterator[Problem]:
    machines = _present(found)
    if len(machines) < 2:
        return
    usual = _usual([_short(machine.facts["python"]) for machine in machines])
    for machine in machines:
        if _short(machine.facts["python"]) != usual:
            install = f"sudo apt-get install -y python{usual} python{usual}-venv"
            yield Problem(
                host=machine.name,
                kind="python",
                what=f"Python {machine.facts['python']} ({machine.facts['executable']}), "
                f"the others have {usual}",
                fix=f"{format_ssh_command(machine.host, install)}; "
                f"in the pool: python: python{usual}",
            )
    # Packages belong to an interpreter: with the right one they are looked at again.
    machines = [machine for machine in machines if _short(machine.facts["python"]) == usual]
    for package in machines[0].facts["packages"]:
        have = [m.facts["packages"].get(package) for m in machines]
        if not any(have):
            continue
        version = _usual([v for v in have if v])
        for machine, theirs in zip(machines, have, strict=True):
            if theirs == version:
                continue
            python = machine.host.python or "python3"
            wanted = f"{package}=={version.split('+')[0]}"
            what = f"{package} is missing" if theirs is None else f"{package} {theirs}"
            yield Problem(
                host=machine.name,
                kind="package",
                what=f"{what}, the others have {version}",
                fix=format_ssh_command(machine.host, f"{python} -m pip install {wanted}"),
            )


def _hardware(found: Examination) -> Iterator[Problem]:
    for machine in _present(found):
        facts, host = machine.facts, machine.host
        broken = [gpu["error"] for gpu in facts["gpus"] if "error" in gpu]
        there = len(facts["gpus"]) - len(broken)
        if broken:
            fix = format_ssh_command(host, "nvidia-smi; sudo reboot")
            yield Problem(host=machine.name, kind="gpu", what=broken[0], fix=fix)
        elif there != host.gpu_count and host.gpu_count:
            what = f"the pool says {host.gpu_count} GPUs, {there} answer"
            yield Problem(
                host=machine.name, kind="gpu", what=what, fix=format_ssh_command(host, "nvidia-smi")
            )
        free = facts["disk_free_bytes"]
        if free < LEAST_DISK_BYTES:
            yield Problem(
                host=machine.name,
                kind="disk",
                what=f"{free / GIGA:.2f} GB of disk are free in {facts['home']}, 1 is needed",
                fix=format_ssh_command(host, "du -xsh ~/* ~/.cache | sort -h | tail"),
            )
        if facts["load"] > BUSY_SHARE * facts["cores"]:
            yield Problem(
                host=machine.name,
                kind="busy",
                what=f"others compute there: load {facts['load']:.1f} on {facts['cores']} cores",
                fix=format_ssh_command(host, "ps -eo pcpu,user,comm --sort=-pcpu | head"),
                level="warning",
            )
    drivers = {
        machine.name: gpu["driver"]
        for machine in _present(found)
        for gpu in machine.facts["gpus"]
        if "driver" in gpu
    }
    if drivers:
        usual = _usual(list(drivers.values()))
        for name, driver in drivers.items():
            if driver != usual:
                host = found.of(name).host
                yield Problem(
                    host=name,
                    kind="driver",
                    what=f"GPU driver {driver}, the others have {usual}",
                    fix=format_ssh_command(
                        host, "sudo apt-get install --only-upgrade nvidia-driver"
                    ),
                    level="warning",
                )


def _clocks(found: Examination) -> Iterator[Problem]:
    for machine in _present(found):
        offset = machine.clock_offset_s
        if offset is not None and abs(offset) - machine.clock_error_s > CLOCK_S:
            word = "ahead of" if offset > 0 else "behind"
            yield Problem(
                host=machine.name,
                kind="clock",
                what=f"its clock is {abs(offset):.1f} s {word} this machine's",
                fix=format_ssh_command(machine.host, "sudo timedatectl set-ntp true"),
            )


def _routes(found: Examination) -> Iterator[Problem]:
    """The interface is what the kernel's routes choose, whatever it is called."""
    for machine in _present(found):
        skewed: dict[tuple[str, str], list[str]] = {}
        for other, route in machine.routes.items():
            source = route["source"]
            if source is None:
                there = found.of(other).address
                yield Problem(
                    host=machine.name,
                    kind="route",
                    what=f"it has no route to {other} ({there})",
                    fix=format_ssh_command(machine.host, f"ip route get {there}"),
                )
            elif source != machine.address:
                skewed.setdefault((source, route["interface"] or "?"), []).append(other)
        for (source, interface), others in skewed.items():
            yield _skewed(found, machine, source, interface, others)
    mtus: dict[str, list[str]] = {}
    for machine in _present(found):
        for route in machine.routes.values():
            if route["mtu"] and route["source"] == machine.address:
                mtus.setdefault(f"{route['mtu']} on {route['interface']}", []).append(machine.name)
    sizes = {text.split()[0] for text in mtus}
    if len(sizes) > 1:
        usual = _usual([text.split()[0] for text, names in mtus.items() for _ in names])
        for text, names in mtus.items():
            size, _, interface = text.split()
            if size != usual:
                for name in dict.fromkeys(names):
                    command = f"sudo ip link set dev {interface} mtu {usual}"
                    yield Problem(
                        host=name,
                        kind="mtu",
                        what=f"packets of {size} bytes on {interface}, the others {usual}",
                        fix=format_ssh_command(found.of(name).host, command),
                        level="warning",
                    )


def _skewed(
    found: Examination, machine: MachineExamination, source: str, interface: str, others: list[str]
) -> Problem:
    named = ", ".join(others)
    usual = machine.addresses.get(machine.address or "")
    if usual is None:
        return Problem(
            host=machine.name,
            kind="interface",
            what=f"its address {machine.address} is on none of its interfaces (translated, NAT): "
            f"{named} see {source} ({interface})",
            fix=f"in the pool: host: {source}",
        )
    commands = [
        f"sudo ip route replace {found.of(other).address} dev {usual} src {machine.address}"
        for other in others
    ]
    return Problem(
        host=machine.name,
        kind="interface",
        what=f"it reaches {named} from {source} by {interface}, "
        f"but is reached at {machine.address} by {usual}",
        fix=format_ssh_command(machine.host, " && ".join(commands)),
    )


def _ports(found: Examination) -> Iterator[Problem]:
    for machine in _present(found):
        for asked, actual in machine.listening.items():
            if actual is None:
                yield Problem(
                    host=machine.name,
                    kind="port",
                    what=f"port {asked} is taken by another program",
                    fix=format_ssh_command(machine.host, f"sudo ss -ltnp 'sport = :{asked}'"),
                    level="warning",
                )
    tried = sorted({port for pair in found.pairs for port in pair.reached})
    for port in tried:
        blocked = [p for p in found.pairs if p.reached.get(port, "ok") != "ok"]
        silent = _no_way_out(found, blocked, port)
        for name in silent:
            reached = [p.target for p in blocked if p.source == name]
            yield Problem(
                host=name,
                kind="port",
                what=f"it reaches {_port_words(found, port)} of nobody ({', '.join(reached)}), "
                "though others do: its own firewall lets nothing out",
                fix=format_ssh_command(found.of(name).host, "sudo iptables -L OUTPUT -n -v"),
            )
        rest = [p for p in blocked if p.source not in silent]
        for name in dict.fromkeys(p.target for p in rest):
            yield _blocked(found, name, port, [p for p in rest if p.target == name])


def _no_way_out(found: Examination, blocked: list[MachinePair], port: int) -> list[str]:
    """Machines that reach nobody, where those that they do not reach are reached by others."""
    names = []
    for machine in found.machines:
        mine = [p for p in found.pairs if p.source == machine.name and port in p.reached]
        stuck = [p for p in mine if p in blocked]
        reached_by_others = {
            p.target
            for p in found.pairs
            if p.source != machine.name and p.reached.get(port) == "ok"
        }
        all_stuck = len(mine) > 1 and len(stuck) == len(mine)
        if all_stuck and all(p.target in reached_by_others for p in stuck):
            names.append(machine.name)
    return names


def _port_words(found: Examination, port: int) -> str:
    return f"port {port}" if port else "the ports that the system chooses"


def _blocked(found: Examination, name: str, port: int, pairs: list[MachinePair]) -> Problem:
    machine = found.of(name)
    sources = [found.of(p.source) for p in pairs]
    allowed = ",".join(source.address or source.name for source in sources)
    words = f"port {port}" if port else f"ports that the system chooses ({machine.listening[0]})"
    ways = ", ".join(f"{p.source}: {p.reached[port]}" for p in pairs)
    rule = f"sudo iptables -I INPUT -p tcp -s {allowed}"
    rule += f" --dport {port} -j ACCEPT" if port else " -j ACCEPT"
    return Problem(
        host=name,
        kind="port",
        what=f"{words} blocked from {ways}",
        fix=format_ssh_command(machine.host, rule),
    )


def _links(found: Examination) -> Iterator[Problem]:
    best = {
        machine.name: max(rates)
        for machine in _present(found)
        if (rates := link_rates(found, machine.name))
    }
    if len(best) < 3:
        return  # of two it cannot be told which one is slow
    usual = statistics.median(best.values())
    for name, rate in best.items():
        if rate < SLOW_LINK * usual:
            machine = found.of(name)
            interface = next((r["interface"] for r in machine.routes.values()), None) or "eth0"
            yield Problem(
                host=name,
                kind="link",
                what=f"its link {interface} carries {rate * 8 / 1e6:.0f} Mbit/s, "
                f"the others {usual * 8 / 1e6:.0f}",
                fix=format_ssh_command(machine.host, f"sudo ethtool {interface}"),
                level="warning",
            )


def link_rates(found: Examination, name: str) -> list[float]:
    """Bytes per second between a machine and each other one, the slower direction of both."""
    rates: dict[str, list[float]] = {}
    for pair in found.pairs:
        if name in (pair.source, pair.target) and pair.bytes_per_s:
            other = pair.target if pair.source == name else pair.source
            rates.setdefault(other, []).append(pair.bytes_per_s)
    return [min(both) for both in rates.values()]


def _steps(found: Examination) -> Iterator[Problem]:
    for machine in _present(found):
        steps = machine.steps or {}
        if "missing" in steps:
            python = machine.host.python or "python3"
            yield Problem(
                host=machine.name,
                kind="package",
                what=f"the job's model cannot be timed there: {steps['missing']}",
                fix=format_ssh_command(machine.host, f"{python} -m pip install paceline"),
            )
        elif "failed" in steps:
            yield Problem(
                host=machine.name,
                kind="job",
                what=f"the job does not run there: {steps['failed']}",
                fix="say another --data-dir, or copy the data there",
            )

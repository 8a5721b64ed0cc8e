"""Memory still available to this process under its rlimits, cgroups and the host."""

from __future__ import annotations

import resource
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_memory_bytes() -> float:
    """Returns the bytes left under the tightest limit; infinite if there is none."""
    status = _table("/proc/self/status")
    rooms = [
        _under(resource.RLIMIT_AS, status.get("VmSize", 0)),
        _under(resource.RLIMIT_DATA, status.get("VmData", 0)),
        *_group_rooms(),
    ]
    available = _table("/proc/meminfo").get("MemAvailable")
    if available is not None:
        rooms.append(float(available))
    return max(0.0, min(rooms))


def _under(limit: int, used: int) -> float:
    soft, _ = resource.getrlimit(limit)
    return float("inf") if soft == resource.RLIM_INFINITY else float(soft - used)


def _group_rooms() -> list[float]:
    """Returns the bytes left in every cgroup of this process that limits memory."""
    found = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        base = _CGROUPS / "memory" if controllers else _CGROUPS
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit_name, used_name = names if controllers else ("memory.max", "memory.current")
        group = base / path.lstrip("/")
        while base == group or base in group.parents:
            limit, used = _text(group / limit_name).strip(), _text(group / used_name).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                found.append(float(int(limit) - int(used) + _file_pages(group)))
            if group == base:
                break
            group = group.parent
    return found


def _file_pages(group: Path) -> int:
    """Returns the page cache of a cgroup in bytes, which the kernel can reclaim."""
    total = 0
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "active_file"):
            total += int(value)
    return total


def _table(path: str) -> dict[str, int]:
    """Parses lines such as `VmData:  1234 kB` into bytes."""
    found = {}
    for line in _text(path).splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[key] = int(words[0]) * 1024
    return found


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

"""Resource counters and memory limits of the process and its host, from /proc and sockets.

Counters are totals since some beginning, or levels now; `sampler` takes differences. What the
kernel does not tell reads as zero or None.
"""

import ctypes
import os
import resource
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from paceline.telemetry.events import HostMetrics

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
CPU_MODES = ("cpu_user", "cpu_system", "cpu_iowait", "cpu_steal", "cpu_idle")
_CGROUPS = Path("/sys/fs/cgroup")


def _text(path: str | Path) -> str:
    """Reads a small file; three times faster than `open`, for dozens of reads per second."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
            if len(part) < 1 << 12:
                break
        return b"".join(parts).decode("ascii", errors="replace")
    except OSError:
        return ""
    finally:
        os.close(handle)


@dataclass(frozen=True)
class TcpStats:
    """Kernel counters of one TCP connection of this process."""

    sent: int
    received: int
    busy_s: float
    blocked_s: float
    rtt_s: float
    rtt_least_s: float


@dataclass(frozen=True)
class ProcessReading:
    """Totals and levels of a process, named as in `ProcessMetrics`."""

    cpu_user: float = 0.0
    cpu_system: float = 0.0
    cpu_wait: float | None = None
    run_wait: dict[int, float] = field(default_factory=dict)
    """Per thread; the total of a thread is lost when it ends."""
    main_wait: float = 0.0
    throttled: tuple[str, float] = ("", 0.0)
    """The cgroups, and for how long their quotas throttled them."""
    rss: int = 0
    threads: int = 0
    disk_read: int = 0
    disk_write: int = 0
    connections: dict[str, TcpStats] = field(default_factory=dict)


def read_process() -> ProcessReading:
    # Ticks in /proc/self/stat are too coarse for a second's window on some kernels; getrusage has
    # the same totals and no other rounding than the kernel's own.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stat = _stat_fields("/proc/self/stat")
    accounted = _text("/proc/sys/kernel/task_delayacct").strip() == "1"
    io = dict(line.split(": ") for line in _text("/proc/self/io").splitlines() if ": " in line)
    memory = _text("/proc/self/statm").split()
    run_wait = _read_run_wait()
    return ProcessReading(
        cpu_user=usage.ru_utime,
        cpu_system=usage.ru_stime,
        cpu_wait=int(stat[39]) * TICK_S if len(stat) >= 40 and accounted else None,
        run_wait=run_wait,
        main_wait=run_wait.get(os.getpid(), 0.0),
        throttled=read_throttled(),
        rss=int(memory[1]) * PAGE if len(memory) > 1 else 0,
        threads=int(stat[17]) if len(stat) >= 40 else 1,
        disk_read=int(io.get("read_bytes", 0)),
        disk_write=int(io.get("write_bytes", 0)),
        connections=_read_connections(),
    )


def _stat_fields(path: str) -> list[str]:
    """Returns the fields after the name in brackets, which may contain anything."""
    return _text(path).rpartition(")")[2].split()


def process_age_s() -> float:
    stat, up = _stat_fields("/proc/self/stat"), _text("/proc/uptime").split()
    if len(stat) < 20 or not up:
        return 0.0
    return max(0.0, float(up[0]) - int(stat[19]) * TICK_S)


def _list_folder(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read_run_wait() -> dict[int, float]:
    found = {}
    for name in _list_folder("/proc/self/task"):
        fields = _text(f"/proc/self/task/{name}/schedstat").split()
        if len(fields) == 3:
            found[int(name)] = int(fields[1]) / 1e9
    return found


def thread_run_wait_s() -> float:
    """Returns the run-queue wait of the calling thread."""
    fields = _text("/proc/thread-self/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 else 0.0


def thread_state(number: int | None) -> str:
    """Returns the state of a thread: R runnable, S sleeping, D waiting for a disk; or empty."""
    return next(iter(_stat_fields(f"/proc/self/task/{number}/stat")), "")


def _groups(controller: str) -> list[Path]:
    """Returns the cgroups of this process for `cpu` or `memory`, from its own up to the root."""
    found: list[Path] = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = _CGROUPS / controllers
            base = base if base.exists() else _CGROUPS / controller
        elif not controllers:  # version 2
            base = _CGROUPS
        else:
            continue
        group = base / path.lstrip("/")
        found += [part for part in (group, *group.parents) if part.is_relative_to(base)]
    return found


def read_throttled() -> tuple[str, float]:
    """Returns the cgroups that limit this process, and their throttled seconds so far."""
    names, seconds = [], 0.0
    for group in _groups("cpu"):
        if _quota_of(group) is None:
            continue
        names.append(str(group))
        for line in _text(f"{group}/cpu.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == "throttled_time":
                seconds += int(value) / 1e9
            elif key == "throttled_usec":
                seconds += int(value) / 1e6
    return ",".join(names), seconds


def _quota_of(group: Path) -> float | None:
    whole = _text(f"{group}/cpu.max").split()  # version 2
    if len(whole) == 2:
        return None if whole[0] == "max" else int(whole[0]) / int(whole[1])
    quota = _text(f"{group}/cpu.cfs_quota_us").strip()
    if not quota or int(quota) <= 0:
        return None
    return int(quota) / int(_text(f"{group}/cpu.cfs_period_us").strip() or 100_000)


def quota_cores() -> float | None:
    """Returns the tightest CPU limit of the cgroups in cores; None without a limit."""
    found = [q for q in map(_quota_of, _groups("cpu")) if q is not None]
    return min(found, default=None)


def available_memory_bytes() -> float:
    """Returns the bytes left under the tightest of the rlimits, the cgroups and the host."""
    left = [float(psutil.virtual_memory().available)]
    status = dict(line.split(":", 1) for line in _text("/proc/self/status").splitlines())
    for limit, used_key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left.append(soft - 1024.0 * int(status.get(used_key, "0 kB").split()[0]))
    for group in _groups("memory"):
        v1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
        names = v1 if (group / v1[0]).exists() else ("memory.max", "memory.current")
        limit_bytes, used_bytes = (_text(group / name).strip() for name in names)
        if limit_bytes.isdigit() and used_bytes.isdigit() and int(limit_bytes) < 1 << 60:
            # The kernel can reclaim the page cache of a cgroup.
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            cached = sum(int(stat.get(key, 0)) for key in ("inactive_file", "active_file"))
            left.append(float(int(limit_bytes) - int(used_bytes) + cached))
    return max(0.0, min(left))


def free_cgroup_tasks() -> list[int]:
    """Returns how many more threads each cgroup of this process allows, if it is limited."""
    found = []
    for group in _groups("pids"):
        limit, used = (_text(group / name).strip() for name in ("pids.max", "pids.current"))
        if limit.isdigit() and used.isdigit():
            found.append(int(limit) - int(used))
    return found


def allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_TCP, _TCP_INFO = 6, 11
_INFO_BYTES = 256


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _read_connections() -> dict[str, TcpStats]:
    """Returns the `tcp_info` of every TCP connection of this process, by socket."""
    found = {}
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    for name in _list_folder("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # Closed meanwhile.
        if not target.startswith("socket:"):
            continue
        size = ctypes.c_uint32(_INFO_BYTES)
        if _libc().getsockopt(int(name), _TCP, _TCP_INFO, buffer, ctypes.byref(size)) != 0:
            continue  # Not TCP.
        if size.value >= 216:
            found[target] = _unpack(buffer.raw)
    return found


def _unpack(info: bytes) -> TcpStats:
    """Offsets in struct tcp_info, which is only ever extended (include/uapi/linux/tcp.h)."""
    (rtt_us,) = struct.unpack_from("=I", info, 68)
    (received,) = struct.unpack_from("=Q", info, 128)
    (least_us,) = struct.unpack_from("=I", info, 148)
    busy_us, blocked_us = struct.unpack_from("=QQ", info, 168)
    sent, again = struct.unpack_from("=QQ", info, 200)
    least_us = 0 if least_us == 0xFFFFFFFF else least_us
    return TcpStats(
        sent - again, received, busy_us / 1e6, blocked_us / 1e6, rtt_us / 1e6, least_us / 1e6
    )


def read_machine(t: float = 0.0) -> HostMetrics:
    """Returns the totals of the host at `t` in the shape of an event; `dt` is `t`."""
    cpu, memory = psutil.cpu_times(), psutil.virtual_memory()
    links = psutil.net_io_counters(pernic=True, nowrap=False)
    disk_read, disk_write = _read_disks()
    return HostMetrics(
        t=round(t, 6),
        host=socket.gethostname(),
        dt=t,
        cpu_user=cpu.user + cpu.nice,
        cpu_system=cpu.system + cpu.irq + cpu.softirq,
        cpu_iowait=cpu.iowait,
        cpu_steal=cpu.steal,
        cpu_idle=cpu.idle,
        cores_busy=[
            core.user + core.nice + core.system + core.irq + core.softirq + core.steal
            for core in psutil.cpu_times(percpu=True)
        ],
        namespace=network_namespace(),
        load=_read_load(),
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        memory_cached=getattr(memory, "cached", 0) + getattr(memory, "buffers", 0),
        swap_used=_read_swap(),
        links={name: [link.bytes_recv, link.bytes_sent] for name, link in links.items()},
        disk_read=disk_read,
        disk_write=disk_write,
        gpus=read_gpus(),
    )


def host_metrics_between(before: HostMetrics, now: HostMetrics) -> HostMetrics:
    """Returns the amounts between two readings, and the levels of the second."""
    links = {
        name: [b - a for a, b in zip(before.links.get(name, [0, 0]), both, strict=True)]
        for name, both in now.links.items()
    }
    outside = [both for name, both in links.items() if name != "lo"]
    amounts: dict[str, Any] = {
        name: round(getattr(now, name) - getattr(before, name), 6)
        for name in ("dt", *CPU_MODES, "disk_read", "disk_write")
    }
    busy = zip(before.cores_busy, now.cores_busy, strict=False)
    return replace(
        now,
        cores_busy=[round(b - a, 4) for a, b in busy],
        net_in=sum(both[0] for both in outside),
        net_out=sum(both[1] for both in outside),
        loopback=links.get("lo", [0, 0])[1],
        links={name: both for name, both in links.items() if any(both)},
        **amounts,
    )


def network_namespace() -> int:
    """Returns the number of this process's network namespace; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


def _read_load() -> float:
    fields = _text("/proc/loadavg").split()
    return float(fields[0]) if fields else 0.0


def _read_swap() -> int:
    """Returns the bytes of swap in use, without psutil's warnings in some sandboxes."""
    sizes = {"SwapTotal:": 0, "SwapFree:": 0}
    for line in _text("/proc/meminfo").splitlines():
        name, *rest = line.split()
        if name in sizes:
            sizes[name] = 1024 * int(rest[0])
    return sizes["SwapTotal:"] - sizes["SwapFree:"]


@cache
def _disks() -> frozenset[str]:
    """Returns the physical devices: no partitions or mappings."""
    virtual = ("loop", "ram", "dm-", "zram", "md")
    return frozenset(n for n in _list_folder("/sys/block") if not n.startswith(virtual))


def _read_disks() -> tuple[int, int]:
    try:
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False)
    except (OSError, NotImplementedError):  # Some containers hide the block devices.
        return 0, 0
    disks = [disk for name, disk in counters.items() if name in _disks()]
    return sum(disk.read_bytes for disk in disks), sum(disk.write_bytes for disk in disks)


@cache
def _nvml() -> Any:
    """Returns pynvml if it and NVIDIA's management library are installed, else None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def read_gpus() -> list[Mapping[str, object]]:
    library = _nvml()
    found: list[Mapping[str, object]] = []
    for index in range(library.nvmlDeviceGetCount() if library is not None else 0):
        try:
            device = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(device)
            found.append(
                {
                    "name": str(library.nvmlDeviceGetName(device)),
                    "busy": library.nvmlDeviceGetUtilizationRates(device).gpu / 100,
                    "memory_used": int(memory.used),
                    "memory_total": int(memory.total),
                }
            )
        except library.NVMLError:
            continue
    return found

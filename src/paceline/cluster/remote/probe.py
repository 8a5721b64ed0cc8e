"""Inspects the machine it runs on: reads commands as lines of JSON and answers each with one line.

It listens for other probes on an ephemeral port and accepts only those that have the run's token.
It exits when its input ends. Measurements use torch where it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # old Python versions cannot evaluate it
    Answer = dict[str, Any]
MEBI = 1 << 20
CHUNK = b"\0" * MEBI
PINGS = 20
CONNECT_S = 3.0
MEASURE_S = 5.0
"""Timeout of any exchange between two probes."""
IMPORT_S = 60.0


def main() -> None:
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line.decode())
            answer = COMMANDS[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


# ---- facts -----------------------------------------------------------------------------------


def machine_facts(packages: list[str]) -> Answer:
    """Returns everything that is known without a measurement."""
    total, free = read_memory()
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    home = os.path.expanduser("~")
    return {
        "hostname": socket.gethostname(),
        "resolves_to": resolve(socket.gethostname()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": {name: find_version(name) for name in packages},
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "memory_bytes": total,
        "memory_free_bytes": free,
        "load": os.getloadavg()[0],
        "disk_free_bytes": shutil.disk_usage(home if os.path.isdir(home) else "/").free,
        "gpus": find_gpus(),
        "home": home,
    }


def find_version(name: str) -> str | None:
    metadata = try_import("importlib.metadata")
    if metadata is None:  # Python 3.7
        return getattr(try_import(name), "__version__", None)
    try:
        version: str = metadata.version(name)
        return version
    except metadata.PackageNotFoundError:
        return None


def try_import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:
        return None  # Broken installations raise arbitrary exceptions.


def read_memory() -> tuple[int | None, int | None]:
    found = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, rest = line.partition(":")
                found[name] = int(rest.split()[0]) * 1024
    except OSError:
        pass
    return found.get("MemTotal"), found.get("MemAvailable")


def find_gpus() -> list[Answer]:
    """Returns model, memory and driver version of each GPU, from nvidia-smi."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return [{"error": "nvidia-smi failed: driver and kernel module do not match"}]
    gpus = []
    for line in done.stdout.decode(errors="replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            memory = float(parts[1]) * MEBI if parts[1].replace(".", "").isdigit() else None
            gpus.append({"model": parts[0], "memory_bytes": memory, "driver": parts[2]})
    return gpus


def resolve(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


# ---- routes ----------------------------------------------------------------------------------


def find_routes(peers: list[str]) -> Answer:
    """Returns the local address and interface used to reach each peer."""
    interfaces = list_addresses()
    routes = {}
    for peer in peers:
        source = source_address_for(peer)
        name = interfaces.get(source or "")
        routes[peer] = {"source": source, "interface": name, "mtu": read_mtu(name)}
    return {"routes": routes, "addresses": interfaces}


def source_address_for(peer: str) -> str | None:
    """Returns the source address from the routing table; connecting a UDP socket sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def list_addresses() -> dict[str, str]:
    """Returns the interface of each local address."""
    found = {}
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for name in os.listdir("/sys/class/net"):
                request = struct.pack("256s", name.encode()[:15])
                try:
                    reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:
                    continue  # no address
                found[socket.inet_ntoa(reply[20:24])] = name
        with open("/proc/net/if_inet6") as file:
            for line in file:
                parts = line.split()
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(parts[0]))
                found[address] = parts[5]
    except (ImportError, OSError):
        pass  # not Linux: interfaces have no name
    return found


def read_mtu(interface: str | None) -> int | None:
    try:
        with open(f"/sys/class/net/{interface}/mtu") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def find_ports(count: int) -> Answer:
    """Returns unused ports."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("", 0))
        return {"ports": [each.getsockname()[1] for each in held]}


# ---- between two probes ----------------------------------------------------------------------


def listen(token: str, port: int = 0) -> Answer:
    """Serves other probes on the given port, or on an ephemeral one."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError as error:
        server.close()
        return {"port": None, "why": error.strerror}
    server.listen(64)
    threading.Thread(target=accept, args=(server, token.encode()), daemon=True).start()
    return {"port": server.getsockname()[1]}


def accept(server: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=answer_probe, args=(connection, token), daemon=True).start()


def answer_probe(connection: socket.socket, token: bytes) -> None:
    """Checks the token, then serves commands: `p` echoes a ping, `b` counts bytes."""
    connection.settimeout(MEASURE_S)
    try:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive(connection, len(token)) != token:
                return
            connection.sendall(b"y")
            while True:
                command = connection.recv(1)
                if command == b"p":
                    connection.sendall(b"p")
                elif command == b"b":
                    count_bytes(connection)
                else:
                    return
    except OSError:
        pass


def count_bytes(connection: socket.socket) -> None:
    """Receives the announced number of bytes and replies with the time from first to last."""
    total = struct.unpack("!Q", receive(connection, 8))[0]
    buffer = bytearray(MEBI)
    got, first, began = 0, 0, 0.0
    while got < total:
        size = connection.recv_into(buffer)
        if not size:
            return
        if not got:
            began, first = time.monotonic(), size
        got += size
    seconds = max(time.monotonic() - began, 1e-9)
    connection.sendall(struct.pack("!dQ", seconds, got - first))


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise OSError("connection closed")
        data += chunk
    return data


def open_peer(address: str, port: int, token: str) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode())
    if receive(connection, 1) != b"y":
        raise OSError("another program is listening on this port")
    return connection


def reach(targets: list[tuple[str, int]], token: str) -> Answer:
    """Connects to every (address, port) concurrently; returns "ok" or the reason for each."""
    found = [""] * len(targets)

    def one(index: int, address: str, port: int) -> None:
        try:
            open_peer(address, port, token).close()
            found[index] = "ok"
        except socket.timeout:  # noqa: UP041 (not the same before Python 3.10)
            found[index] = "no answer"
        except ConnectionRefusedError:
            found[index] = "refused"
        except OSError as error:
            found[index] = error.strerror or str(error) or type(error).__name__

    threads = [
        threading.Thread(target=one, args=(index, *target), daemon=True)
        for index, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * CONNECT_S)
    return {"reached": [each or "no answer" for each in found]}


def measure_link(address: str, port: int, token: str, seconds: float) -> Answer:
    """Measures latency (half the median round trip), then bandwidth for about `seconds`."""
    with open_peer(address, port, token) as connection:
        connection.settimeout(MEASURE_S)
        trips = []
        for _ in range(PINGS):
            began = time.monotonic()
            connection.sendall(b"p")
            receive(connection, 1)
            trips.append(time.monotonic() - began)
        rate = send_bytes(connection, MEBI // 4)  # a first estimate; also opens the TCP window
        size = int(min(max(rate * seconds, MEBI // 4), 1 << 31))
        rate = send_bytes(connection, size)
    return {"latency_s": sorted(trips)[PINGS // 2] / 2, "bytes_per_s": rate, "bytes": size}


def send_bytes(connection: socket.socket, total: int) -> float:
    connection.sendall(b"b" + struct.pack("!Q", total))
    left = total
    while left:
        size = min(left, MEBI)
        connection.sendall(CHUNK[:size])
        left -= size
    seconds, counted = struct.unpack("!dQ", receive(connection, 16))
    return float((counted or total) / seconds)


# ---- speed -----------------------------------------------------------------------------------


def measure_flops(seconds: float) -> Answer:
    """Measures GFLOP/s of a float32 matrix product on all cores, and on each GPU of torch."""
    library = try_import("torch") or try_import("numpy")
    if library is None:
        return {"gflops": None, "kernel": None, "gpus": []}
    gpus = library.cuda.device_count() if hasattr(library, "cuda") else 0
    return {
        "gflops": matmul_gflops(library, 512, seconds),
        "kernel": library.__name__,
        "gpus": [matmul_gflops(library, 4096, seconds, f"cuda:{i}") for i in range(gpus)],
    }


def matmul_gflops(library: Any, size: int, seconds: float, device: str | None = None) -> float:
    """Measures one device; a GPU needs a larger product than a CPU to be busy."""
    where = {} if device is None else {"device": device}
    a, b = (library.ones((size, size), dtype=library.float32, **where) for _ in range(2))
    wait = library.cuda.synchronize if device is not None else lambda: None
    library.matmul(a, b)
    wait()
    best, deadline = 0.0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        began = time.monotonic()
        for _ in range(4):
            library.matmul(a, b)
        wait()
        best = max(best, 4 * 2 * size**3 / (time.monotonic() - began))
    return best / 1e9


def time_steps(job: Answer, share: int) -> Answer:
    """Times training steps of a job. Requires Paceline on this machine."""
    try:
        timing = importlib.import_module("paceline.worker.step_timing")
    except ImportError as error:
        return {"missing": str(error)}
    try:
        answer: Answer = timing.time_job(job, share)
        return {**answer, "startup_s": measure_imports() + answer.get("read_s", 0.0)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def measure_imports() -> float:
    """Measures how long a new process needs until it has imported what a worker imports."""
    began = time.monotonic()
    program = [sys.executable, "-c", "import paceline.worker.step_timing"]
    subprocess.run(program, check=True, timeout=IMPORT_S, stdin=subprocess.DEVNULL)
    return time.monotonic() - began


COMMANDS: dict[str, Callable[..., Answer]] = {
    "facts": machine_facts,
    "clock": lambda: {"time": time.time()},
    "routes": find_routes,
    "ports": find_ports,
    "listen": listen,
    "reach": reach,
    "link": measure_link,
    "flops": measure_flops,
    "training steps": time_steps,
}

if __name__ == "__main__":
    main()

"""Process group of all workers: torch.distributed, with rendezvous through the coordinator."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from paceline.comm.shm.allreduce import SharedRegion
from paceline.comm.shm.segment import create_segment, shm_domain_id, unlink_segment
from paceline.comm.wire import Channel
from paceline.errors import UsageError, WireError
from paceline.state import Section


class CoordinatorStore(dist.Store):  # type: ignore[name-defined, misc]
    """torch rendezvous store, kept by the coordinator; on a separate connection.

    torch's own TCPStore listens on all interfaces and knows no token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        who: str,
        timeout_s: float,
        prefix: str = "",
        retry_s: float | None = None,
    ) -> None:
        """`prefix` separates the keys of one view from those of others."""
        super().__init__()
        self._prefix = prefix
        self._channel = Channel.connect(
            *(host, port),
            token=token,
            peer="the coordinator's store",
            timeout_s=timeout_s,
            retry_s=retry_s,
        )
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._channel.send({"who": who, "pid": 0, "role": "store"})

    def call(self, operation: str, *args: Any) -> Any:
        with self._lock:
            self._channel.send([operation, *args])
            (status, value), _ = self._channel.receive()
        if status != "ok":
            raise WireError(f"store: {operation}{args!r}: {value}")
        return value

    def close(self) -> None:
        self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        self.call(
            "set", self._prefix + key, value.encode() if isinstance(value, str) else bytes(value)
        )

    def get(self, key: str) -> bytes:
        return bytes(self.call("get", self._prefix + key, self._timeout_s))

    def add(self, key: str, amount: int) -> int:
        return int(self.call("add", self._prefix + key, amount))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self.call("get", self._prefix + key, limit)

    def check(self, keys: list[str]) -> bool:
        return bool(self.call("check", [self._prefix + key for key in keys]))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        key = self._prefix + key
        return bytes(self.call("compare_set", key, bytes(expected), bytes(desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self.call("delete", self._prefix + key))

    def num_keys(self) -> int:
        return int(self.call("count"))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)


def find_interface(address: str) -> str:
    """Returns the name of the network interface with this address, which Gloo requires."""
    for name, addresses in psutil.net_if_addrs().items():
        # Link-local IPv6 addresses have the interface after a percent sign.
        if any(found.address.split("%")[0] == address.split("%")[0] for found in addresses):
            return name
    raise UsageError(f"no network interface of this machine has the address {address}")


@dataclass(frozen=True)
class SharedMemoryGroup:
    """Shared memory of this machine's workers; the first workers of all machines form a group."""

    region: SharedRegion
    leaders: dist.ProcessGroup | None
    machines: int


class CollectiveGroup:
    """Collectives among workers; no-ops in a group of one."""

    def __init__(
        self,
        rank: int,
        size: int,
        members: dist.ProcessGroup | None = None,
        *,
        store: CoordinatorStore | None = None,
    ) -> None:
        """`members` is None for all workers, who meet at the `store`."""
        self.rank, self.size = rank, size
        self._members = members
        # torch keeps only the C++ object of the store, and calls the Python object for every group.
        self._store = store
        self._timeout = datetime.timedelta() if store is None else store.timeout
        self.aborted = False
        """True when the view has ended: every wait for another worker raises PeerLost."""
        self._on_abort: list[Callable[[], None]] = []
        self._sockets: set[tuple[int, str]] = set()
        self._address = ""
        self._divided: dict[tuple[tuple[int, ...], ...], CollectiveGroup] = {}
        self._shared: dict[tuple[str, int], SharedMemoryGroup | str] = {}
        self._machines: list[list[int]] | None = None

    def new_subgroup(self, groups: tuple[tuple[int, ...], ...]) -> CollectiveGroup:
        """Returns this worker's group of a partition; all workers must pass the same one."""
        if groups not in self._divided:
            # torch requires all processes to create all groups in the same order.
            with self._recording_sockets():
                made = [
                    dist.new_group(list(g), timeout=self._timeout) if len(g) > 1 else None
                    for g in groups
                ]
            mine = next(i for i, g in enumerate(groups) if self.rank in g)
            self._divided[groups] = CollectiveGroup(self.rank, len(groups[mine]), made[mine])
        return self._divided[groups]

    @classmethod
    def init(cls, store: CoordinatorStore, *, rank: int, size: int, address: str) -> Self:
        """Joins the other workers; Gloo listens on the address's interface, unauthenticated."""
        group = cls(rank, size, store=store)
        group.connect(address)
        return group

    def wait_for_all(self) -> None:
        """Waits until all workers have come here, so that connecting takes little time."""
        self._all_gather_text("here", "")

    def connect(self, address: str, timeout_s: float | None = None) -> None:
        """Meets the other workers, within `timeout_s` if it is shorter than that of the store."""
        assert self._store is not None
        os.environ["GLOO_SOCKET_IFNAME"] = find_interface(address)
        self._address = address
        limit = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else self._timeout
        with self._recording_sockets():
            dist.init_process_group(
                "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=min(limit, self._timeout),
            )
        if limit < self._timeout:
            dist.distributed_c10d._set_pg_timeout(self._timeout)

    @contextmanager
    def _recording_sockets(self) -> Iterator[None]:
        """Records the connections that Gloo opens, which it offers no way to interrupt."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._sockets |= _open_sockets() - before

    def on_abort(self, interrupt: Callable[[], None]) -> None:
        """Calls `interrupt` when the view ends, in another thread; now if it has ended."""
        self._on_abort.append(interrupt)
        if self.aborted:
            interrupt()

    def abort(self) -> None:
        """Makes all waits for other workers fail, in any thread; then only `destroy` is allowed."""
        self.aborted = True
        for interrupt in list(self._on_abort):
            interrupt()
        if self._store is not None:
            self._store.close()
        for descriptor, _ in self._sockets & _open_sockets():
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(descriptor))
                with connection:
                    connection.getpeername()  # Gloo does not survive this for its listener.
                    # Another thread may have opened an unrelated connection meanwhile.
                    if connection.getsockname()[0] == self._address:
                        connection.shutdown(socket.SHUT_RDWR)

    def shared_memory(self, slot_bytes: int, use: str = "gradients") -> SharedMemoryGroup | str:
        """Returns memory shared with the workers of this machine, or the reason why there is none.

        All workers must make the same call; either all get memory or none does. Repeated calls for
        the same use return the same memory.
        """
        key = (use, slot_bytes)
        if key not in self._shared:
            self._shared[key] = self._make_shared(slot_bytes)
        return self._shared[key]

    def machines(self) -> list[list[int]]:
        """Returns the ranks of the workers of each machine; all workers must make the same call.

        A machine is where memory can be shared, or, where that is unknown, a host name.
        """
        if self._machines is None:
            own = shm_domain_id() or socket.gethostname()
            names = [own]
            if self.size > 1:
                names = self._all_gather_text("machine", own)
            together: dict[str, list[int]] = {}
            for rank, name in enumerate(names):
                together.setdefault(name, []).append(rank)
            self._machines = list(together.values())
        return self._machines

    def _make_shared(self, slot_bytes: int) -> SharedMemoryGroup | str:
        store = self._store
        if store is None:
            return "a part of the workers has no way to meet"
        prefix = f"shared/{len(self._shared)}"
        machines = self._all_gather_text(f"{prefix}/machine", shm_domain_id() or "")
        if "" in machines:
            return "it needs Linux on x86-64 with /dev/shm on every machine"
        together: dict[str, list[int]] = {}
        for rank, machine in enumerate(machines):
            together.setdefault(machine, []).append(rank)
        if len(together) == self.size:
            return "every worker is on a separate machine"
        mine = together[machines[self.rank]]
        name, why, arena = "", "", None
        try:
            if mine[0] == self.rank:
                try:
                    name = create_segment(SharedRegion.size_for(len(mine), slot_bytes))
                finally:
                    store.set(f"{prefix}/name/{self.rank}", name)
            name = store.get(f"{prefix}/name/{mine[0]}").decode()
            if name:
                timeout_s = self._timeout.total_seconds()
                arena = SharedRegion(
                    name, mine, self.rank, slot_bytes, timeout_s, lambda: self.aborted
                )
            else:
                why = f"worker {mine[0]} could not create it"
        except OSError as error:
            why = f"{error.strerror} in /dev/shm on worker {self.rank}'s machine"
        reasons = self._all_gather_text(f"{prefix}/problem", why)
        if name and mine[0] == self.rank:
            unlink_segment(name)
        if any(reasons):
            return next(filter(None, reasons))
        assert arena is not None
        leaders = None
        if len(together) > 1:
            # torch requires all processes to take part in creating a group.
            with self._recording_sockets():
                leaders = dist.new_group([m[0] for m in together.values()], timeout=self._timeout)
        return SharedMemoryGroup(arena, leaders, len(together))

    def _all_gather_text(self, key: str, value: str) -> list[str]:
        """The texts of all workers, by rank."""
        assert self._store is not None
        self._store.set(f"{key}/{self.rank}", value)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def all_reduce_async(self, tensor: torch.Tensor, *, largest: bool = False) -> dist.Work | None:
        """Starts an in-place sum (or maximum) over all workers; call `wait()` on the result."""
        if self.size == 1:
            return None
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        work: dist.Work = dist.all_reduce(tensor, op=op, group=self._members, async_op=True)
        return work

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        work = self.all_reduce_async(tensor, largest=largest)
        if work is not None:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        if self.size > 1:
            dist.broadcast(tensor, source, group=self._members)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all workers, all of one shape, by rank."""
        if self.size == 1:
            return [tensor]
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor, group=self._members)
        return pieces

    def all_to_all(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Sends `rows[r]` to each worker r, and returns the rows of all workers, by rank.

        `counts` are the pieces per row of each worker: `rows` has the shape (workers, own count,
        length), the result (sum of counts, length).
        """
        size, own, length = rows.shape
        received = rows.new_empty(sum(counts), length)
        sizes = [count * length for count in counts]
        flat = rows.reshape(-1)
        dist.all_to_all_single(
            received.view(-1), flat, sizes, [own * length] * size, group=self._members
        )
        return received

    def broadcast_section(self, section: Section | None, source: int = 0) -> Section:
        """Returns the section of `source` on all workers; others may pass None."""
        if self.rank == source or self.size == 1:
            assert section is not None
            if self.size > 1:
                body = torch.frombuffer(bytearray(section.to_bytes()), dtype=torch.uint8)
                self.broadcast(torch.tensor([body.numel()]), source)
                self.broadcast(body, source)
            return section
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(size, source)
        body = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(body, source)
        return Section.from_bytes(body.numpy().tobytes())

    def all_gather_sections(self, section: Section) -> list[Section]:
        """Returns the sections of all workers, in the order of ranks."""
        return [
            self.broadcast_section(section if rank == self.rank else None, rank)
            for rank in range(self.size)
        ]

    def isend(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Starts sending to a worker (global rank), which receives with the same tag."""
        work = dist.isend(tensor, rank, tag=tag)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Posts a receive for a worker's message with this tag."""
        work = dist.irecv(tensor, rank, tag=tag)
        assert work is not None
        return work

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._members)

    def destroy(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
        if self._store is not None:
            self._store.close()


def _open_sockets() -> set[tuple[int, str]]:
    """Returns descriptor and identity of this process's sockets."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            if link.startswith("socket:"):
                found.add((int(descriptor), link))
    return found

"""Servers of a run: where they are, which of them hold a copy of a shard, and which are lost.

Server `s` holds shard `s % shards`. All servers of a shard receive the same gradients and the same
orders, so each of them is an exact copy; workers pull from the first.
"""

from collections.abc import Iterable

from paceline.protocol.membership import Membership

Address = tuple[str, int]


class ServerMembers:
    """The servers that can be part of a view."""

    def __init__(self, shards: int, servers: int) -> None:
        self._shards = shards
        self._addresses: dict[int, Address] = {}
        self._versions: dict[int, int] = {}
        self.status = Membership(0, 0.0)
        """Heartbeats of the servers that are ready."""
        self.lost: dict[int, str] = {}
        """Servers of the current view that are gone, and why."""
        self.holding: frozenset[int] | None = frozenset(range(servers))
        """Servers that have loaded the state of the current view; None while the workers have
        it."""
        self.joining: set[int] = set()
        """Servers that wait to be admitted."""
        self._gone: list[Address] = []

    def shard_of(self, server: int) -> int:
        return server % self._shards

    def set_ready(self, server: int, address: Address, now: float, version: int = 0) -> None:
        """Notes where a server is; `version` if it has returned from another coordinator."""
        self._addresses[server] = address
        self._versions[server] = version
        self.status.add(server, now)
        self.status.set_ready(server, now)

    def remove(self, server: int) -> None:
        """Notes that a server is gone; it may be started again under its number."""
        self.joining.discard(server)
        self.status.remove(server)
        if self.holding is not None:
            self.holding -= {server}
        if (address := self._addresses.pop(server, None)) is not None:
            self._gone.append(address)

    @property
    def gone(self) -> tuple[Address, ...]:
        """Addresses at which no server answers any more."""
        return tuple(self._gone)

    def are_ready(self, members: Iterable[int]) -> bool:
        """Returns whether all members of a view that are not lost have reported."""
        return ({*members} - self.lost.keys()).issubset(self._addresses)

    def version_of(self, server: int) -> int:
        """Returns the version with which a server returned from another coordinator."""
        return self._versions.get(server, 0)

    def can_spare(self, server: int, members: Iterable[int]) -> bool:
        """Returns whether another member holds a copy of the shard of this server."""
        shard = self.shard_of(server)
        others = {s for s in members if s != server} - self.lost.keys()
        if self.holding is not None and server in self.holding:
            others &= self.holding
        return any(self.shard_of(other) == shard for other in others)

    def next_members(self, members: Iterable[int]) -> tuple[int, ...]:
        """Returns the servers of the next view, and admits those that wait."""
        remaining = ({*members} - self.lost.keys()) | self.joining
        self.lost, self.joining = {}, set()
        return tuple(sorted(remaining))

    def places(
        self, members: Iterable[int], shards: int
    ) -> tuple[tuple[Address, ...], tuple[tuple[int, str, int], ...]]:
        """Returns the server of each of the first `shards` shards, and all further copies."""
        first: dict[int, Address] = {}
        backups = []
        for server in members:
            shard, address = self.shard_of(server), self._addresses[server]
            if shard >= shards:
                continue
            if shard in first:
                backups.append((shard, *address))
            else:
                first[shard] = address
        return tuple(first[shard] for shard in range(shards)), tuple(backups)

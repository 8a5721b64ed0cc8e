"""Workers on the machines of a pool, over SSH; `localhost` needs none."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from paceline.cluster.pool import Host
from paceline.cluster.pool_file import load_pool
from paceline.cluster.ssh import SshTimeouts, open_shell
from paceline.errors import HostError, UsageError
from paceline.launch.hosts import RemoteHost, connect_hosts, find_python
from paceline.launch.project import ProjectBundle
from paceline.launch.remote_launcher import RemoteLauncher


class SshLauncher(RemoteLauncher):
    """As many workers on each machine as its `workers` says, in the pool's order."""

    engine = "ssh"

    def __init__(
        self,
        hosts: Sequence[Host],
        luggage: ProjectBundle | None = None,
        *,
        servers_on: Sequence[Host] = (),
        patience: SshTimeouts | None = None,
    ) -> None:
        super().__init__(luggage or ProjectBundle())
        self.hosts = list(hosts)
        self._patience = patience or SshTimeouts()
        self._seats = [place for place, host in enumerate(self.hosts) for _ in range(host.workers)]
        self.workers = len(self._seats)
        names = [host.host for host in self.hosts]
        self.hosts += [host for host in servers_on if host.host not in names]
        names = [host.host for host in self.hosts]
        self._listed_sites = [names.index(host.host) for host in servers_on]
        self._pool_file: tuple[Path, float] | None = None
        self._known_hosts = set(names)

    @property
    def worker_hosts(self) -> list[Host]:
        """The machine of each worker."""
        return [self.hosts[place] for place in self._seats]

    def place_servers(self, servers: int, workers: int) -> list[int | None]:
        if not self._listed_sites:
            return super().place_servers(servers, workers)
        return [self._seat(server) for server in range(servers)]

    def _seat(self, server: int) -> int | None:
        """Returns the worker that starts a server; None on a machine without workers."""
        turn, site = divmod(server, len(self._listed_sites))
        place = self._listed_sites[site]
        local_ranks = [rank for rank, seat in enumerate(self._seats) if seat == place]
        return local_ranks[turn % len(local_ranks)] if local_ranks else None

    def describe(self, servers: int) -> str:
        """Describes what would run where (`--dry-run`)."""
        project = self.project_bundle.project
        lines = project.describe(self.hosts) if project is not None else []
        parents = self.place_servers(servers, self.workers)
        placed = [("worker", r, self._seats[r]) for r in range(self.workers)]
        for server, parent in enumerate(parents):
            site = self.host_index_of("server", server) if parent is None else self._seats[parent]
            placed.append(("server", server, site))
        return "\n".join(lines + [f"{k} {i} on {self.hosts[at].host}" for k, i, at in placed])

    def host_index_of(self, kind: str, index: int) -> int:
        if kind == "server":
            return self._listed_sites[index % len(self._listed_sites)]
        return self._seats[index]

    def watch(self, pool_file: Path) -> None:
        """Lets hosts that are added to the pool file join a run in progress."""
        self._pool_file = (pool_file, pool_file.stat().st_mtime)
        self._known_hosts |= {host.host for host in load_pool(pool_file).pool.hosts}

    async def find_new_hosts(self) -> list[RemoteHost]:
        if self._pool_file is None:
            return []
        path, seen = self._pool_file
        try:
            if (changed := path.stat().st_mtime) == seen:
                return []
            hosts = load_pool(path).pool.hosts
        except (OSError, UsageError) as error:
            # It is being edited; the run must not end for that.
            self.project_bundle.on_progress(f"{path} cannot be read: {error}")
            return []
        self._pool_file = (path, changed)
        found = []
        for host in hosts:
            if host.host in self._known_hosts:
                continue
            self._known_hosts.add(host.host)
            try:
                shell = await open_shell(host, self._patience)
            except HostError as error:
                self.project_bundle.on_progress(f"{host.host} cannot join: {error}")
            else:
                found.append(RemoteHost(host, shell, python=find_python(host, shell)))
        return found

    @property
    def server_candidates(self) -> list[int]:
        return self._listed_sites or super().server_candidates

    async def connect(self, stack: AsyncExitStack) -> list[RemoteHost]:
        names = ", ".join(host.host for host in self.hosts)
        self.project_bundle.on_progress(f"connecting to {names}")
        return await connect_hosts(self.hosts, self._patience, stack)

"""Live monitoring of a run: process metrics, verdicts, and the metrics endpoint."""

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import UsageError
from paceline.protocol.history import History
from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics, parse_event
from paceline.telemetry.live_run import CONTENT_TYPE, LiveRun, expose
from paceline.telemetry.run_folder import COORDINATOR, EventWriter, OnEvent
from paceline.telemetry.sampler import MetricsDownsampler, Sampler
from paceline.telemetry.schema import RunConfig

HOST = "127.0.0.1"
REQUEST_S = 5.0
MAX_REQUEST = 16 << 10
JUDGE_S = 1.0
PROGRESS_S = 0.5
"""Interval between two looks for what limits the run."""


class LiveMonitor:
    """The supervisor's own metrics, and the record of those of all processes."""

    def __init__(
        self, config: RunConfig, writer: EventWriter, metrics_file: Path, metrics_port: int | None
    ) -> None:
        self.live = LiveRun(config)
        self._metrics: MetricsServer | None = None
        if metrics_port is not None:
            self._metrics = MetricsServer(metrics_port, metrics_file, self.live)
        self._thinner = MetricsDownsampler(writer.write)
        self._sampler: Sampler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, now_s: Callable[[], float], run_key: str) -> None:
        self._loop = asyncio.get_running_loop()
        if self._metrics is not None:
            await self._metrics.start()
        self._sampler = Sampler(now_s=now_s, tell=self._tell, run_key=run_key)
        self._sampler.start()

    def _tell(self, event: Event) -> None:
        """Called from the sampler's thread; forwards to the event loop, which owns the record."""
        assert isinstance(event, ProcessMetrics | HostMetrics)
        assert self._loop is not None
        self._thinner(event)
        self._loop.call_soon_threadsafe(self.live.add, COORDINATOR, event)

    def record(self, who: str, plain: Mapping[str, object]) -> None:
        """Adds an event received from another process; ignores a malformed one."""
        event = parse_event(plain)
        if event is not None:
            self.live.add(who, event)

    def sample_now(self) -> None:
        """Samples this process now, because a connection is about to be closed."""
        if self._sampler is not None:
            self._sampler.sample()

    async def watch_verdicts(
        self,
        now_s: Callable[[], float],
        show: Callable[[Event], None],
        log: Callable[[str, str], None],
    ) -> None:
        """Shows what limits the run as soon as it is known, until it is cancelled."""
        while True:
            await asyncio.sleep(JUDGE_S)
            try:
                for event in self.live.changed_verdicts(now_s()):
                    show(event)
            except Exception as error:
                # A rule that fails must not end the run.
                log("supervisor", f"verdicts: {type(error).__name__}: {error}")

    async def stop(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()


class ProgressNotices:
    """Shows how far a run has come, not more often than a display needs it."""

    def __init__(self, show: OnEvent, live: LiveRun | None) -> None:
        self._show, self._live = show, live
        self._due = 0.0

    def show(self, history: History, now: float) -> None:
        if now < self._due or not history.samples:
            return
        self._due = now + PROGRESS_S
        event = history.describe_progress(round(now, 6))
        if self._live is not None:
            self._live.progress = event
        self._show(event)


class MetricsServer:
    """Serves GET /metrics over HTTP, on loopback, to clients that have its token.

    Address and token are written to a file that only its owner can read.
    """

    def __init__(self, port: int, path: Path, live: LiveRun) -> None:
        self._port, self._path, self._live = port, path, live
        self._token = secrets.token_urlsafe(24)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_server(
                self._answer, HOST, self._port, limit=MAX_REQUEST
            )
        except OSError as error:
            raise UsageError(
                f"--metrics-port {self._port} is not available ({error.strerror}); "
                "choose another, or 0 for any"
            ) from None
        port = self._server.sockets[0].getsockname()[1]
        about = {"url": f"http://{HOST}:{port}/metrics", "token": self._token}
        self._path.unlink(missing_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, body = self._respond(head.decode("latin-1"))
                text = body.encode()
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
                    f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
                )
                writer.write(text)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # The client does not use HTTP, or has disconnected.
        finally:
            writer.close()

    def _respond(self, head: str) -> tuple[str, str]:
        first, *lines = head.split("\r\n")
        words = first.split()
        fields = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return "401 Unauthorized\r\nWWW-Authenticate: Bearer", "the token is in metrics.json\n"
        if len(words) != 3 or words[0] != "GET":
            return "405 Method Not Allowed", "only GET is answered\n"
        if words[1].split("?")[0] != "/metrics":
            return "404 Not Found", "only /metrics is here\n"
        return "200 OK", expose(self._live)

"""Serves the metrics of a run in progress over HTTP, on loopback, protected by a token."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from paceline.errors import UsageError
from paceline.telemetry.prometheus import CONTENT_TYPE

HOST = "127.0.0.1"
REQUEST_S = 5.0
MAX_REQUEST = 16 << 10


class MetricsServer:
    """Serves GET /metrics to clients with its token; writes address and token to a file."""

    def __init__(self, port: int, path: Path, expose: Callable[[], str]) -> None:
        self._port = port
        self._path = path
        self._expose = expose
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
        # Readable by its owner only: the token gives access to the run's progress.
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
        given = ""
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                given = value.strip()
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return "401 Unauthorized\r\nWWW-Authenticate: Bearer", "the token is in metrics.json\n"
        if len(words) != 3 or words[0] != "GET":
            return "405 Method Not Allowed", "only GET is answered\n"
        if words[1].split("?")[0] != "/metrics":
            return "404 Not Found", "only /metrics is here\n"
        return "200 OK", self._expose()

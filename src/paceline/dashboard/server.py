"""HTTP server of the dashboard and its page, based on the standard library.

Few clients, small responses. The page is one document with its style, scripts and the list of runs.
"""

import gzip
import hmac
import ipaddress
import json
import secrets
import socket
import sys
from html import escape
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.dashboard.run_index import RunIndex
from paceline.errors import UsageError
from paceline.report.charts import PHASE_STYLES, STRATEGY_COLOURS
from paceline.report.html import drop_nan, encode_json
from paceline.telemetry.metrics import View, metrics_in

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "timeline.js", "app.js")
COOKIE = "paceline-token"
MAX_COMPARED = 24
SLOW_CLIENT_S = 30.0

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'nonce-{nonce}'; "
    "style-src 'nonce-{nonce}' 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

SERVER_STYLES = {
    "startup": ("#999999", ""),
    "idle": ("#BBBBBB", "."),
    "receive": ("#56B4E9", ""),
    "apply": ("#009E73", ""),
    "send": ("#D55E00", ""),
}


class Dashboard:
    """Serves one folder at `url`; `serve` returns when it is stopped."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, ask_token: bool = False
    ) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a directory; choose one that contains runs")
        if not 0 <= port <= 65535:
            raise UsageError(f"--port is {port}; it must be between 0 (any free port) and 65535")
        self.shelf = RunIndex(folder)
        self.on_loopback = is_loopback(host)
        # Clients on other hosts must present the token.
        self.token = secrets.token_urlsafe(24) if ask_token or not self.on_loopback else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("Server", (DashboardHttpServer,), {"address_family": family})
        try:
            self._server: DashboardHttpServer = kind((host, port), DashboardRequestHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"cannot listen on {host} port {port} ({reason}); choose another --port or --host"
            ) from None
        self._server.dashboard = self
        self.is_closed = False
        self.host, self.port = host, self._server.server_address[1]

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            name = socket.gethostname()
        return f"http://{name}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def serve(self) -> None:
        self.shelf.start()
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `serve`, from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        self.is_closed = True  # Connections that are kept alive have threads of their own.
        self._server.server_close()
        self.shelf.stop()


class DashboardHttpServer(ThreadingHTTPServer):
    daemon_threads = True
    dashboard: Dashboard

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores browsers that disconnect during a response."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class DashboardRequestHandler(BaseHTTPRequestHandler):
    server: DashboardHttpServer
    protocol_version = "HTTP/1.1"
    timeout = SLOW_CLIENT_S
    server_version = "paceline"
    sys_version = ""

    def do_GET(self) -> None:
        if self.server.dashboard.is_closed:
            self.close_connection = True
            return
        parts, shelf = urlsplit(self.path), self.server.dashboard.shelf
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not self._is_ours():
            self._refuse(HTTPStatus.FORBIDDEN, "this name is not this server's: use its address")
        elif not self._is_trusted(query):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong: open the address as printed"
            )
        elif parts.path == "/":
            self._give_page(query)
        elif parts.path == "/api/runs":
            self._give({"runs": shelf.list_runs()})
        elif parts.path == "/api/run":
            first = query.get("from", "0")
            payload = shelf.run_payload(
                query.get("id", ""),
                generation=query.get("generation", ""),
                first=int(first) if first.isdecimal() else 0,
                who=query.get("who") or None,
            )
            if payload is None:
                self._refuse(HTTPStatus.NOT_FOUND, "this run no longer exists")
            else:
                self._give(payload)
        elif parts.path == "/api/curves":
            idents = query.get("ids", "").split("\n")[:MAX_COMPARED]
            self._give({"runs": shelf.curves_payload(idents)})
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _is_ours(self) -> bool:
        """Accepts only loopback names on loopback, which prevents DNS rebinding."""
        if not self.server.dashboard.on_loopback:
            return True
        name = (self.headers.get("Host") or "").strip()
        name = name.rsplit(":", 1)[0] if not name.endswith("]") else name
        return name == "localhost" or is_loopback(name.strip("[]"))

    def _is_trusted(self, query: dict[str, str]) -> bool:
        token = self.server.dashboard.token
        if token is None:
            return True
        given = query.get("token")
        if given is None:
            try:
                kept = SimpleCookie(self.headers.get("Cookie") or "").get(COOKIE)
            except CookieError:
                kept = None
            given = kept.value if kept is not None else ""
        return hmac.compare_digest(given.encode(), token.encode())

    def _give_page(self, query: dict[str, str]) -> None:
        token = self.server.dashboard.token
        if token is not None and "token" in query:
            # Moves the token from the URL, which is visible and logged, into a cookie.
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", "/")
            self.send_header(
                "Set-Cookie", f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/; Max-Age=864000"
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        nonce = secrets.token_urlsafe(12)
        shelf = self.server.dashboard.shelf
        text = render_page(shelf.root.resolve().name, shelf.list_runs(), nonce)
        self._send(text.encode(), "text/html; charset=utf-8", nonce=nonce)

    def _give(self, value: object) -> None:
        text = json.dumps(drop_nan(value), separators=(",", ":"))
        self._send(text.encode(), "application/json")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(f"paceline: {text}\n".encode(), "text/plain; charset=utf-8", status=status)

    def _send(
        self, body: bytes, kind: str, *, status: HTTPStatus = HTTPStatus.OK, nonce: str = ""
    ) -> None:
        packed = len(body) > 2000 and "gzip" in (self.headers.get("Accept-Encoding") or "")
        if packed:
            body = gzip.compress(body, 3)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        for name, value in HEADERS.items():
            self.send_header(name, value.replace("{nonce}", nonce))
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because a page polls every second."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def render_page(folder: str, runs: list[dict[str, object]], nonce: str) -> str:
    """Returns the document; it includes the runs, so that the list is painted at once."""
    start = {
        "folder": folder,
        "runs": runs,
        "phases": PHASE_STYLES,
        "server_phases": SERVER_STYLES,
        "colours": STRATEGY_COLOURS,
        "metrics": [
            {"key": m.key, "title": m.title, "unit": m.unit.name}
            for m in metrics_in(View.DASHBOARD)
        ],
    }
    files = ("index.html", "style.css", *SCRIPTS)
    text, style, *scripts = ((PAGE / name).read_text(encoding="utf-8") for name in files)
    for mark, part in (
        ("{{nonce}}", nonce),
        ("{{style}}", style),
        ("{{script}}", "\n".join(scripts)),
        # The folder's content comes last, because it may contain marks.
        ("{{title}}", escape(folder)),
        ("{{start}}", encode_json(start)),
    ):
        text = text.replace(mark, part)
    return text

"""A real Chromium, driven over ChromeDriver's own HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
START_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "ArrowRight": "\ue014", "ArrowDown": "\ue015",
        "Space": " "}  # fmt: skip


class Browser:
    """One window; everything it started is gone when the block ends."""

    def __init__(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert CHROMIUM is not None
        assert DRIVER is not None
        self._home = tempfile.TemporaryDirectory(prefix="paceline-chromium-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._base = f"http://127.0.0.1:{port}"
        options = {
            "binary": CHROMIUM,
            "args": [
                *FLAGS,
                f"--user-data-dir={self._home.name}",
                f"--window-size={width},{height}",
            ],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self._wait_until_up()
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._base += f"/session/{made['sessionId']}"
            self.resize(width, height)
            self.set_dark(dark)
        except BaseException:
            self.close()
            raise

    def _wait_until_up(self) -> None:
        due = time.monotonic() + START_S
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except (OSError, urllib.error.URLError):
                pass
            if time.monotonic() > due:
                raise TimeoutError("chromedriver did not start")
            time.sleep(0.1)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from None

    def command(self, name: str, **params: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def set_dark(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": value}],
        )

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def wait_for(self, script: str, *, timeout_s: float = 30.0) -> Any:
        """Until the expression is true; its value."""
        due = time.monotonic() + timeout_s
        while True:
            value = self.run(f"return {script};")
            if value:
                return value
            if time.monotonic() > due:
                raise TimeoutError(f"not true within {timeout_s:g} s: {script}")
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        actions = []
        for key in keys:
            text = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": text}, {"type": "keyUp", "value": text}]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def shoot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def list_complaints(self) -> list[str]:
        """What the console said that is a warning or an error."""
        rows = self._ask("POST", "/se/log", {"type": "browser"})
        return [row["message"] for row in rows if row["level"] in ("WARNING", "SEVERE")]

    def close(self) -> None:
        try:
            if "/session/" in self._base:
                self._ask("DELETE", "")
        except (OSError, RuntimeError, urllib.error.URLError):
            pass
        self._driver.terminate()
        try:
            self._driver.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        for _ in range(20):
            try:
                self._home.cleanup()
                return
            except OSError:
                time.sleep(0.2)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

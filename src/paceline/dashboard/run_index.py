"""All runs of a folder: which are there, how each stands, and the ones that are looked at."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from paceline.dashboard.run_view import RunView
from paceline.report.comparison import as_mapping
from paceline.report.run_loader import find_run_folders
from paceline.report.stats import as_finite
from paceline.telemetry.reader import EventTail, Plain
from paceline.telemetry.run_folder import RunFolder

SILENT_S = 20.0
"""Every process writes once a second: a run that has written nothing for so long is not going."""

FORGET_S = 60.0
"""A run that no page has asked for since then is no longer read."""

MOST_LIVE = 24
"""Runs kept in memory at once; the ones looked at longest ago are dropped."""

RATE_WINDOW_S = 30.0
SCAN_S = 2.0
POLL_S = 0.5

FROM_RESULT = ("status", "error", "strategy", "model", "data", "workers", "servers", "seed",
               "batch", "epochs", "samples", "updates", "seconds", "samples_per_s", "train_loss",
               "train_acc", "val_loss", "val_acc", "test_loss", "test_acc", "virtual", "bytes_sent",
               "peak_rss_bytes")  # fmt: skip


class RunSummary:
    """What the list says of one run, kept up with little reading."""

    def __init__(self, path: Path, ident: str) -> None:
        self.folder = RunFolder(path)
        self.ident = ident
        self._stamps: dict[Path, tuple[int, int]] = {}
        self.config: Plain = {}
        self._result: Plain = {}
        self.unreadable: set[str] = set()
        """Of run.json and result.json, what is there and cannot be read."""
        self._begin()

    def _begin(self) -> None:
        self._follower = EventTail(self.folder.events("run"))
        self._facts: Plain = {}
        self._recent: deque[tuple[float, float]] = deque()
        self._verdicts: dict[tuple[str, str], str] = {}

    def poll(self) -> None:
        self.config = self._read(self.folder.config, self.config)
        self._result = self._read(self.folder.result, self._result)
        for event in self._follower.poll():
            try:
                self._take(event)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
        if self._follower.restarts:
            self._begin()

    def _read(self, path: Path, before: Plain) -> Plain:
        """The JSON in a file that has changed; what it was before while it cannot be read."""
        try:
            stat = path.stat()
        except OSError:
            self._stamps.pop(path, None)
            return {}
        stamp = stat.st_mtime_ns, stat.st_size
        if self._stamps.get(path) == stamp:
            return before
        try:
            value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):
            value = None
        if not isinstance(value, dict):
            self.unreadable.add(path.name)
            return before
        self.unreadable.discard(path.name)
        self._stamps[path] = stamp
        return value

    def _take(self, event: Plain) -> None:
        kind = event.get("kind")
        t = as_finite(event.get("t"))
        if t is None:
            return
        self._facts["seconds"] = t
        if kind == "totals":
            self._facts["per_epoch"] = event.get("samples_per_epoch")
        elif kind == "progress":
            self._facts.update({k: event.get(k) for k in ("samples", "updates", "loss", "epoch")})
            self._recent.append((t, float(event.get("samples") or 0)))
            while len(self._recent) > 2 and t - self._recent[0][0] > RATE_WINDOW_S:
                self._recent.popleft()
        elif kind == "epoch":
            row = event["row"]
            self._facts["epoch"] = row.get("epoch")
            self._facts.update({k: row.get(k) for k in ("val_acc", "val_loss", "train_acc")})
            self._facts.setdefault("per_epoch", (row.get("samples") or 0) / (row["epoch"] or 1))
        elif kind == "phase":
            self._facts["now"] = event.get("strategy")
        elif kind == "ended":
            self._facts["ended"] = event.get("status")
        elif kind == "verdict":
            key = str(event.get("rule")), str(event.get("who"))
            if event.get("state") == "over":
                self._verdicts.pop(key, None)
            else:
                self._verdicts[key] = str(event.get("text"))

    @property
    def is_over(self) -> bool:
        return bool(self._result)

    def payload(self) -> Plain:
        config, result, facts = self.config, self._result, self._facts
        job = as_mapping(config.get("job"))
        told: Plain = {"id": self.ident, "name": self.ident}
        for name in ("strategy", "workers", "servers", "virtual"):
            told[name] = config.get(name)
        for name in ("model", "data", "seed", "batch"):
            told[name] = job.get(name)
        told["asked_epochs"] = job.get("epochs")
        told["labels"] = as_mapping(config.get("labels"))
        told["started"] = config.get("started")
        told["verdicts"] = list(self._verdicts.values())
        if result:
            told.update({k: result.get(k) for k in FROM_RESULT})
            told["epoch"] = result.get("epochs")
            told["share"] = 1.0 if result.get("status") == "done" else self._share()
            return told
        told.update({k: v for k, v in facts.items() if k not in ("ended", "per_epoch")})
        silent = self._silent_s()
        told["status"] = facts.get("ended") or ("running" if silent < SILENT_S else "silent")
        told["silent_s"] = round(silent, 1)
        told["samples_per_s"] = rate = self._rate()
        told["share"] = self._share()
        total = self._total()
        if total and rate and told["status"] == "running":
            told["left_s"] = max(0.0, (total - (facts.get("samples") or 0)) / rate)
        return told

    def _total(self) -> float | None:
        per = as_finite(self._facts.get("per_epoch"))
        epochs = as_finite(as_mapping(self.config.get("job")).get("epochs"))
        return per * epochs if per and epochs else None

    def _share(self) -> float | None:
        total = self._total()
        seen = as_finite(self._facts.get("samples")) or as_finite(self._result.get("samples"))
        return min(1.0, (seen or 0.0) / total) if total else None

    def _rate(self) -> float | None:
        if len(self._recent) < 2:
            return None
        (t0, n0), (t1, n1) = self._recent[0], self._recent[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else None

    def _silent_s(self) -> float:
        newest = 0.0
        for path in (self.folder.events("run"), self.folder.events("worker-0"), self.folder.config):
            try:
                newest = max(newest, path.stat().st_mtime)
            except OSError:
                continue
        return max(0.0, time.time() - newest)


class RunIndex:
    """The runs below a folder, read by one thread and asked by many."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cards: dict[str, RunSummary] = {}
        self._live: dict[str, RunView] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._scanned_s = -SCAN_S
        self._thread = threading.Thread(target=self._keep_up, daemon=True)

    def start(self) -> None:
        self.refresh()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def refresh(self) -> None:
        """Find new runs now and then, read on in those that are going or are looked at."""
        with self._lock:
            now = time.monotonic()
            if now - self._scanned_s >= SCAN_S:
                self._scanned_s = now
                self._scan()
            for card in self._cards.values():
                card.poll()
            for ident in [i for i, run in self._live.items() if now - run.viewed_s > FORGET_S]:
                del self._live[ident]
            for run in self._live.values():
                run.poll()

    def _scan(self) -> None:
        found = {}
        for path in find_run_folders(self.root):
            inner = path.relative_to(self.root)
            ident = str(inner) if inner.parts else self.root.resolve().name
            found[ident] = path
        for ident in set(self._cards) - set(found):
            del self._cards[ident]
            self._live.pop(ident, None)
        for ident, path in found.items():
            if ident not in self._cards:
                self._cards[ident] = RunSummary(path, ident)

    def _keep_up(self) -> None:
        while not self._stop.wait(POLL_S):
            self.refresh()

    def list_runs(self) -> list[Plain]:
        with self._lock:
            told = [card.payload() for card in self._cards.values()]
        order = {"running": 0}
        return sorted(told, key=lambda run: order.get(str(run.get("status")), 1))

    def run_payload(
        self, ident: str, *, generation: str, first: int, who: str | None
    ) -> Plain | None:
        """All that is new of a run; None where there is no such run."""
        with self._lock:
            card = self._cards.get(ident)
            if card is None:
                return None
            live = self._live.get(ident)
            if live is None:
                while len(self._live) >= MOST_LIVE:
                    oldest = min(self._live, key=lambda i: self._live[i].viewed_s)
                    del self._live[oldest]
                live = self._live[ident] = RunView(card.folder.path)
                live.poll()
            live.viewed_s = time.monotonic()
            run = card.payload()
            missing = [f"{name} is cut off or not readable" for name in sorted(card.unreadable)]
            if run["status"] != "running":
                missing += live.list_missing(card.config)
            return {
                "run": run,
                "missing": missing,
                "config": card.config,
                **live.payload(generation=generation, first=first, who=who),
            }

    def curves_payload(self, idents: list[str]) -> list[Plain]:
        """What a comparison needs of each run: its figures and its curves."""
        told = []
        for ident in idents:
            whole = self.run_payload(ident, generation="", first=0, who=None)
            if whole is not None:
                totals: dict[str, list[Any]] = {
                    row["who"]: [row["phases"], row["totals"]] for row in whole["timeline"]
                }
                told.append(
                    {k: whole[k] for k in ("run", "loss", "history", "switches", "verdicts")}
                    | {"phases": totals}
                )
        return told

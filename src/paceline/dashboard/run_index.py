"""Index of the runs below a folder: a summary of each, and the runs that a page is showing."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

from paceline.dashboard.run_view import Payload, RunView
from paceline.report.runs import find_run_folders
from paceline.report.stats import RecentRate
from paceline.telemetry import events as ev
from paceline.telemetry.metrics import View, metrics_in
from paceline.telemetry.reader import RunReader
from paceline.telemetry.run_folder import COORDINATOR, RunFolder
from paceline.telemetry.schema import as_finite, as_mapping

SILENT_S = 20.0
"""Processes write every second; a run without new events for this long is not running."""

FORGET_S = 60.0
"""A run that no page has requested for this long is no longer read."""

MAX_LIVE = 24
"""Runs kept in memory at once; the least recently viewed ones are dropped."""

SCAN_S = 2.0
POLL_S = 0.5

RUN_FACTS = ("status", "error", "strategy", "model", "data", "workers", "servers", "seed", "batch",
             "epochs", "virtual")  # fmt: skip


class RunSummary:
    """One entry of the run list; reads only run.jsonl, run.json and result.json."""

    def __init__(self, path: Path, ident: str) -> None:
        self.folder = RunFolder(path)
        self.ident = ident
        self._begin()

    def _begin(self) -> None:
        self.reader = RunReader(self.folder.path, processes=(COORDINATOR,))
        self._latest: Payload = {"seconds": None, "now": None, "epoch": None}
        """Values that the events show of a run without a result."""
        self._samples_per_epoch: float | None = None
        self._rate = RecentRate()
        self._verdicts: dict[tuple[str, str], str] = {}

    def poll(self) -> None:
        events = list(self.reader.poll())
        if self.reader.restarted:
            self._begin()
            events = list(self.reader.poll())
        for _, event in events:
            self._latest["seconds"] = event.t  # Any event shows that the run is alive.
            self._add(event)

    def _add(self, event: ev.Event) -> None:
        match event:
            case ev.RunLengthKnown():
                self._samples_per_epoch = event.samples_per_epoch
            case ev.RunProgress():
                names = ("epoch", "samples", "updates", "loss")
                self._latest |= {name: getattr(event, name) for name in names}
                self._rate.add(event.t, event.samples)
            case ev.EpochEnded(row=row):
                names = ("epoch", "val_acc", "val_loss", "train_acc")
                self._latest |= {name: row.value(name) for name in names}
                if self._samples_per_epoch is None:
                    self._samples_per_epoch = row.samples / (row.epoch or 1)
            case ev.StrategyStarted():
                self._latest["now"] = event.strategy
            case ev.RunEnded():
                self._latest["status"] = event.status
            case ev.VerdictChanged(is_over=True):
                self._verdicts.pop((event.rule, event.who), None)
            case ev.VerdictChanged():
                self._verdicts[event.rule, event.who] = event.text

    def payload(self) -> Payload:
        config, result = self.reader.config, self.reader.result
        job = as_mapping(config.get("job"))
        payload: Payload = {"id": self.ident, "name": self.ident}
        payload |= {k: config.get(k) for k in ("strategy", "workers", "servers", "virtual")}
        payload |= {k: job.get(k) for k in ("model", "data", "seed", "batch")}
        payload["asked_epochs"] = job.get("epochs")
        payload["labels"] = as_mapping(config.get("labels"))
        payload["started"] = config.get("started")
        payload["verdicts"] = list(self._verdicts.values())
        if result is not None:
            payload |= {k: result.get(k) for k in RUN_FACTS}
            payload |= {m.key: m.value(result) for m in metrics_in(View.DASHBOARD)}
            payload["epoch"] = result.get("epochs")
            is_done = result.get("status") == "done"
            payload["share"] = 1.0 if is_done else self._share(result.get("samples"))
            return payload
        silent, total, rate = self._silent_s(), self._total(), self._rate.per_second
        samples = as_finite(self._latest.get("samples")) or 0.0
        payload |= {"status": "running" if silent < SILENT_S else "silent", **self._latest}
        payload |= {"silent_s": round(silent, 1), "samples_per_s": rate}
        payload["share"] = self._share(samples)
        if total and rate and payload["status"] == "running":
            payload["left_s"] = max(0.0, (total - samples) / rate)
        return payload

    def _total(self) -> float | None:
        per = as_finite(self._samples_per_epoch)
        epochs = as_finite(as_mapping(self.reader.config.get("job")).get("epochs"))
        return per * epochs if per and epochs else None

    def _share(self, samples: object) -> float | None:
        total = self._total()
        return min(1.0, (as_finite(samples) or 0.0) / total) if total else None

    def _silent_s(self) -> float:
        folder, newest = self.folder, 0.0
        for path in (folder.events(COORDINATOR), folder.events("worker-0"), folder.config):
            with contextlib.suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
        return max(0.0, time.time() - newest)


class RunIndex:
    """The runs below a folder: one thread reads them, any thread may query them."""

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
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def refresh(self) -> None:
        """Finds new runs and reads new events of all runs in the list and on pages."""
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

    def list_runs(self) -> list[Payload]:
        with self._lock:
            payloads = [card.payload() for card in self._cards.values()]
        return sorted(payloads, key=lambda run: run["status"] != "running")

    def run_payload(
        self, ident: str, *, generation: str, first: int, who: str | None
    ) -> Payload | None:
        """Returns what is new of a run; None if there is no such run."""
        with self._lock:
            card = self._cards.get(ident)
            if card is None:
                return None
            live = self._live.get(ident)
            if live is None:
                while len(self._live) >= MAX_LIVE:
                    oldest = min(self._live, key=lambda i: self._live[i].viewed_s)
                    del self._live[oldest]
                live = self._live[ident] = RunView(card.folder.path)
                live.poll()
            live.viewed_s = time.monotonic()
            run = card.payload()
            missing = card.reader.unreadable_files
            if run["status"] != "running":
                missing += live.list_missing(card.reader.config)
            return {
                "run": run,
                "missing": missing,
                "config": card.reader.config,
                **live.payload(generation=generation, first=first, who=who),
            }

    def curves_payload(self, idents: list[str]) -> list[Payload]:
        """Returns the metrics and curves of each run for a comparison."""
        payloads: list[Payload] = []
        for ident in idents:
            whole = self.run_payload(ident, generation="", first=0, who=None)
            if whole is not None:
                names = ("run", "loss", "history", "switches", "verdicts")
                timeline: Any = whole["timeline"]
                phases = {row["who"]: (row["phases"], row["totals"]) for row in timeline}
                payloads.append({**{k: whole[k] for k in names}, "phases": phases})
        return payloads

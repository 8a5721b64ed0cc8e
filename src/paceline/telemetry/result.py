"""result.json: a run summed up from the coordinator's history and the workers' totals."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Protocol

from paceline.protocol.history import History
from paceline.telemetry.events import PHASES, STEP_PHASES, EpochRow
from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.phase_clock import STAGES
from paceline.telemetry.reader import read_run
from paceline.telemetry.run_folder import RunFolder, read_events
from paceline.telemetry.verdicts import verdicts


class CoordinatorState(Protocol):
    """What is needed of a coordinator after a run."""

    history: History
    totals: dict[int, dict[str, Any]]
    final: dict[str, float | None]


class FinishedRun(Protocol):
    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def coordinator(self) -> CoordinatorState: ...


def make_result(
    config: dict[str, Any],
    outcome: FinishedRun,
    folder: RunFolder,
    *,
    virtual: bool = False,
    live: LiveRun | None = None,
) -> dict[str, Any]:
    """Every field of the contract; what a run that failed never measured is null."""
    history = outcome.coordinator.history
    totals = outcome.coordinator.totals
    final = outcome.coordinator.final
    last = history.rows[-1] if history.rows else EpochRow()
    job = config["job"]
    train_s = history.train_seconds
    phases, by_epoch = phases_of_workers(totals, None if virtual else folder)
    return {
        "status": outcome.status,
        "error": outcome.error,
        "strategy": config["strategy"],
        "model": job.get("model"),
        "data": job.get("data"),
        "workers": config["workers"],
        "servers": config["servers"],
        "seed": job.get("seed"),
        "batch": job.get("batch"),
        "epochs": history.epoch,
        "samples": history.samples,
        "updates": history.updates,
        "seconds": round(outcome.seconds, 6),
        "samples_per_s": round(history.samples / train_s, 3) if train_s > 0 else None,
        "train_loss": last.train_loss,
        "train_acc": last.train_acc,
        "val_loss": last.val_loss,
        "val_acc": last.val_acc,
        "test_loss": final.get("test_loss"),
        "test_acc": final.get("test_acc"),
        "stages": sum_stages(totals, outcome.seconds),
        "history": [row.to_plain() for row in history.rows],
        "switches": [row.to_plain() for row in history.switches],
        "decisions": [row.to_plain() for row in history.decisions],
        "staleness": staleness_summary(history.staleness),
        "lag": {"max": history.max_lag},
        "phases": phases,
        "step_phases": by_epoch,
        "resources": resource_summary(live),
        "bytes_by_role": bytes_by_role(live),
        "verdicts": run_verdicts(live, folder),
        "input": {
            f"worker-{w}": totals[w]["input"] for w in sorted(totals) if totals[w].get("input")
        },
        "bytes_sent": sum(t["bytes_sent"] for t in totals.values()),
        "parameter_bytes": next((t["parameter_bytes"] for t in totals.values()), None),
        "collectives": next((t.get("collectives") for t in totals.values()), None),
        "parts": {f"worker-{w}": t["part"] for w, t in sorted(totals.items()) if t.get("part")},
        "bytes_before_codec": sum(t["bytes_before"] for t in totals.values()),
        "peak_rss_bytes": max(
            (t["peak_rss_bytes"] for t in totals.values() if t["peak_rss_bytes"] is not None),
            default=None,
        ),
        "predicted": prediction_and_actual(config, totals, history.samples, train_s),
        "virtual": virtual,
        "labels": config.get("labels", {}),
        "versions": config["versions"],
    }


def prediction_and_actual(
    config: dict[str, Any], totals: dict[int, dict[str, Any]], samples: int, train_s: float
) -> dict[str, Any] | None:
    """What a plan expected, with what it came to; None where nothing was expected."""
    expected = config.get("predicted")
    if expected is None:
        return None
    batch = config["job"]["batch"]
    stages = totals[0]["stages"] if 0 in totals else None
    return {
        **expected,
        "actual_step_s": round(train_s * batch / samples, 9) if samples and train_s > 0 else None,
        "actual_seconds": round(stages["train"] + stages["evaluate"], 6) if stages else None,
    }


def staleness_summary(counts: Counter[int]) -> dict[str, Any]:
    total = sum(counts.values())
    return {
        "mean": round(sum(k * v for k, v in counts.items()) / total, 6) if total else None,
        "max": max(counts, default=None),
        "histogram": {str(k): v for k, v in sorted(counts.items())},
    }


def sum_stages(totals: dict[int, dict[str, Any]], seconds: float) -> dict[str, float | None]:
    """Worker 0's division of the wall time; the orderly end of all processes counts as saving."""
    if 0 not in totals:
        return dict.fromkeys(STAGES)
    stages: dict[str, float] = {name: round(float(totals[0]["stages"][name]), 6) for name in STAGES}
    stages["save"] = round(stages["save"] + max(0.0, seconds - sum(stages.values())), 6)
    return dict(stages)


def resource_summary(live: LiveRun | None) -> dict[str, dict[str, Any]]:
    """What each process used; empty where nothing was sampled."""
    if live is None:
        return {}
    return {who: live.totals[who].describe() for who in sorted(live.totals)}


def bytes_by_role(live: LiveRun | None) -> dict[str, dict[str, int]]:
    """Bytes over TCP by role, as the kernel counted them on both ends."""
    if live is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    for who, totals in live.totals.items():
        role = {"run": "coordinator"}.get(who, who.split("-")[0])
        sums = found.setdefault(role, {"sent": 0, "received": 0})
        sums["sent"] += totals.net_out
        sums["received"] += totals.net_in
    return found


def run_verdicts(live: LiveRun | None, folder: RunFolder) -> list[dict[str, Any]]:
    """What limited the run as a whole."""
    if live is None:
        return []
    return [dataclasses.asdict(v) for v in verdicts(read_run(folder.path, steps=False))]


Phases = dict[str, dict[str, float]]


def phases_of_workers(
    totals: dict[int, dict[str, Any]], folder: RunFolder | None
) -> tuple[Phases, dict[str, Phases]]:
    """Seconds by worker and phase: of the whole run, and of steps in the first epoch and later.

    Virtual workers know by themselves how long they waited; real ones' steps tell.
    """
    recorded = RecordedSteps()
    if folder is not None:
        for worker in sorted(totals):
            recorded.read(worker, folder.events(f"worker-{worker}"))
    waits = recorded.waited()
    phases: Phases = {}
    parts: dict[str, Phases] = {}
    for worker in sorted(totals):
        name = f"worker-{worker}"
        mine = {name: float(totals[worker]["phases"][name]) for name in PHASES}
        moved = sum(waits.get((worker, part), 0.0) for part in PARTS)
        phases[name] = _move(mine, moved)
        for part in PARTS:
            seconds = recorded.seconds.get((worker, part))
            if seconds is not None:
                moved = waits.get((worker, part), 0.0)
                parts.setdefault(part, {})[name] = _move(seconds, moved)
    return phases, parts


def _move(phases: dict[str, float], waited_s: float) -> dict[str, float]:
    moved = min(waited_s, phases["comm_exposed"])
    changed = {
        "comm_exposed": phases["comm_exposed"] - moved,
        "wait": phases["wait"] + moved,
    }
    return {name: round(value, 6) for name, value in {**phases, **changed}.items()}


PARTS = ("first_epoch", "rest")
"""The first epoch is apart: caches, allocators and connections are cold in it."""


class RecordedSteps:
    """Reads workers' steps once: seconds by phase, and what of the exchanges was waiting.

    In a synchronous exchange the last to arrive does not wait: what it takes is the exchange
    itself, and what others take beyond that is waiting.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], dict[str, float]] = {}
        self._exchanges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._workers: set[int] = set()

    def read(self, worker: int, path: Path) -> None:
        self._workers.add(worker)
        for event in read_events(path):
            if event.get("kind") == "steps_sum":
                part = PARTS[event["epoch"] > 0]
                self._add(worker, part, {k: v / 1e6 for k, v in event["phases_us"].items()})
            elif event.get("kind") == "steps":
                self._read_window(worker, event)

    def _add(self, worker: int, part: str, seconds: dict[str, float]) -> None:
        sums = self.seconds.setdefault((worker, part), dict.fromkeys(STEP_PHASES, 0.0))
        for name in STEP_PHASES:
            sums[name] += seconds.get(name, 0.0)

    def _read_window(self, worker: int, event: dict[str, Any]) -> None:
        epochs = event["epoch"]
        first = sum(epoch == 0 for epoch in epochs)  # Epochs only ever grow.
        for part, cut in zip(PARTS, (slice(None, first), slice(first, None)), strict=True):
            if epochs[cut]:
                self._add(worker, part, {n: sum(event[n][cut]) / 1e6 for n in STEP_PHASES})
        columns = (epochs, event["start"], event["staleness"], event["comm_exposed"])
        for epoch, start, staleness, comm_us in zip(*columns, strict=True):
            if staleness < 0:
                self._exchanges[epoch, start].append((worker, comm_us))

    def waited(self) -> dict[tuple[int, str], float]:
        """Seconds by worker and part."""
        waited: dict[tuple[int, str], float] = defaultdict(float)
        for (epoch, _), parts in self._exchanges.items():
            if len(parts) > 1 and len(parts) == len(self._workers):
                least = min(us for _, us in parts)
                for worker, us in parts:
                    waited[worker, PARTS[epoch > 0]] += (us - least) / 1e6
        return waited

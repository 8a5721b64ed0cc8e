"""result.json: a run summed up from the coordinator's history and the workers' totals."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Protocol

from paceline.protocol.history import History
from paceline.telemetry.events import PHASES
from paceline.telemetry.folder import RunFolder, read_events
from paceline.telemetry.phases import STAGES


class Coordinated(Protocol):
    """What is needed of a coordinator after a run."""

    history: History
    totals: dict[int, dict[str, Any]]
    final: dict[str, float | None]


class Ended(Protocol):
    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def coordinator(self) -> Coordinated: ...


def make_result(
    config: dict[str, Any], outcome: Ended, folder: RunFolder, *, virtual: bool = False
) -> dict[str, Any]:
    """Every field of the contract; what a run that failed never measured is null."""
    history = outcome.coordinator.history
    totals = outcome.coordinator.totals
    final = outcome.coordinator.final
    last = history.rows[-1] if history.rows else {}
    job = config["job"]
    train_s = history.train_seconds
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
        "train_loss": last.get("train_loss"),
        "train_acc": last.get("train_acc"),
        "val_loss": last.get("val_loss"),
        "val_acc": last.get("val_acc"),
        "test_loss": final.get("test_loss"),
        "test_acc": final.get("test_acc"),
        "stages": sum_stages(totals, outcome.seconds),
        "history": history.rows,
        "switches": history.switches,
        "decisions": history.decisions,
        "staleness": describe_staleness(history.staleness),
        "lag": {"max": history.max_lag},
        "phases": phases_of_workers(totals, None if virtual else folder),
        "bytes_sent": sum(t["bytes_sent"] for t in totals.values()),
        "parameter_bytes": next((t["parameter_bytes"] for t in totals.values()), None),
        "bytes_before_codec": sum(t["bytes_before"] for t in totals.values()),
        "peak_rss_bytes": max(
            (t["peak_rss_bytes"] for t in totals.values() if t["peak_rss_bytes"] is not None),
            default=None,
        ),
        "virtual": virtual,
        "labels": config.get("labels", {}),
        "versions": config["versions"],
    }


def describe_staleness(counts: Counter[int]) -> dict[str, Any]:
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


def phases_of_workers(
    totals: dict[int, dict[str, Any]], folder: RunFolder | None
) -> dict[str, dict[str, float]]:
    """Virtual workers know by themselves how long they waited; real ones' steps tell."""
    waits = time_waited(folder, len(totals)) if folder is not None and len(totals) > 1 else {}
    phases: dict[str, dict[str, float]] = {}
    for worker in sorted(totals):
        mine = {name: float(totals[worker]["phases"][name]) for name in PHASES}
        moved = min(waits.get(worker, 0.0), mine["comm_exposed"])
        mine["comm_exposed"] -= moved
        mine["wait"] += moved
        phases[f"worker-{worker}"] = {name: round(value, 6) for name, value in mine.items()}
    return phases


def time_waited(folder: RunFolder, workers: int) -> dict[int, float]:
    """Seconds inside exchanges that a worker spent waiting for slower ones.

    In a synchronous exchange the last to arrive does not wait: what it takes is the exchange
    itself, and what others take beyond that is waiting.
    """
    exchanges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for worker in range(workers):
        for event in read_events(folder.events(f"worker-{worker}")):
            if event.get("kind") != "steps":
                continue
            for epoch, start, staleness, comm_us in zip(
                event["epoch"],
                event["start"],
                event["staleness"],
                event["comm_exposed"],
                strict=True,
            ):
                if staleness < 0:
                    exchanges[epoch, start].append((worker, comm_us))
    waited: dict[int, float] = defaultdict(float)
    for parts in exchanges.values():
        if len(parts) == workers:
            least = min(us for _, us in parts)
            for worker, us in parts:
                waited[worker] += (us - least) / 1e6
    return waited

"""Builds result.json from the coordinator's history and the workers' totals.

Without a result.json, `result_from_events` builds the part that the events of a run contain.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from paceline.protocol.coordinator import Coordinator
from paceline.telemetry import events as ev
from paceline.telemetry.live_run import LiveRun
from paceline.telemetry.phase_clock import STAGES
from paceline.telemetry.reader import ProcessRecord, RunRecord, read_run, read_step_events
from paceline.telemetry.run_folder import COORDINATOR, RunFolder
from paceline.telemetry.schema import Phases, RunConfig, RunResult
from paceline.telemetry.steps import window_seconds
from paceline.telemetry.verdicts import verdicts

UNFINISHED = "unfinished"
"""Status of a run without a result.json: interrupted, or still in progress."""
WorkerTotals = Mapping[int, Mapping[str, Any]]
"""Totals that each worker reports at its end, by worker."""


@dataclasses.dataclass
class RunOutcome:
    """The end of a run: status, error and the coordinator's final state."""

    status: str
    error: str | None
    seconds: float
    coordinator: Coordinator
    is_usage_error: bool = False
    details: str = ""


def make_result(
    config: RunConfig,
    outcome: RunOutcome,
    folder: RunFolder,
    *,
    virtual: bool = False,
    live: LiveRun | None = None,
) -> RunResult:
    """Returns every field of the contract; None for what a failed run did not measure.

    Resources and verdicts are empty without `live`, the telemetry of the run.
    """
    history = outcome.coordinator.history
    totals = outcome.coordinator.totals
    final = outcome.coordinator.final
    last = history.rows[-1] if history.rows else ev.EpochRow()
    job = config["job"]
    train_s = history.train_seconds
    judged = verdicts(read_run(folder.path, steps=False)) if live else []
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
        "val_loss": final.get("val_loss", last.val_loss),
        "val_acc": final.get("val_acc", last.val_acc),
        "test_loss": final.get("test_loss"),
        "test_acc": final.get("test_acc"),
        "stages": sum_stages(totals, outcome.seconds),
        "history": [row.to_plain() for row in history.rows],
        "switches": [row.to_plain() for row in history.switches],
        "decisions": [row.to_plain() for row in history.decisions],
        "views": [row.to_plain() for row in history.views],
        "staleness": staleness_summary(history.staleness),
        "lag": {"max": history.max_lag},
        "phases": phases,
        "step_phases": by_epoch,
        "resources": {w: live.totals[w].describe() for w in sorted(live.totals)} if live else {},
        "bytes_by_role": bytes_by_role(live) if live else {},
        "verdicts": [dataclasses.asdict(verdict) for verdict in judged],
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
        "predicted": prediction_and_actual(config, outcome.seconds, history.samples, train_s),
        "notes": list(outcome.coordinator.notes),
        "virtual": virtual,
        "labels": config.get("labels", {}),
        "versions": config["versions"],
    }


def prediction_and_actual(
    config: RunConfig, seconds: float, samples: int, train_s: float
) -> dict[str, object] | None:
    """Returns the plan's prediction next to the measured values; None without a prediction."""
    expected = config.get("predicted")
    if expected is None:
        return None
    batch = config["job"]["batch"]
    return {
        **expected,
        "actual_step_s": round(train_s * batch / samples, 9) if samples and train_s > 0 else None,
        "actual_seconds": round(seconds, 6),
    }


def staleness_summary(counts: Counter[int]) -> dict[str, Any]:
    total = sum(counts.values())
    return {
        "mean": round(sum(k * v for k, v in counts.items()) / total, 6) if total else None,
        "max": max(counts, default=None),
        "histogram": {str(k): v for k, v in sorted(counts.items())},
    }


def sum_stages(totals: WorkerTotals, seconds: float) -> dict[str, float | None]:
    """Returns the stages of the first worker; shutting down the processes counts as saving."""
    if not totals:
        return dict.fromkeys(STAGES)
    first = totals[min(totals)]["stages"]
    stages: dict[str, float] = {name: round(float(first[name]), 6) for name in STAGES}
    stages["save"] = round(stages["save"] + max(0.0, seconds - sum(stages.values())), 6)
    return dict(stages)


def bytes_by_role(live: LiveRun) -> dict[str, dict[str, int]]:
    """Returns the TCP bytes per role, counted by the kernel on both ends."""
    found: dict[str, dict[str, int]] = {}
    for who, totals in live.totals.items():
        role = "coordinator" if who == COORDINATOR else who.split("-")[0]
        sums = found.setdefault(role, {"sent": 0, "received": 0})
        sums["sent"] += totals.net_out
        sums["received"] += totals.net_in
    return found


def phases_of_workers(
    totals: WorkerTotals, folder: RunFolder | None
) -> tuple[Phases, dict[str, Phases]]:
    """Returns the seconds by worker and time category: whole run, first epoch and later epochs.

    Simulated workers report how long they waited; for real ones it is computed from their steps.
    """
    recorded = RecordedSteps()
    if folder is not None:
        for worker in sorted(totals):
            recorded.read(worker, folder)
    waits = recorded.waited(len(totals))
    phases: Phases = {}
    parts: dict[str, Phases] = {}
    for worker in sorted(totals):
        name = f"worker-{worker}"
        mine = {name: float(totals[worker]["phases"][name]) for name in ev.PHASES}
        phases[name] = _move(mine, sum(waits[worker, part] for part in PARTS))
        for part in PARTS:
            if (seconds := recorded.seconds.get((worker, part))) is not None:
                parts.setdefault(part, {})[name] = _move(seconds, waits[worker, part])
    return phases, parts


def _move(phases: dict[str, float], waited_s: float) -> dict[str, float]:
    moved = min(waited_s, phases["comm_exposed"])
    changed = {"comm_exposed": phases["comm_exposed"] - moved, "wait": phases["wait"] + moved}
    return {name: round(value, 6) for name, value in {**phases, **changed}.items()}


PARTS = ("first_epoch", "rest")
"""The first epoch is separate because caches, allocators and connections are cold."""


class RecordedSteps:
    """Seconds by time category from the workers' steps, and the waiting part of exchanges.

    In a synchronous exchange the last worker to arrive does not wait: its time is the exchange
    itself, and the additional time of the others is waiting.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, str], dict[str, float]] = {}
        self._exchanges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def read(self, worker: int, folder: RunFolder) -> None:
        for event in read_step_events(folder.path, worker):
            if isinstance(event, ev.StepSummary):
                self._add(worker, PARTS[event.epoch > 0], window_seconds(event))
            else:
                self._add_window(worker, event)

    def _add(self, worker: int, part: str, seconds: Mapping[str, float]) -> None:
        sums = self.seconds.setdefault((worker, part), dict.fromkeys(ev.STEP_PHASES, 0.0))
        for name in ev.STEP_PHASES:
            sums[name] += seconds[name]

    def _add_window(self, worker: int, window: ev.StepWindow) -> None:
        first = sum(epoch == 0 for epoch in window.epoch)  # Epochs never decrease.
        for part, cut in zip(PARTS, (slice(None, first), slice(first, None)), strict=True):
            if window.epoch[cut]:
                seconds = {n: sum(getattr(window, n)[cut]) / 1e6 for n in ev.STEP_PHASES}
                self._add(worker, part, seconds)
        columns = (window.epoch, window.start, window.staleness, window.comm_exposed)
        for epoch, start, staleness, comm_us in zip(*columns, strict=True):
            if staleness < 0:
                self._exchanges[epoch, start].append((worker, comm_us))

    def waited(self, workers: int) -> defaultdict[tuple[int, str], float]:
        """Returns the seconds of waiting by worker and part, in exchanges of all workers."""
        waited: defaultdict[tuple[int, str], float] = defaultdict(float)
        for (epoch, _), parts in self._exchanges.items():
            if len(parts) > 1 and len(parts) == workers:
                least = min(us for _, us in parts)
                for worker, us in parts:
                    waited[worker, PARTS[epoch > 0]] += (us - least) / 1e6
        return waited


def result_from_events(record: RunRecord) -> RunResult:
    """Returns the status, totals, history, switches and time categories found in the events."""
    config = record.config
    job = config.get("job") or {}
    result: RunResult = {"status": UNFINISHED, "error": None, "labels": config.get("labels") or {}}
    asked = {**job, **config}
    for name in ("strategy", "model", "data", "workers", "servers", "seed", "batch"):
        if isinstance(asked.get(name), str | int):
            result[name] = asked[name]
    # By epoch and by samples, because a resumed run repeats what it lost.
    history: dict[int, Mapping[str, object]] = {}
    switches: dict[int, Mapping[str, object]] = {}
    views: list[Mapping[str, object]] = []
    for event in record.events:
        result["seconds"] = event.t
        match event:
            case ev.RunStarted():
                result["strategy"] = event.strategy
                result["workers"], result["servers"] = event.workers, event.servers
            case ev.RunProgress():
                result["samples"], result["updates"] = event.samples, event.updates
            case ev.EpochEnded(row=row):
                history[row.epoch] = row.to_plain()
                result["samples"], result["updates"] = row.samples, row.updates
                result["train_loss"], result["train_acc"] = row.train_loss, row.train_acc
                result["val_loss"], result["val_acc"] = row.val_loss, row.val_acc
            case ev.ViewChanged(row=row):
                views.append(row.to_plain())
            case ev.StrategySwitched(row=row):
                switches[row.samples] = row.to_plain()
            case ev.RunEnded() if event.status != "done":
                # Ended well but without result.json is not done: its final metrics are missing.
                result["status"], result["error"] = event.status, event.error
    result["history"], result["switches"] = list(history.values()), list(switches.values())
    result["views"] = views
    phases = {w.process_name: worker_phases(w) for w in record.workers}
    result["phases"] = {name: seconds for name, seconds in phases.items() if any(seconds.values())}
    return result


def worker_phases(worker: ProcessRecord) -> dict[str, float]:
    """Returns a worker's totals by time category; without totals, sums of its recorded steps."""
    if isinstance(worker.ended, ev.WorkerEnded):
        return dict(worker.ended.phases)
    sums = dict.fromkeys(ev.STEP_PHASES, 0.0)
    for window in worker.steps:
        for name, seconds in window_seconds(window).items():
            sums[name] += seconds
    return sums

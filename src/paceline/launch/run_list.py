"""Executes the runs of a comparison or a matrix: resumable, each in its folder, failures kept."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import HostError, RunFailed, UsageError
from paceline.launch.placement import Placement
from paceline.launch.run import Run, run_to_result, run_training
from paceline.launch.run_options import RunOptions
from paceline.telemetry.run_folder import RunFolder, RunNotice, list_checkpoints, write_json
from paceline.telemetry.schema import RunResult

RETRY_STATUSES = ("cancelled",)
"""Statuses after which a run is always repeated."""
RESUME_STATUSES = (*RETRY_STATUSES, "failed")
"""Statuses after which `--resume` repeats a run."""
IRRELEVANT = ("data_dir", "timeout_s", "metrics_port")
"""Facts that do not change a result, such as the location of the data."""

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run of a list."""

    name: str
    """Its folder."""
    facts: Facts
    """Description of the job and its options; the result of other facts is not reused."""
    placement: Placement
    options: RunOptions
    """Options besides `out`, `resume` and `force`, and those of the placement."""


class RunListView(Protocol):
    """Shows the progress of a list."""

    def begin(self, name: str) -> None: ...
    def show(self, notice: RunNotice) -> None: ...
    def end(self, name: str, result: Mapping[str, Any]) -> None: ...
    def skip(self, name: str, result: Mapping[str, Any]) -> None:
        """Counts a run whose result is reused."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunList:
    """Runs in one directory, in their order of execution."""

    out: Path
    runs: Sequence[PlannedRun]
    record: str
    """File that describes the runs, from which they are continued."""
    about: Facts
    """Further contents of that file."""
    resume: bool = False
    """Repeat runs that failed."""
    retry: bool = False
    """Repeat runs that failed or diverged, and any run that fails now, once."""
    force: bool = False
    tell: Callable[[str], None] = lambda line: None

    def execute(
        self, view: RunListView, run: Run, on_end: Callable[[list[RunResult]], None]
    ) -> list[RunResult]:
        """Executes every missing run; returns the results of all.

        `on_end` receives the results there are also if this is interrupted. Raises UsageError
        before anything starts if the directory contains runs of other facts.
        """
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file; use a directory")
        if not self.force:
            self._check_folder()
        self.out.mkdir(parents=True, exist_ok=True)
        results: list[RunResult] = []
        with self._lock():
            if self.force:
                clear_runs(self.out)
            rows = [{**each.facts, "name": each.name, "hash": _hash(each)} for each in self.runs]
            write_json(self.out / self.record, {**self.about, "runs": rows})
            kept = {each.name: self._reusable_result(each.name) for each in self.runs}
            self._tell_what_is_reused(kept)
            if run is run_training:
                missing = [each for each in self.runs if kept[each.name] is None]
                warm_up(missing)
            try:
                for each in self.runs:
                    result = kept[each.name]
                    if result is None:
                        view.begin(each.name)
                        result = self._run(each, view, run)
                        view.end(each.name, result)
                    else:
                        view.skip(each.name, result)
                    results.append({**result, "dir": each.name})
            finally:
                # Ctrl-C still writes the comparison of the finished runs.
                on_end(results)
        return results

    def _run(self, planned: PlannedRun, view: RunListView, run: Run) -> RunResult:
        folder, place = RunFolder(self.out / planned.name), planned.placement
        half_done = bool(list_checkpoints(folder.checkpoints)) and not folder.result.exists()
        options = replace(
            planned.options,
            out=folder.path,
            workers=place.strategy.worker_count(place.workers),
            launcher=place.launcher,
            predicted=place.predicted,
            resume=half_done,
            force=not half_done,
            recall=False,
            on_event=view.show,
        )
        carry_out = place.run or run
        try:
            result = run_to_result(carry_out, place.job, place.strategy, options)
            if self.retry and result["status"] == "failed":
                self.tell(f"{planned.name} failed and is repeated once: {result['error']}")
                again = replace(options, resume=False, force=True)
                result = run_to_result(carry_out, place.job, place.strategy, again)
        except UsageError as error:
            raise UsageError(f"run {planned.name}: {error}") from None
        return result

    def _reusable_result(self, name: str) -> RunResult | None:
        """Returns the result of a run that does not need to be repeated."""
        folder = RunFolder(self.out / name)
        if not folder.result.exists():
            return None
        result = folder.read_result()
        status = result.get("status")
        repeated = RESUME_STATUSES if self.resume else RETRY_STATUSES
        if status in repeated or (self.retry and status != "done"):
            return None
        return result

    def _tell_what_is_reused(self, kept: Mapping[str, RunResult | None]) -> None:
        reused = [name for name, result in kept.items() if result is not None]
        partly = [
            name
            for name, result in kept.items()
            if result is None and (self.out / name / "run.json").exists()
        ]
        if reused:
            self.tell(f"reusing {len(reused)} of {len(kept)} runs: {', '.join(reused)}")
        if partly:
            runs = "1 run" if len(partly) == 1 else f"{len(partly)} runs"
            self.tell(f"repeating or continuing {runs}: {', '.join(partly)}")

    def _check_folder(self) -> None:
        """Raises UsageError if an existing run is not the one that is planned."""
        known = self.out / self.record
        if not known.exists():
            if (self.out / "comparison.json").exists():
                raise UsageError(
                    f"--out {self.out} already contains another comparison; choose a new directory"
                )
            return
        try:
            rows = json.loads(known.read_text(encoding="utf-8"))["runs"]
            before = {row["name"]: row for row in rows}
        except (OSError, ValueError, KeyError, TypeError):
            raise UsageError(
                f"cannot read {known}; choose a new directory, or start over with --force"
            ) from None
        for each in self.runs:
            then = before.get(each.name) if (self.out / each.name).exists() else None
            if then is None or then.get("hash") == _hash(each):
                continue
            difference = _find_difference(_relevant(then), _relevant(each.facts))
            if difference is not None:
                name, old, new = difference
                raise UsageError(
                    f"--out {self.out} contains {each.name} of another matrix or comparison "
                    f"({name} was {old!r}, now {new!r}); choose a new directory, or start over "
                    "with --force"
                )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Locks the directory, so that only one command executes its runs."""
        with (self.out / f"{Path(self.record).stem}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"another command is running the {Path(self.record).stem} in {self.out}; wait "
                    "for it, or stop it"
                ) from None
            yield


def warm_up(runs: Sequence[PlannedRun]) -> None:
    """Prepares the machines of all runs, whose times would otherwise include it.

    A machine that cannot be used fails the runs that need it, which report it.
    """
    launchers = {
        id(each.placement.launcher): each.placement.launcher
        for each in runs
        if each.placement.run is None
    }
    for launcher in launchers.values():
        with contextlib.suppress(RunFailed, HostError):
            launcher.warm_up()


def clear_runs(folder: Path) -> None:
    """Removes the runs of the replaced comparison."""
    for old in folder.glob("*-seed*"):
        if (old / "run.json").exists():
            RunFolder(old).clear()
            with contextlib.suppress(OSError):
                old.rmdir()


def _relevant(facts: Facts) -> dict[str, Any]:
    """Returns facts without those that do not change a result, as JSON stores them."""
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return {k: v for k, v in _prune(plain).items() if k not in ("name", "hash")}


def _prune(value: Any) -> Any:
    if isinstance(value, dict):
        pruned = {k: _prune(v) for k, v in value.items() if k not in IRRELEVANT}
        return {k: v for k, v in pruned.items() if v not in ({}, None)}
    return value


def _hash(planned: PlannedRun) -> str:
    text = json.dumps(_relevant(planned.facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _find_difference(before: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Returns the first fact that differs: its name, the old and the new value."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            name = f"{path}.{key}" if path else key
            if found := _find_difference(before.get(key), now.get(key), name):
                return found
        return None
    return None if before == now else (path, before, now)

"""Find the smallest synchronous share that keeps the accuracy, from one synchronous run.

The run keeps a checkpoint of every epoch; a probe of a switch point starts from the checkpoint
there, so that it costs only its asynchronous tail. What is done already is not run again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare_runs import with_job_fields
from paceline.launch.engines import fork_client
from paceline.launch.run import Run, run_to_result, run_training
from paceline.launch.run_options import RunOptions
from paceline.specs.strategy import Strategy
from paceline.telemetry.run_folder import RunFolder, write_json

KEEP_ALL = 1_000_000


@dataclasses.dataclass(frozen=True)
class SwitchTrial:
    """The result of one fraction of the run under the first strategy."""

    share: float
    strategy: str
    status: str
    val_acc: float | None
    test_acc: float | None
    seconds: float | None
    folder: str


def search_switch_point(
    job: Job | JobRef,
    first: Strategy,
    second: Strategy,
    options: RunOptions,
    *,
    tolerance: float,
    others: list[Strategy],
    tell: Callable[[str], None] = lambda line: None,
    run: Run = run_training,
    where: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Bisect over the epochs of one run of `first`; returns what `tune.json` holds.

    `run` carries a run out: on processes here, unless another way is given; `where` says on what.

    `tolerance` is the loss of validation accuracy that is accepted, as a fraction. A probe that
    fails or diverges counts as not acceptable and is kept in the table.
    """
    resolved = job.resolve() if isinstance(job, JobRef) else job
    resolved.check()
    for strategy in (first, second):
        strategy.check_workers(options.workers)
    for strategy in others:
        strategy.check_workers(strategy.worker_count(options.workers))
    if resolved.epochs < 2:
        raise UsageError(f"tune requires at least 2 epochs, got {resolved.epochs}")
    if not 0 <= tolerance < 1:
        raise UsageError(f"--tolerance must be a fraction from 0 to 1, got {tolerance:g}")
    _check_same_job(options, resolved, first, second, where)
    if run is run_training:
        fork_client.warm_up()
    job = with_job_fields(job, checkpoint_every="epoch(1)", until=None, patience=None)
    search = _SwitchSearch(job, resolved.epochs, first, second, options, tell, run)
    whole = search.probe(resolved.epochs)
    if whole.status != "done" or whole.val_acc is None:
        raise UsageError(
            f"the run with {first} ended as {whole.status}; tune requires it for comparison"
        )
    least = whole.val_acc - tolerance
    low, high = 0, resolved.epochs
    if _acceptable(search.probe(0), least):
        high = 0
    while high - low > 1:
        middle = (low + high) // 2
        if _acceptable(search.probe(middle), least):
            high = middle
        else:
            low = middle
    probes = [search.probes[e] for e in sorted(search.probes)]
    probes += [search.run_other(strategy) for strategy in others]
    good = [p for p in probes if _acceptable(p, least)]
    chosen = min(good, key=lambda p: p.seconds or 0.0)
    result = {
        "first": str(first),
        "second": str(second),
        "tolerance": tolerance,
        "needed_val_acc": least,
        "smallest_share": high / resolved.epochs,
        "probes": [dataclasses.asdict(p) for p in probes],
        "recommended": dataclasses.asdict(chosen),
        "evidence": explain_switch_choice(chosen, whole, tolerance),
    }
    write_json(options.out / "tune.json", result)
    return result


def _check_same_job(
    options: RunOptions,
    job: Job,
    first: Strategy,
    second: Strategy,
    where: Mapping[str, object] | None,
) -> None:
    """Probes of another job, or on other workers, must not be taken for this one's."""
    facts = {
        **job.describe(),
        "first": str(first),
        "second": str(second),
        "workers": options.workers,
        "threads": options.threads_each,
        "troubles": [t.to_plain() for t in options.slowdowns],
        "where": where,
    }
    asked = json.loads(json.dumps(facts))
    stored = options.out / "asked.json"
    before = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else asked
    for name in sorted(asked):
        if before.get(name) != asked[name]:
            raise UsageError(
                f"--out {options.out} contains probes of another job ({name} was "
                f"{before.get(name)!r}, now {asked[name]!r}); choose a new directory"
            )
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(stored, asked)


def explain_switch_choice(chosen: SwitchTrial, whole: SwitchTrial, tolerance: float) -> str:
    assert chosen.val_acc is not None
    assert whole.val_acc is not None
    assert chosen.seconds is not None
    assert whole.seconds is not None
    saved = 1 - chosen.seconds / whole.seconds
    return (
        f"{chosen.strategy}: val_acc {chosen.val_acc:.4f} instead of {whole.val_acc:.4f} "
        f"(tolerance {tolerance:g}), {chosen.seconds:.1f} s instead of {whole.seconds:.1f} s: "
        f"{100 * abs(saved):.0f}% {'less' if saved >= 0 else 'more'} time; one seed"
    )


def _acceptable(probe: SwitchTrial, least: float) -> bool:
    return probe.status == "done" and probe.val_acc is not None and probe.val_acc >= least


@dataclasses.dataclass
class _SwitchSearch:
    job: Job | JobRef
    epochs: int
    first: Strategy
    second: Strategy
    options: RunOptions
    tell: Callable[[str], None]
    run: Run
    probes: dict[int, SwitchTrial] = dataclasses.field(default_factory=dict)

    def probe(self, epoch: int) -> SwitchTrial:
        """Switch after `epoch` epochs; 0 is the second strategy alone, all of them the first."""
        if epoch in self.probes:
            return self.probes[epoch]
        strategy, text, folder = self.second, str(self.second), f"switch-at-{epoch:04d}"
        changes: dict[str, Any] = {}
        if epoch == self.epochs:
            strategy, text, folder = self.first, str(self.first), "first"
            changes = {"keep_checkpoints": KEEP_ALL}
        elif epoch:
            text = f"switch({self.first}, {self.second}, at=epoch({epoch}))"
            run = RunFolder(self.options.out / "first")
            samples = epoch * (run.read_result()["samples"] // self.epochs)
            changes = {"from_checkpoint": run.checkpoints / f"{samples:012d}"}
        self.probes[epoch] = self._run(epoch / self.epochs, text, strategy, folder, **changes)
        return self.probes[epoch]

    def run_other(self, strategy: Strategy) -> SwitchTrial:
        name = "".join(c if c.isalnum() else "-" for c in str(strategy)).strip("-")
        workers = strategy.worker_count(self.options.workers)
        return self._run(0.0, str(strategy), strategy, f"other-{name}", workers=workers)

    def _run(
        self, share: float, text: str, strategy: Strategy, name: str, **changes: Any
    ) -> SwitchTrial:
        folder = RunFolder(self.options.out / name)
        if folder.result.exists() and folder.read_result()["status"] in ("done", "diverged"):
            result = folder.read_result()
        else:
            options = dataclasses.replace(self.options, out=folder.path, force=True, **changes)
            result = run_to_result(self.run, self.job, strategy, options)
        probe = SwitchTrial(
            share=share,
            strategy=text,
            status=result["status"],
            val_acc=result["val_acc"],
            test_acc=result["test_acc"],
            seconds=result["seconds"],
            folder=name,
        )
        shown = "none" if probe.val_acc is None else f"{probe.val_acc:.4f}"
        self.tell(f"{text}: {probe.status}, val_acc {shown}, {probe.seconds:.1f} s")
        return probe

"""Find the smallest synchronous share that keeps the accuracy, from one synchronous run.

The run keeps a checkpoint of every epoch; a probe of a switch point starts from the checkpoint
there, so that it costs only its asynchronous tail. What is done already is not run again.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import HostError, RunFailed, UsageError
from paceline.job import Job, JobRef
from paceline.launch.compare_runs import with_job_fields
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

    def reaches(self, val_acc: float) -> bool:
        return self.status == "done" and self.val_acc is not None and self.val_acc >= val_acc


@dataclasses.dataclass
class SwitchSearch:
    """A search over the epochs of one run of `first`.

    `tolerance` is the loss of validation accuracy that is accepted, as a fraction. A probe that
    fails or diverges counts as not acceptable and is kept in the table. `run` carries a run out:
    on processes here, unless another way is given; `where` says on what.
    """

    job: Job | JobRef
    first: Strategy
    second: Strategy
    options: RunOptions
    _: dataclasses.KW_ONLY
    tolerance: float
    others: list[Strategy]
    tell: Callable[[str], None] = lambda line: None
    run: Run = run_training
    where: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self._resolved = self.job.resolve() if isinstance(self.job, JobRef) else self.job
        self._epochs = self._resolved.epochs
        self._probes: dict[int, SwitchTrial] = {}

    def search(self) -> dict[str, Any]:
        """Bisects over the epochs; returns what `tune.json` holds."""
        self._resolved.check()
        for strategy in (self.first, self.second):
            strategy.check_workers(self.options.workers)
        for strategy in self.others:
            strategy.check_workers(strategy.worker_count(self.options.workers))
        if self._epochs < 2:
            raise UsageError(f"tune requires at least 2 epochs, got {self._epochs}")
        if not 0 <= self.tolerance < 1:
            raise UsageError(f"--tolerance must be a fraction from 0 to 1, got {self.tolerance:g}")
        self._check_same_job()
        if self.run is run_training:
            with contextlib.suppress(RunFailed, HostError):  # The first run reports it.
                self.options.launcher.warm_up()
        whole = self._probe(self._epochs)
        if whole.status != "done" or whole.val_acc is None:
            raise UsageError(
                f"the run with {self.first} ended as {whole.status}; tune requires it for "
                "comparison"
            )
        least = whole.val_acc - self.tolerance
        low, high = 0, self._epochs
        if self._probe(0).reaches(least):
            high = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._probe(middle).reaches(least):
                high = middle
            else:
                low = middle
        probes = [self._probes[epoch] for epoch in sorted(self._probes)]
        probes += [self._run_other(strategy) for strategy in self.others]
        good = [probe for probe in probes if probe.reaches(least)]
        chosen = min(good, key=lambda probe: probe.seconds or 0.0)
        result = {
            "first": str(self.first),
            "second": str(self.second),
            "tolerance": self.tolerance,
            "needed_val_acc": least,
            "smallest_share": high / self._epochs,
            "probes": [dataclasses.asdict(probe) for probe in probes],
            "recommended": dataclasses.asdict(chosen),
            "evidence": explain_switch_choice(chosen, whole, self.tolerance),
        }
        write_json(self.options.out / "tune.json", result)
        return result

    def _check_same_job(self) -> None:
        """Probes of another job, or on other workers, must not be taken for this one's."""
        options = self.options
        facts = {
            **self._resolved.describe(),
            "first": str(self.first),
            "second": str(self.second),
            "workers": options.workers,
            "threads": options.threads_each,
            "troubles": [t.to_plain() for t in options.slowdowns],
            "where": self.where,
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

    def _probe(self, epoch: int) -> SwitchTrial:
        """Switch after `epoch` epochs; 0 is the second strategy alone, all of them the first."""
        if epoch in self._probes:
            return self._probes[epoch]
        strategy, text, folder = self.second, str(self.second), f"switch-at-{epoch:04d}"
        changes: dict[str, Any] = {}
        if epoch == self._epochs:
            strategy, text, folder = self.first, str(self.first), "first"
            changes = {"keep_checkpoints": KEEP_ALL}
        elif epoch:
            text = f"switch({self.first}, {self.second}, at=epoch({epoch}))"
            whole = RunFolder(self.options.out / "first")
            samples = epoch * (whole.read_result()["samples"] // self._epochs)
            changes = {"from_checkpoint": whole.checkpoints / f"{samples:012d}"}
        self._probes[epoch] = self._run(epoch / self._epochs, text, strategy, folder, **changes)
        return self._probes[epoch]

    def _run_other(self, strategy: Strategy) -> SwitchTrial:
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
            job = with_job_fields(self.job, checkpoint_every="epoch(1)", until=None, patience=None)
            options = dataclasses.replace(
                self.options, out=folder.path, force=True, recall=False, **changes
            )
            result = run_to_result(self.run, job, strategy, options)
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

"""Run folders written with the run's own events and writers, of any size, at any pace."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from paceline.telemetry import events as ev
from paceline.telemetry.run_folder import EventWriter, RunFolder, write_json

PHASE_COUNT = len(ev.PHASES)


class Recording:
    """A run that is written second by second, by as many processes as asked for."""

    def __init__(
        self,
        path: Path,
        *,
        workers: int = 2,
        servers: int = 1,
        strategy: str = "switch(allreduce, ps, at=50%)",
        epochs: int = 10,
        seconds: int = 60,
        steps_per_s: int = 20,
        seed: int = 0,
        slow_worker: int | None = 1,
    ) -> None:
        self.folder = RunFolder(path)
        self.folder.prepare(force=True, resume=False)
        self.workers, self.servers, self.epochs = workers, servers, epochs
        self.seconds, self.steps_per_s, self.seed = seconds, steps_per_s, seed
        self.slow_worker, self.strategy = slow_worker, strategy
        self._random = random.Random(seed)
        job = {"model": "mlp-128", "data": "digits", "epochs": epochs, "batch": 128, "seed": seed}
        write_json(
            self.folder.config,
            {"format": 1, "strategy": strategy, "workers": workers, "servers": servers,
             "threads": 1, "job": job, "labels": {}, "started": "2026-01-02T03:04:05+0000",
             "versions": {"paceline": "0.1.0"}},
        )  # fmt: skip
        self._run = EventWriter(self.folder.events("run"))
        self._files = {f"worker-{k}": EventWriter(self.folder.events(f"worker-{k}"))
                       for k in range(workers)}  # fmt: skip
        self._files |= {f"server-{k}": EventWriter(self.folder.events(f"server-{k}"))
                        for k in range(servers)}  # fmt: skip
        self.per_epoch = 54_000
        self.total = self.per_epoch * epochs
        self.t = 0
        self.samples = self.updates = self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.switches: list[dict[str, Any]] = []
        self.steps = [0] * workers
        self._run.write(ev.RunStarted(t=0.0, strategy=strategy, workers=workers, servers=servers))
        self._run.write(ev.RunLengthKnown(t=0.5, epochs=epochs, samples_per_epoch=self.per_epoch))
        self._run.write(ev.StrategyStarted(t=0.5, strategy="allreduce", samples=0, lr="0.1"))
        for k in range(workers):
            self._files[f"worker-{k}"].write(
                ev.WorkerStarted(t=0.2, worker=k, host=f"node-{k // 8}", pid=100 + k, threads=1)
            )

    def write_second(self) -> None:
        """What all processes write within one second."""
        self.t += 1
        t, chance = float(self.t), self._random
        is_late = self.t > self.seconds / 2
        if is_late and not self.switches and self.servers:
            row = {"samples": self.samples, "from": "allreduce", "to": "ps", "pause_s": 0.012,
                   "drain_s": 0.03, "cause": "point", "reason": "at=50%"}  # fmt: skip
            self.switches.append(row)
            self._run.write(ev.StrategySwitched(t=t - 0.5, row=ev.from_plain(ev.SwitchRow, row)))
        if self.t == 5 and self.slow_worker is not None:
            self._run.write(
                ev.VerdictChanged(t=t, state="began", rule="straggler",
                          who=f"worker-{self.slow_worker}",
                          text=f"worker {self.slow_worker} computes 2.9x slower than the median",
                          suggestion="balance=auto gives it less of each batch", figures={})
            )  # fmt: skip
        for k in range(self.workers):
            self._write_worker(k, t, is_late)
        for k in range(self.servers):
            apply = 500_000 if is_late else 0
            self._files[f"server-{k}"].write(
                ev.ProcessMetrics(t=t, dt=1.0, phases=[0, 900_000 - apply, 50_000, apply, 50_000],
                          steps=20, cpu_user=0.4, rss=90_000_000, net_in=2_000_000,
                          net_out=2_100_000)
            )  # fmt: skip
        share = min(1.0, self.t / self.seconds)
        self.samples = int(self.total * share)
        self.updates = self.samples // 128
        for part in (0.5, 1.0):
            self._run.write(
                ev.RunProgress(t=t - 1 + part, epoch=self.epoch, samples=self.samples,
                              updates=self.updates,
                              loss=2.3 * math.exp(-4 * share) + 0.05 + 0.01 * chance.random())
            )  # fmt: skip
        while self.samples >= (self.epoch + 1) * self.per_epoch:
            self.epoch += 1
            done = self.epoch / self.epochs
            row = {"epoch": self.epoch, "seconds": t, "samples": self.epoch * self.per_epoch,
                   "updates": self.updates, "lr": 0.1, "train_loss": 2.3 * math.exp(-4 * done),
                   "train_acc": 1 - 0.9 * math.exp(-4 * done),
                   "val_loss": 2.3 * math.exp(-3.6 * done),
                   "val_acc": 0.97 - 0.87 * math.exp(-4 * done) - 0.001 * self.seed}  # fmt: skip
            self.history.append(row)
            self._run.write(ev.EpochEnded(t=t, row=ev.from_plain(ev.EpochRow, row)))

    def _write_worker(self, k: int, t: float, is_late: bool) -> None:
        chance, file = self._random, self._files[f"worker-{k}"]
        is_slow = k == self.slow_worker
        busy = 900_000 if is_slow else 380_000 + chance.randrange(80_000)
        idle = 1_000_000 - busy
        wait = idle * 3 // 10 if is_late else idle * 7 // 10
        amounts = {"input": busy // 10, "forward": busy * 3 // 10, "backward": busy * 5 // 10,
                   "optimizer": busy - busy // 10 - busy * 3 // 10 - busy * 5 // 10,
                   "wait": wait, "comm_exposed": idle - wait}  # fmt: skip
        if self.t == 1:
            amounts = {"startup": 1_000_000}
        count = self.steps_per_s
        each = {name: amounts.get(name, 0) // max(1, count) for name in ev.STEP_PHASES}
        stale = [chance.randrange(self.workers) if is_late else -1 for _ in range(count)]
        file.write(
            ev.StepWindow(
                t=t, first_step=self.steps[k], began=t - 1.0,
                end=[1_000_000 * (i + 1) // count for i in range(count)],
                epoch=[self.epoch] * count, start=[0] * count, lo=[0] * count, hi=[128] * count,
                loss=[0.5] * count, staleness=stale, comm_hidden=[-1] * count,
                **{name: [us] * count for name, us in each.items()},
            )
        )  # fmt: skip
        self.steps[k] += count
        file.write(
            ev.ProcessMetrics(t=t, dt=1.0, phases=[amounts.get(n, 0) for n in ev.PHASES],
                      epoch=self.epoch, steps=count, samples=128 * count,
                      cpu_user=busy / 1.1e6, cpu_system=busy / 1e7, run_wait=chance.random() / 5,
                      rss=300_000_000 + 1_000_000 * k, threads=4,
                      net_in=8_000_000 + chance.randrange(1_000_000), net_out=9_000_000)
        )  # fmt: skip
        if k % 8 == 0:
            file.write(
                ev.HostMetrics(t=t, host=f"node-{k // 8}", dt=1.0, cpu_user=1.2,
                                 cpu_system=0.2, cpu_iowait=0.0, cpu_steal=0.0,
                                 cpu_idle=0.6, cores_busy=[0.7, 0.7],
                                 memory_used=3_000_000_000 + k * 10_000_000,
                                 memory_total=16_000_000_000,
                                 net_in=8_000_000, net_out=9_000_000, loopback=0, links={},
                                 disk_read=0, disk_write=4096)
            )  # fmt: skip

    def finish(self, status: str = "done", error: str | None = None) -> None:
        self._run.write(ev.RunEnded(t=self.t + 0.3, status=status, error=error))
        last = self.history[-1] if self.history else {}
        write_json(
            self.folder.result,
            {"status": status, "error": error, "strategy": self.strategy, "model": "mlp-128",
             "data": "digits", "workers": self.workers, "servers": self.servers,
             "seed": self.seed, "batch": 128, "epochs": self.epoch, "samples": self.samples,
             "updates": self.updates, "seconds": self.t + 0.3, "samples_per_s": 1000.0,
             "train_loss": last.get("train_loss"), "train_acc": last.get("train_acc"),
             "val_loss": last.get("val_loss"), "val_acc": last.get("val_acc"),
             "test_loss": 0.2, "test_acc": 0.95, "history": self.history,
             "switches": self.switches, "virtual": False, "bytes_sent": 123456789},
        )  # fmt: skip
        self.close()

    def close(self) -> None:
        for file in (self._run, *self._files.values()):
            file.close()


def record(path: Path, **facts: Any) -> Recording:
    """A whole run, written at once."""
    status = facts.pop("status", "done")
    run = Recording(path, **facts)
    for _ in range(run.seconds):
        run.write_second()
    run.finish(status, None if status == "done" else "worker 1 (pid 7) ended with signal 9")
    return run

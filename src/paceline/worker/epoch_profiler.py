"""Measures the self time of each operator on a worker (`--profile epoch=N`, `epochs=A-B`)."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.telemetry.events import ProfileWritten
from paceline.worker.session import Session

MAX_STEPS = 200
"""Maximum number of profiled steps per epoch, because the profiler keeps every call in memory."""
MAX_OPERATORS = 300


class EpochProfiler:
    """Profiles the steps of some epochs and adds up their operators.

    In each epoch it runs from the first step to the first quiesce, which is normally the end of the
    epoch. The profile of the epochs so far is written whenever one ends. `stop` must be called at
    every quiesce.
    """

    def __init__(self, session: Session, epochs: tuple[int, int] | None) -> None:
        """`epochs`: the first and the last, counted from 1; None never profiles."""
        self._session = session
        self._epochs = range(epochs[0], epochs[1] + 1) if epochs is not None else range(0)
        self._running: Any = None
        self._began = 0.0
        self._done: list[int] = []
        """Epochs that were profiled, in order; the last may be in progress."""
        self._steps_of_epoch = 0
        self._steps, self._all_steps = 0, 0
        self._is_written = True
        self._seconds = 0.0
        self._operators: dict[str, list[float]] = {}
        """Calls, microseconds on the CPU and on a GPU, by operator."""

    def step_begins(self, epoch: int) -> None:
        """`epoch` counts from 0, as leases do."""
        number = epoch + 1
        if number not in self._epochs:
            return
        self._all_steps += 1
        self._is_written = False
        if number not in self._done:
            self.stop()
            self._start(number)
        elif self._steps_of_epoch >= MAX_STEPS:
            self._end()
        if self._running is not None:
            self._steps_of_epoch += 1
            self._steps += 1

    def _start(self, number: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._done.append(number)
        self._steps_of_epoch = 0
        self._running = profile(activities=activities)
        self._running.start()
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self._running is None:
            return
        self._seconds += time.perf_counter() - self._began
        running, self._running = self._running, None
        running.stop()
        for event in running.key_averages():
            sums = self._operators.setdefault(event.key, [0, 0.0, 0.0])
            sums[0] += int(event.count)
            sums[1] += float(event.self_cpu_time_total)
            sums[2] += float(event.self_device_time_total)

    def stop(self) -> None:
        """Ends the profile in progress, and writes all epochs so far if anything is new."""
        self._end()
        if self._is_written or not self._done:
            return
        self._is_written = True
        operators: list[dict[str, Any]] = [
            {"name": name, "calls": calls, "self_us": round(us, 1), "self_device_us": round(gpu, 1)}
            for name, (calls, us, gpu) in self._operators.items()
        ]
        operators.sort(key=lambda o: -(o["self_us"] + o["self_device_us"]))
        session = self._session
        body = {
            "format": 1,
            "worker": session.rank,
            "epoch": self._done[0],
            "epochs": len(self._done),
            "steps": self._steps,
            "epoch_steps": self._all_steps,
            "seconds": round(self._seconds, 6),
            "self_us": round(sum(o["self_us"] for o in operators), 1),
            "operators": operators[:MAX_OPERATORS],
        }
        path = session.files.save_profile(body)
        session.telemetry.report(
            ProfileWritten(
                t=round(session.clock.now_s(), 6),
                epoch=self._done[-1],
                steps=self._steps,
                path=path,
            )
        )

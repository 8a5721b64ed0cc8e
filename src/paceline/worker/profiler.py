"""Profiler of `--profile epoch=N`: self time of each operator on this worker in one epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.telemetry.events import ProfileWritten
from paceline.telemetry.run_folder import RunFolder, write_json
from paceline.worker.session import Session

MAX_STEPS = 200
"""Maximum number of profiled steps, because the profiler keeps every call in memory."""
MAX_OPERATORS = 300


class EpochProfiler:
    """Runs from the first step of its epoch to the quiesce at the epoch's end.

    Does nothing without `--profile`. `stop` must be called when the epoch's steps end.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._epoch = session.assignment.profile_epoch
        self._running: Any = None
        self._began = 0.0
        self._steps = 0
        self._done = self._epoch is None

    def step_begins(self, epoch: int) -> None:
        """`epoch` counts from 0, as leases do."""
        if self._done:
            return
        if self._running is None:
            if epoch + 1 == self._epoch:
                self._start()
        elif epoch + 1 != self._epoch or self._steps >= MAX_STEPS:
            self.stop()
        if self._running is not None:
            self._steps += 1

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.start()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends and writes the profile, if one is in progress."""
        if self._running is None:
            return
        seconds = time.perf_counter() - self._began
        running, self._running, self._done = self._running, None, True
        running.stop()
        operators = [
            {
                "name": event.key,
                "calls": int(event.count),
                "self_us": round(float(event.self_cpu_time_total), 1),
                "self_device_us": round(float(event.self_device_time_total), 1),
            }
            for event in running.key_averages()
        ]
        operators.sort(key=lambda o: -(o["self_us"] + o["self_device_us"]))
        session, assignment = self._session, self._session.assignment
        # Runs on other machines, which have no run folder, refuse --profile before they start.
        assert assignment.folder is not None
        path = RunFolder(assignment.folder).profile(assignment.process_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        body = {
            "format": 1,
            "worker": session.rank,
            "epoch": self._epoch,
            "steps": self._steps,
            "seconds": round(seconds, 6),
            "self_us": round(sum(o["self_us"] for o in operators), 1),
            "operators": operators[:MAX_OPERATORS],
        }
        write_json(path, body)
        assert self._epoch is not None
        session.telemetry.report(
            ProfileWritten(
                t=round(session.clock.now_s(), 6),
                epoch=self._epoch,
                steps=self._steps,
                path=f"profile/{path.name}",
            )
        )

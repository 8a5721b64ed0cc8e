"""What recording costs: time a step spends in telemetry, beside the step time of mlp-300-100.

python bench/telemetry_overhead.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import paceline
from paceline.protocol.messages import Lease
from paceline.telemetry.folder import EventWriter
from paceline.telemetry.phases import BACKWARD, COMM, FORWARD, INPUT, OPTIMIZER, OTHER, PhaseClock
from paceline.telemetry.recorder import StepRecorder
from workloads import WORKLOADS

STEPS = 20_000


def telemetry_us_a_step(folder: Path) -> float:
    """Exactly the calls that a step of all-reduce makes, windows written out included."""
    clock = PhaseClock(time.time())
    recorder = StepRecorder(EventWriter(folder / "worker-0.jsonl"), clock)
    began = time.perf_counter()
    for step in range(STEPS):
        for phase in (OTHER, INPUT, FORWARD, BACKWARD, COMM, OPTIMIZER, OTHER):
            clock.enter(phase)
        recorder.step_done(Lease(0, 0, step, step + 128, step, step + 64), 0.5)
    recorder.flush(final=True)
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    workload = WORKLOADS["mlp-300-100"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = paceline.train(workload.job(2), "allreduce", 2, out=folder / "run", threads=1)
        step_us = 2 * workload.batch_per_worker / result["samples_per_s"] * 1e6
        cost_us = statistics.median(telemetry_us_a_step(folder / str(i)) for i in range(5))
    print(
        f"telemetry {cost_us:.1f} us of a step of {step_us:.0f} us "
        f"(mlp-300-100, 2 workers, {workload.batch_per_worker} a worker): "
        f"{100 * cost_us / step_us:.2f} %"
    )


if __name__ == "__main__":
    main()

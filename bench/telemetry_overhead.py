"""Measures the overhead of telemetry: training with and without it, and its parts alone.

python bench/telemetry_overhead.py [--repeats 6] [--workloads mlp-300-100] [--save]

Both sides keep the phase clock, which deadlines need; its cost per step is measured separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.protocol.messages import Lease
from paceline.strategies.registry import parse_strategy
from paceline.telemetry.phase_clock import (
    BACKWARD,
    COMM,
    FORWARD,
    INPUT,
    OPTIMIZER,
    OTHER,
    PhaseClock,
)
from paceline.telemetry.reader import read_run
from paceline.telemetry.run_folder import EventWriter
from paceline.telemetry.sampler import Sampler
from paceline.telemetry.step_recorder import StepRecorder
from paceline.telemetry.verdicts import summarize_window
from results_store import dated, keep
from workloads import WORKLOADS, Workload

STEPS = 20_000
WORKERS = 2
EPOCHS = 4
RUNS = (WORKLOADS["mlp-300-100"], WORKLOADS["resnet20"])


def clock_us_a_step() -> float:
    """Times the clock's transitions in a step of all-reduce."""
    clock = PhaseClock(time.time())
    began = time.process_time()
    for _ in range(STEPS):
        for phase in (OTHER, INPUT, FORWARD, BACKWARD, COMM, OPTIMIZER, OTHER):
            clock.enter(phase)
    return (time.process_time() - began) / STEPS * 1e6


def recorder_us_a_step(folder: Path) -> float:
    """Times the recording of a step, including writing windows."""
    recorder = StepRecorder(EventWriter(folder / "worker-0.jsonl"), PhaseClock(time.time()))
    began = time.process_time()
    for step in range(STEPS):
        recorder.step_done(Lease(0, 0, step, step + 128, step, step + 64), 0.5)
    recorder.flush(final=True)
    return (time.process_time() - began) / STEPS * 1e6


def sampler_ms_a_second() -> float:
    """CPU time of the sampler thread, including probes and vitals of process and machine."""
    clock = PhaseClock(time.time())
    sampler = Sampler(now_s=clock.now_s, tell=lambda event: None, run_key="bench", clock=clock)
    sampler.start()
    before = time.process_time()
    time.sleep(5.0)
    used = time.process_time() - before
    sampler.stop()
    return 1e3 * used / 5.0


def measure(workload: Workload, *, telemetry: bool) -> tuple[float, float]:
    """Returns microseconds per training step: wall time, and CPU time (0 without vitals)."""
    with tempfile.TemporaryDirectory() as name:
        options = RunOptions(
            out=Path(name) / "run", workers=WORKERS, threads=1, telemetry=telemetry
        )
        job = workload.job(WORKERS).model_copy(update={"epochs": EPOCHS})
        result = run_training(job, parse_strategy("allreduce"), options)
        scene = summarize_window(read_run(options.out, steps=False), None)
    cpu_us = 0.0
    if scene is not None:
        cpu_us = 1e6 * scene.workers[0].cpu_s / scene.workers[0].sums.steps
    return WORKERS * workload.batch_per_worker / float(result["samples_per_s"]) * 1e6, cpu_us


def describe(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--workloads", default="mlp-300-100,resnet20")
    parser.add_argument("--seconds", type=float, default=3600.0, help="last start of a pair")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        recorder = [recorder_us_a_step(Path(name) / str(i)) for i in range(5)]
    clock = [clock_us_a_step() for _ in range(5)]
    sampler = sampler_ms_a_second()
    print(
        f"clock {statistics.median(clock):.1f} us and recorder {statistics.median(recorder):.1f} us"
        f" a step; sampler {sampler:.2f} ms of processor a second"
    )
    rows = []
    for workload in [w for w in RUNS if w.name in options.workloads.split(",")]:
        bare: list[float] = []
        full: list[float] = []
        cpu: list[float] = []
        for repeat in range(options.repeats):
            if repeat and time.perf_counter() - began > options.seconds:
                break
            # The first side alternates, so warming up or cooling down favors neither.
            sides = [(bare, False), (full, True)]
            for values, telemetry in sides if repeat % 2 == 0 else sides[::-1]:
                wall_us, cpu_us = measure(workload, telemetry=telemetry)
                values.append(wall_us)
                cpu += [cpu_us] * telemetry
            print(f"{workload.name}: {bare[-1]:.0f} us without, {full[-1]:.0f} us with", flush=True)
        ratio = statistics.median(full) / statistics.median(bare)
        step_us, cpu_us = statistics.median(bare), statistics.median(cpu)
        # Of processor: what others do on the machine meanwhile does not count.
        parts = statistics.median(clock) + statistics.median(recorder) + sampler * cpu_us / 1e3
        rows.append(
            {
                "workload": workload.name,
                "batch_per_worker": workload.batch_per_worker,
                "repeats": len(full),
                "step_us_without": describe(bare),
                "step_us_with": describe(full),
                "with_over_without": round(ratio, 4),
                "step_cpu_us": describe(cpu),
                "parts_cpu_us_a_step": round(parts, 2),
                "parts_over_step_cpu": round(parts / cpu_us, 4),
            }
        )
        print(
            f"{workload.name}: a step takes {statistics.median(full):.0f} us with telemetry, "
            f"{step_us:.0f} us without: x{ratio:.4f}; of processor its parts take {parts:.0f} us, "
            f"{100 * parts / cpu_us:.2f} % of the step's {cpu_us:.0f} us"
        )
    if options.save:
        path = dated("telemetry")
        if path.exists():  # Workloads measured at another time today stay.
            mine = {row["workload"] for row in rows}
            rows += [r for r in json.loads(path.read_text())["rows"] if r["workload"] not in mine]
        body = {
            "about": {"workers": WORKERS, "threads_each": 1},
            "clock_cpu_us_a_step": describe(clock),
            "recorder_cpu_us_a_step": describe(recorder),
            "sampler_cpu_ms_a_second": round(sampler, 3),
            "rows": rows,
        }
        keep("telemetry", body)


if __name__ == "__main__":
    main()

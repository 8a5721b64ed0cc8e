"""Telemetry: clocks, metrics compared with the kernel's counters, and truncated files."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import RUN_S, RunCli, Started
from paceline.errors import UsageError
from paceline.protocol.messages import Lease
from paceline.report.export import write_csv_files, write_trace
from paceline.report.operator_profile import read_profile, rows_for_one_run, rows_for_two_runs
from paceline.report.runs import load_runs
from paceline.telemetry import step_recorder as recorder_module
from paceline.telemetry.events import (
    PHASES,
    STEP_PHASES,
    Event,
    ProcessMetrics,
    RunEnded,
    StepSummary,
    StepWindow,
)
from paceline.telemetry.phase_clock import (
    APPLY,
    COMM,
    IDLE,
    INPUT,
    OTHER,
    QUEUE,
    RECEIVE,
    SEND,
    PhaseClock,
    ServerClock,
)
from paceline.telemetry.proc_stats import allowed_cores, quota_cores, read_machine, read_process
from paceline.telemetry.reader import EventTail, RunRecord, read_run
from paceline.telemetry.run_folder import EventWriter
from paceline.telemetry.sampler import (
    HostSamplerLock,
    MetricsDownsampler,
    Sampler,
    StepCounters,
)
from paceline.telemetry.step_recorder import StepRecorder
from paceline.telemetry.steps import merge_metrics, window_seconds
from paceline.telemetry.verdicts import verdicts

# ---- clocks ----------------------------------------------------------------------------------


def test_phases_add_up_and_can_be_moved() -> None:
    clock = PhaseClock(time.time() - 1.0)
    for phase in (OTHER, INPUT, COMM, OTHER):
        clock.enter(phase)
        time.sleep(0.01)
    clock.reassign(COMM, QUEUE, 4_000_000)
    clock.reassign(COMM, QUEUE, 10**12)  # Never more than was there.
    totals = clock.totals_s()
    assert totals["comm_exposed"] == 0
    assert totals["queue"] >= 0.01
    assert sum(totals.values()) == pytest.approx(clock.now_s(), abs=0.005)
    assert sum(clock.read_ns()) / 1e9 == pytest.approx(clock.now_s(), abs=0.005)


def test_a_clock_can_be_read_while_it_turns() -> None:
    clock = PhaseClock(time.time())
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            clock.enter(INPUT)
            clock.enter(COMM)
            clock.reassign(COMM, QUEUE, 100)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for _ in range(300):
            before = clock.now_s()
            read = sum(clock.read_ns()) / 1e9
            assert before - 0.001 <= read <= clock.now_s() + 0.001
    finally:
        stop.set()
        thread.join()


def test_a_thread_that_sleeps_in_input_does_not_compute_there() -> None:
    clock = PhaseClock(time.time())
    clock.enter(INPUT)
    time.sleep(0.05)
    clock.enter(OTHER)
    slept_ns = clock.input_cpu_ns
    assert slept_ns < 0.5 * clock.total_ns[INPUT]


def test_a_server_that_does_several_things_counts_the_most_telling() -> None:
    clock = ServerClock(time.time())
    clock.start_idle()
    clock.begin(RECEIVE)
    clock.begin(APPLY)
    assert clock.current == APPLY
    clock.end(APPLY)
    assert clock.current == RECEIVE
    clock.begin(SEND)
    assert clock.current == SEND
    clock.end(RECEIVE)
    clock.end(SEND)
    assert clock.current == IDLE


# ---- vitals ----------------------------------------------------------------------------------


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def test_vitals_agree_with_the_kernels_counters() -> None:
    """Processor time, bytes over TCP and bytes read, within 3 %."""
    heard: list[Event] = []
    clock, counters = PhaseClock(time.time()), StepCounters()
    before = resource.getrusage(resource.RUSAGE_SELF)
    sampler = Sampler(
        now_s=clock.now_s, tell=heard.append, run_key=os.urandom(8).hex(), counters=counters
    )
    sampler.start()
    server = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(server.getsockname())
    back, _ = server.accept()
    payload = bytes(1 << 20)
    try:
        for _ in range(40):
            sender = threading.Thread(target=out.sendall, args=(payload,))
            sender.start()
            left = len(payload)
            while left:
                left -= len(back.recv(left))
            sender.join()
        burn(1.5)
        sampler.stop()
    finally:
        for sock in (out, back, server):
            sock.close()
    after = resource.getrusage(resource.RUSAGE_SELF)
    vitals = [e for e in heard if isinstance(e, ProcessMetrics)]
    assert vitals
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert sum(v.cpu_user + v.cpu_system for v in vitals) == pytest.approx(used, rel=0.03)
    assert sum(v.net_out for v in vitals) == pytest.approx(40 * len(payload), rel=0.03)
    assert sum(v.net_in for v in vitals) == pytest.approx(40 * len(payload), rel=0.03)
    assert sum(v.dt for v in vitals) == pytest.approx(clock.now_s(), rel=0.03, abs=0.05)
    assert vitals[-1].rss == pytest.approx(read_process().rss, rel=0.03)


def test_a_machine_agrees_with_the_kernels_counters() -> None:
    import psutil

    ours, theirs = read_machine(), psutil.cpu_times()
    assert ours.cpu_user == pytest.approx(theirs.user + theirs.nice, rel=0.03)
    assert ours.cpu_idle == pytest.approx(theirs.idle, rel=0.03)
    assert ours.memory_used == pytest.approx(
        psutil.virtual_memory().total - psutil.virtual_memory().available, rel=0.03
    )
    lo = psutil.net_io_counters(pernic=True, nowrap=False)["lo"]
    assert ours.links["lo"][0] == pytest.approx(lo.bytes_recv, rel=0.03)
    assert len(ours.cores_busy) == psutil.cpu_count()
    assert allowed_cores() == sorted(os.sched_getaffinity(0))
    quota = quota_cores()
    assert quota is None or quota > 0


def test_one_process_of_a_machine_measures_it() -> None:
    first, second = HostSamplerLock("a run"), HostSamplerLock("a run")
    other = HostSamplerLock("another run")
    try:
        assert first.is_held()
        assert first.is_held()
        assert not second.is_held()
        assert other.is_held()
        first.release()
        assert second.is_held()
    finally:
        for post in (first, second, other):
            post.release()


def make_vitals(t: float, **given: Any) -> ProcessMetrics:
    return ProcessMetrics(t=t, dt=1.0, phases=[10] * len(PHASES), gil=[20, 1, 0, 0, 0], **given)


def test_a_long_run_writes_ever_fewer_vitals_and_loses_nothing() -> None:
    written: list[Any] = []
    thinner = MetricsDownsampler(written.append, lines_a_stage=10)
    for second in range(1000):
        thinner(make_vitals(second + 1.0, steps=3, cpu_user=0.5, rss=second))
    thinner.flush()
    assert len(written) < 80
    assert sum(v.steps for v in written) == 3000
    assert sum(v.cpu_user for v in written) == pytest.approx(500)
    assert sum(v.dt for v in written) == pytest.approx(1000)
    assert sum(v.phases[0] for v in written) == 10_000
    assert written[-1].t == 1000.0
    assert written[-1].rss == 999


def test_merged_vitals_keep_the_most_that_waited() -> None:
    one = make_vitals(1.0, serving={"pushes": 2, "waiting": 5}, cpu_wait=None)
    two = make_vitals(2.0, serving={"pushes": 3, "waiting": 1}, cpu_wait=0.5)
    both = merge_metrics([one, two])
    assert isinstance(both, ProcessMetrics)
    assert both.serving == {"pushes": 5, "waiting": 5}
    assert both.cpu_wait == 0.5


def test_a_long_run_goes_on_in_sums_epoch_by_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "SINGLE_STEPS", 4)
    clock, counters = PhaseClock(time.time()), StepCounters()
    writer = EventWriter(tmp_path / "events" / "worker-0.jsonl")
    recorder = StepRecorder(writer, clock, 0, counters)
    for number in range(20):
        clock.enter(INPUT)
        clock.enter(OTHER)
        recorder.step_done(Lease(0, number // 10, 0, 8, 0, 4), 1.0, 7 if number % 8 == 0 else None)
        recorder.note_staleness(number % 3)
        if number in (4, 13):
            recorder.flush()
    recorder.flush(final=True)
    writer.close()
    process = read_run(tmp_path).process("worker-0")
    single = [w for w in process.steps if isinstance(w, StepWindow)]
    sums = [w for w in process.steps if isinstance(w, StepSummary)]
    assert sum(len(w.epoch) for w in single) + sum(w.count for w in sums) == 20
    assert {w.epoch for w in sums} == {0, 1}
    assert all(set(window_seconds(w)) == set(STEP_PHASES) for w in process.steps)
    stale = sum(sum(w.staleness.values()) for w in sums)
    assert stale == sum(w.count for w in sums)
    assert counters.steps == 20
    assert counters.samples == 80
    assert counters.comm_hidden_us == 140


# ---- a real run ------------------------------------------------------------------------------


DRIVER = """
import json, resource, sys
from pathlib import Path
from paceline.job import Job
from paceline.launch.engines.local import LocalLauncher
from paceline.launch.run import run_training
from paceline.launch.run_options import RunOptions
from paceline.strategies.registry import parse_strategy
out = Path(sys.argv[1])
job = Job(model="resnet8", epochs=4)
spawn = LocalLauncher(fork=False)
options = RunOptions(out=out, workers=2, threads=1, profile="epoch=2", launcher=spawn)
run_training(job, parse_strategy("switch(allreduce, ps, at=50%)"), options)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime, used.ru_stime]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A switch from allreduce to ps; and the seconds that the kernel counted for its processes.

    Workers are spawned: each is waited for by the process that started it, and servers by their
    workers, so the kernel counts all of them, from their first instruction.
    """
    folder = tmp_path_factory.mktemp("recorded") / "run"
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)], capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    return folder, sum(json.loads(done.stdout.splitlines()[-1]))


def test_phases_add_up_to_the_wall_time_of_each_process(recorded: Any) -> None:
    run = read_run(recorded[0])
    assert run.missing == []
    assert len(run.workers) == 2
    assert len(run.servers) == 1
    for process in (*run.workers, *run.servers):
        wall_s = process.ended.t
        assert sum(process.ended.phases.values()) == pytest.approx(wall_s, rel=0.02)
        in_vitals = sum(sum(v.phases) for v in process.metrics) / 1e6
        seconds = sum(v.dt for v in process.metrics)
        assert in_vitals == pytest.approx(seconds, rel=0.02)
        # From the start of the process, which is not that of the run.
        began_s = process.metrics[0].t - process.metrics[0].dt
        assert seconds == pytest.approx(wall_s - began_s, rel=0.02, abs=0.1)
        assert 0 <= began_s < process.started.t


def test_steps_and_vitals_tell_the_same(recorded: Any) -> None:
    run = read_run(recorded[0])
    for worker in run.workers:
        steps = list(worker.iter_steps())
        assert [s.number for s in steps] == list(range(len(steps)))
        assert sum(v.steps for v in worker.metrics) == len(steps)
        assert sum(v.samples for v in worker.metrics) == sum(s.samples for s in steps)
        for before, after in itertools.pairwise(steps):
            assert before.ended <= after.ended
        assert any(s.comm_hidden >= 0 for s in steps)
        phase = PHASES.index("forward")
        seconds = sum(v.phases[phase] for v in worker.metrics) / 1e6
        assert sum(s.forward for s in steps) / 1e6 == pytest.approx(seconds, rel=0.02, abs=0.02)
    (server,) = run.servers
    applied = sum(v.steps for v in server.metrics)
    pushes = [s for w in run.workers for s in w.iter_steps() if s.epoch >= 2]
    assert applied == sum(s.samples > 0 for s in pushes)
    assert any(s.staleness >= 0 for s in pushes)


def test_resources_add_up_to_what_the_kernel_counted(recorded: Any) -> None:
    """Processor time of the workers and their server, within 3 %."""
    folder, kernel_s = recorded
    result = json.loads((folder / "result.json").read_text())
    used = result["resources"]
    assert set(used) == {"run", "worker-0", "worker-1", "server-0"}
    for who in ("worker-0", "worker-1", "server-0"):
        assert used[who]["rss_peak"] > 50e6
        assert used[who]["net_out"] > 0
    counted = sum(u["cpu_user_s"] + u["cpu_system_s"] for w, u in used.items() if w != "run")
    assert counted == pytest.approx(kernel_s, rel=0.03)
    sent, received = result["bytes_by_role"]["server"].values()
    # Everything a worker pushed arrived at the server, and came back as weights.
    assert received >= result["bytes_by_role"]["coordinator"]["sent"]
    assert sent > 0
    assert set(result["bytes_by_role"]) == {"worker", "server", "coordinator"}
    assert set(result["step_phases"]) == {"first_epoch", "rest"}
    for part in result["step_phases"].values():
        assert set(part["worker-0"]) == set(STEP_PHASES)


def test_a_file_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    follower = EventTail(path)
    assert follower.poll() == []
    first, second = (RunEnded(t=float(t), status="done") for t in (1, 2))
    path.write_text(first.to_line() + "\n" + '{"kind":')
    assert follower.poll() == [first]
    assert follower.torn_bytes == 8
    with path.open("a") as file:
        file.write('"ended","t":2.0,"status":"done"}\nnothing\n[1]\n{"kind":"future","t":1}\n')
    assert follower.poll() == [second]
    assert follower.unreadable == 3
    path.write_text(first.to_line() + "\n")
    assert follower.poll() == [first]


@pytest.fixture(scope="module")
def small(recorded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder without what is large and is not read."""
    copy = tmp_path_factory.mktemp("small") / "run"
    leave = shutil.ignore_patterns("checkpoints", "logs", "*.safetensors", "*.html")
    shutil.copytree(recorded[0], copy, ignore=leave)
    return copy


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_folder_cut_off_at_any_byte_still_opens(small: Path, data: st.DataObject) -> None:
    names = ["run.json", "result.json", *(f"events/{p.name}" for p in small.glob("events/*"))]
    name = data.draw(st.sampled_from(sorted(names)))
    whole = (small / name).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        (small / name).write_bytes(whole[:cut])
        run = read_run(small)
        verdicts(run)
        load_runs([small])
        ended = whole[:cut].endswith(b"\n") and name.endswith("jsonl")
        if name.endswith(".json"):
            # Cut behind the last bracket, nothing but the line's end is missing.
            assert any(name in text for text in run.missing) == (cut < len(whole) - 1)
        elif cut and not ended:
            assert any(Path(name).name in text for text in run.missing)
        assert run.missing or cut == len(whole) - 1
    finally:
        (small / name).write_bytes(whole)
    assert read_run(small).missing == []


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert len(run.missing) == 3
    assert verdicts(run) == []


# ---- where it can go -------------------------------------------------------------------------


def test_a_trace_holds_every_step_and_its_phases(recorded: Any, tmp_path: Path) -> None:
    path = write_trace(recorded[0], tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    run = read_run(recorded[0])
    steps = [e for e in events if e["ph"] == "X" and e["name"] == "step"]
    assert len(steps) == sum(len(list(w.iter_steps())) for w in run.workers)
    for event in events:
        assert event["ph"] in "XCMi"
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= -1
            assert event["dur"] >= 0
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"coordinator", "worker 0", "worker 1", "server 0"}
    # Phases lie inside their steps, one behind the other.
    mine = [e for e in events if e["ph"] == "X" and e["tid"] == 1 and e["pid"] == 1]
    inside = sorted((e for e in mine if e["name"] != "step"), key=lambda e: e["ts"])
    for before, after in itertools.pairwise(inside):
        assert before["ts"] + before["dur"] <= after["ts"] + 50
    assert any(e["name"].startswith("switch") for e in events if e["ph"] == "i")


def test_tables_hold_a_row_a_step(recorded: Any, tmp_path: Path) -> None:
    import csv

    names = {p.name for p in write_csv_files(recorded[0], tmp_path / "csv")}
    assert {"steps.csv", "vitals.csv", "machines.csv", "epochs.csv"} <= names
    run = read_run(recorded[0])
    with (tmp_path / "csv" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(list(w.iter_steps())) for w in run.workers)
    assert {"worker", "step", "forward", "queue", "staleness", "began"} <= set(rows[0])
    with (tmp_path / "csv" / "vitals.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(p.metrics) for p in run.processes.values())
    assert float(rows[0]["dt"]) > 0
    with pytest.raises(UsageError, match="no events"):
        write_csv_files(tmp_path / "nothing", tmp_path / "out")


def test_tensorboard_reads_the_curves(recorded: Any, run_cli: RunCli, tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard logs left out: the extra [tensorboard] is not installed",
    )
    done = run_cli("export", recorded[0], "--as", "tensorboard", "-o", tmp_path / "board")
    assert done.code == 0, done.stderr
    found = accumulators.EventAccumulator(str(tmp_path / "board" / "run"))
    found.Reload()
    assert len(found.Scalars("epoch/val_acc")) == 4
    worker = accumulators.EventAccumulator(str(tmp_path / "board" / "worker-0"))
    worker.Reload()
    assert {"phases/forward", "resources/cpu_cores"} <= set(worker.Tags()["scalars"])


def test_metrics_are_served_to_who_has_the_token(tmp_path: Path) -> None:
    import http.client

    from prometheus_client.parser import text_string_to_metric_families

    args = ("train", "--out", "run", "--epochs", 2000, "--model", "resnet8", "--threads", 1)
    started = Started((*args, "--checkpoint-every", "never", "--metrics-port", 0), tmp_path, None)
    about_path = tmp_path / "run" / "metrics.json"

    def ask(headers: dict[str, str], path: str = "/metrics") -> tuple[int, str]:
        host, _, _ = json.loads(about_path.read_text())["url"].split("//")[1].partition("/")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    try:
        deadline = time.monotonic() + RUN_S
        body = ""
        while "paceline_samples_total" not in body or 'process="worker-1"' not in body:
            assert time.monotonic() < deadline, started.so_far()
            assert not started.ended(), started.so_far()
            time.sleep(0.2)
            if about_path.exists() and about_path.read_text().endswith("\n"):
                token = json.loads(about_path.read_text())["token"]
                status, body = ask({"Authorization": f"Bearer {token}"})
                assert status == 200
        assert ask({})[0] == 401
        assert ask({"Authorization": "Bearer guess"})[0] == 401
        assert ask({"Authorization": f"Bearer {token}"}, "/other")[0] == 404
        assert about_path.stat().st_mode & 0o077 == 0
        assert json.loads(about_path.read_text())["url"].startswith("http://127.0.0.1:")
        families = {f.name: f for f in text_string_to_metric_families(body)}
        assert families["paceline_cpu_seconds"].type == "counter"
        shares = families["paceline_phase_share"].samples
        assert {s.labels["phase"] for s in shares} >= {"forward", "backward"}
        os.kill(started.pid, 15)
        started.wait(30)
        assert not about_path.exists()
    finally:
        started.kill()


def test_a_port_that_is_taken_is_told_and_leaves_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("train", "--out", "run", "--metrics-port", port)
    assert done.code == 2
    assert f"--metrics-port {port} is not available" in done.last_line
    assert not (tmp_path / "run").exists()


def test_operators_of_an_epoch_are_timed_on_each_worker(recorded: Any, run_cli: RunCli) -> None:
    profile = read_profile(recorded[0])
    assert profile.epoch == 2
    assert profile.workers == [0, 1]
    assert all(ms.keys() <= {0, 1} for ms in profile.ms.values())
    assert any("conv" in name for name in profile.ms)
    assert sum(profile.share(name) for name in profile.ms) == pytest.approx(1)
    head, rows = rows_for_one_run(profile, 5)
    assert head[-2:] == ["worker 0 ms", "worker 1 ms"]
    assert len(rows) == 5
    _, both = rows_for_two_runs(profile, profile, None)
    assert all(row[-1] in (1.0, None) for row in both)
    done = run_cli("profile", recorded[0], recorded[0], "--csv", "operators.csv")
    assert done.code == 0, done.stderr
    assert "all operators" in done.stdout
    kinds = [e.kind for e in read_run(recorded[0]).process("worker-1").profiles]
    assert kinds == ["profile"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--profile", "3"), "--profile must be epoch=N or epochs=A-B, from 1, got '3'"),
        (
            ("--profile", "epoch=0"),
            "--profile must be epoch=N or epochs=A-B, from 1, got 'epoch=0'",
        ),
        (("--profile", "epoch=9", "--epochs", "2"), "--profile epoch=9: the run has 2 epochs"),
        (("--metrics-port", "70000"), "--metrics-port must be at most 65535, got 70000"),
        (
            ("--metrics-port", "0", "--no-telemetry"),
            "--metrics-port and --no-telemetry cannot be combined",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(run_cli: RunCli, args: tuple[str, ...], says: str) -> None:
    done = run_cli("train", "--out", "run", *args)
    assert done.code == 2
    assert says in done.last_line


def test_without_telemetry_only_totals_are_kept(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("train", "--out", "run", "--epochs", 2, "--no-telemetry", "--quiet")
    assert done.code == 0, done.stderr
    run = read_run(tmp_path / "run")
    assert all(not w.metrics and not w.steps for w in run.workers)
    assert all(w.ended.phases for w in run.workers)
    assert run.result["phases"]["worker-0"]["forward"] > 0
    assert run.result["verdicts"] == []


def test_a_live_record_forgets_what_is_old() -> None:
    record = RunRecord(keep=3)
    for second in range(10):
        record.add("worker-0", make_vitals(float(second)))
        record.add("worker-0", StepWindow(t=1.0, first_step=0))
    assert len(record.process("worker-0").metrics) == 3
    assert len(record.process("worker-0").steps) == 0

"""Files and events of a process in the run folder: written locally, or sent to the supervisor.

A worker on another machine has no access to the folder. Its events and files are sent over the
control connection, before the messages that refer to them: when the coordinator receives
`CheckpointWritten`, the checkpoint is complete.
"""

import contextlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.comm.wire import ControlConnection
from paceline.errors import CheckpointError, PacelineError, WireError
from paceline.protocol.messages import (
    EventLine,
    FileChunk,
    FileRequest,
    FileResponse,
    FilesComplete,
    RunClockRequest,
    RunClockResponse,
    TelemetryForwarded,
)
from paceline.state import (
    RemoteTensor,
    TrainState,
    load_checkpoint,
    persistent_buffers,
    save_checkpoint,
    write_tensors,
)
from paceline.telemetry.events import Event, HostMetrics, ProcessMetrics
from paceline.telemetry.phase_clock import PhaseClock
from paceline.telemetry.run_folder import (
    KERAS,
    EventSink,
    EventWriter,
    RunFolder,
    write_json,
)
from paceline.telemetry.sampler import MetricsDownsampler, Sampler, ServerCounters, StepCounters
from paceline.worker.assignment import Assignment

PART_BYTES = 1 << 20
AGE_ROUNDS = 5


class LocalRunFiles:
    """Direct access to the folder, on a file system shared with the supervisor."""

    def __init__(self, assignment: Assignment) -> None:
        assert assignment.folder is not None
        self._folder = RunFolder(assignment.folder)
        self._keep = assignment.keep_checkpoints
        self._who = assignment.process_name
        self.began_wall_s = assignment.started_wall_s
        """Start of the run, by this machine's clock."""
        self.events: EventSink = EventWriter(self._folder.events(assignment.process_name))

    def save(self, name: str, state: TrainState) -> str:
        """Saves a checkpoint; returns its path inside the run folder."""
        path = save_checkpoint(self._folder.checkpoints, name, state, keep=self._keep)
        return str(path.relative_to(self._folder.path))

    def save_profile(self, body: Mapping[str, object]) -> str:
        """Saves the operator profile of this process; returns its path inside the run folder."""
        path = self._folder.profile(self._who)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, body)
        return str(path.relative_to(self._folder.path))

    def load(self, checkpoint: str) -> TrainState:
        """Returns the checkpoint that the run starts from."""
        return load_checkpoint(Path(checkpoint))

    def save_model(self, model: torch.nn.Module, distant: Mapping[str, RemoteTensor]) -> None:
        """Saves the model's weights; `distant` are those of other workers."""
        save_weights(model, self._folder.model, distant)


class RemoteRunFiles:
    """Access to the supervisor's folder through the control connection."""

    def __init__(self, assignment: Assignment, control: ControlConnection) -> None:
        self._control = control
        self._keep = assignment.keep_checkpoints
        self._who = assignment.process_name
        self.began_wall_s = self._estimate_run_start()
        self.events: EventSink = self

    def _estimate_run_start(self) -> float:
        """Estimates the clock offset from the fastest of several round trips."""
        trips = []
        for _ in range(AGE_ROUNDS):
            asked = time.time()
            answer = self._request(RunClockRequest())
            received = time.time()
            assert isinstance(answer, RunClockResponse)
            trips.append((received - asked, (asked + received) / 2 - answer.seconds))
        return min(trips)[1]

    def write(self, event: Event) -> None:
        self._control.send(EventLine(event.to_line()))

    def save(self, name: str, state: TrainState) -> str:
        with tempfile.TemporaryDirectory(prefix="paceline-") as place:
            path = save_checkpoint(Path(place), name, state)
            for file in sorted(path.iterdir()):
                self._send(f"{name}/{file.name}", file)
        self._control.send(FilesComplete(name, self._keep))
        return f"checkpoints/{name}"

    def save_profile(self, body: Mapping[str, object]) -> str:
        path = f"profile/{self._who}"
        self._control.send(FileChunk(path, json.dumps(body).encode()))
        return f"{path}.json"

    def save_model(self, model: torch.nn.Module, distant: Mapping[str, RemoteTensor]) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as place:
            save_weights(model, Path(place) / "model", distant)
            for name in ("model", KERAS):
                if (Path(place) / name).exists():
                    self._send(name, Path(place) / name)
                    self._control.send(FilesComplete(name, 0))

    def _send(self, path: str, source: Path) -> None:
        with source.open("rb") as file:
            while piece := file.read(PART_BYTES):
                self._control.send(FileChunk(path, piece))

    def load(self, checkpoint: str) -> TrainState:
        with tempfile.TemporaryDirectory(prefix="paceline-") as place:
            folder = Path(place) / Path(checkpoint).name
            folder.mkdir()
            for name in ("state.json", "state.safetensors"):
                self._fetch(name, folder / name)
            rank = 0
            while self._fetch(f"worker-{rank}.safetensors", folder / f"worker-{rank}.safetensors"):
                rank += 1
            try:
                return load_checkpoint(folder)
            except CheckpointError as error:
                # The file is on the supervisor's machine, so the error shows its path there.
                raise CheckpointError(str(error).replace(str(folder), checkpoint)) from None

    def _fetch(self, name: str, target: Path) -> bool:
        """False if there is no such file."""
        at, size = 0, 1
        with target.open("wb") as file:
            while at < size:
                answer = self._request(FileRequest(name, at))
                if not isinstance(answer, FileResponse):
                    raise WireError(f"received {type(answer).__name__} instead of a file")
                if answer.size < 0:
                    target.unlink()
                    return False
                file.write(answer.data)
                at, size = at + len(answer.data), answer.size
        return True

    def _request(self, message: FileRequest | RunClockRequest) -> object:
        # Nothing else is sent to this worker before it reports that it is ready.
        self._control.send(message)
        return self._control.receive()


def open_run_files(
    assignment: Assignment, control: ControlConnection
) -> LocalRunFiles | RemoteRunFiles:
    if assignment.folder is None:
        return RemoteRunFiles(assignment, control)
    return LocalRunFiles(assignment)


def save_weights(
    model: torch.nn.Module, path: Path, distant: Mapping[str, RemoteTensor] | None = None
) -> None:
    """Removes duplicates of tied tensors; the first name is kept."""
    partial = path.with_name(path.name + ".partial")
    mine = dict(model.named_parameters()) | persistent_buffers(model)
    there = distant or {}
    write_tensors(partial, {name: there.get(name, tensor) for name, tensor in mine.items()})
    os.replace(partial, path)
    save_extra = getattr(model, "save_extra_files", None)
    if save_extra is not None:
        save_extra(path.parent)


class TelemetryReporter:
    """Writes the events of a process to its file, and forwards them to the supervisor.

    Ignores connection errors: the heartbeats exit the process if the supervisor is lost.
    """

    def __init__(
        self,
        assignment: Assignment,
        control: ControlConnection,
        sink: EventSink,
        clock: PhaseClock,
        counters: StepCounters,
        serving: ServerCounters | None = None,
    ) -> None:
        self._who = assignment.process_name
        self._control = control
        self._sink = sink
        self._thinner = MetricsDownsampler(sink.write)
        self._sampler: Sampler | None = None
        if assignment.telemetry:
            self._sampler = Sampler(
                now_s=clock.now_s,
                tell=self.report,
                run_key=assignment.token,
                clock=clock,
                counters=counters,
                serving=serving,
            )

    def start(self) -> None:
        if self._sampler is not None:
            self._sampler.start()

    def report(self, event: Event) -> None:
        if isinstance(event, ProcessMetrics | HostMetrics):
            self._thinner(event)
        else:
            self._sink.write(event)
        if self._sampler is not None:
            with contextlib.suppress(PacelineError):
                self._control.send(TelemetryForwarded(self._who, event.to_plain()))

    def sample_now(self) -> None:
        """Samples metrics immediately."""
        if self._sampler is not None:
            self._sampler.sample()

    def stop(self) -> None:
        """Samples the last metrics while the counted connections are still open."""
        if self._sampler is not None:
            self._sampler.stop()
            self._thinner.flush()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

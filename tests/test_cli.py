"""The command line as scripts rely on it: what it writes, what it prints, how it ends."""

from __future__ import annotations

import gzip
import json
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from conftest import RUN_S, Finished, RunCli, Started, read_result
from paceline.cli.main import main
from paceline.errors import UsageError
from paceline.telemetry.events import PHASES

COMMANDS = ("demo", "train", "compare", "launch", "doctor", "pool", "evaluate", "report")
SAMPLES = 1297
STRATEGY = "switch(allreduce, ps, at=50%)"

# ---- good runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One run that everything below looks at; two epochs, a switch between them."""
    folder = tmp_path_factory.mktemp("trained")
    args = ("train", "--strategy", STRATEGY, "--epochs", 2, "--seed", 5, "--out", "run")
    finished = Started(args, folder, None).wait(RUN_S)
    assert finished.code == 0, finished.stderr
    return folder / "run", finished


NUMBER = (int, float)
RESULT: dict[str, type | tuple[type, ...]] = {
    "status": str,
    "error": type(None),
    "strategy": str,
    "model": str,
    "data": str,
    "workers": int,
    "servers": int,
    "seed": int,
    "epochs": int,
    "samples": int,
    "updates": int,
    "seconds": NUMBER,
    "samples_per_s": NUMBER,
    "train_loss": float,
    "train_acc": float,
    "val_loss": float,
    "val_acc": float,
    "test_loss": float,
    "test_acc": float,
    "stages": dict,
    "history": list,
    "switches": list,
    "staleness": dict,
    "lag": dict,
    "phases": dict,
    "bytes_sent": int,
    "peak_rss_bytes": int,
    "virtual": bool,
    "versions": dict,
}
"""Every field of the contract; more may be there."""


def test_result_has_every_field(trained: tuple[Path, Finished]) -> None:
    folder, _ = trained
    result = read_result(folder)
    for name, kind in RESULT.items():
        assert isinstance(result[name], kind), name
    asked = {
        "status": "done",
        "strategy": STRATEGY,
        "model": "mlp-128",
        "data": "digits",
        "workers": 2,
        "servers": 1,
        "seed": 5,
        "epochs": 2,
        "samples": 2 * SAMPLES,
        "virtual": False,
    }
    assert {name: result[name] for name in asked} == asked
    for name in ("train_acc", "val_acc", "test_acc"):
        assert 0.3 < result[name] <= 1
    assert set(result["stages"]) == {"start", "read", "prepare", "train", "evaluate", "save"}
    assert sum(result["stages"].values()) == pytest.approx(result["seconds"], abs=0.05)
    assert set(result["staleness"]) == {"mean", "max", "histogram"}
    assert set(result["lag"]) == {"max"}
    assert set(result["phases"]) == {"worker-0", "worker-1"}
    for phases in result["phases"].values():
        assert set(phases) == set(PHASES)
        assert all(seconds >= 0 for seconds in phases.values())
        assert sum(phases.values()) <= result["seconds"] + 0.05
    assert {"python", "torch", "paceline"} <= set(result["versions"])


def test_result_has_every_row(trained: tuple[Path, Finished]) -> None:
    result = read_result(trained[0])
    columns = {"epoch", "seconds", "samples", "updates", "lr", "train_loss", "val_loss", "val_acc"}
    history = result["history"]
    assert [row["epoch"] for row in history] == [1, 2]
    assert [row["samples"] for row in history] == [SAMPLES, 2 * SAMPLES]
    assert history[0]["updates"] == 11
    assert history[1]["updates"] == result["updates"]
    for row in history:
        assert columns <= set(row)
        assert all(isinstance(row[name], NUMBER) for name in columns)
    assert history[0]["seconds"] < history[1]["seconds"] <= result["seconds"]
    (switch,) = result["switches"]
    assert set(switch) >= {"samples", "from", "to", "pause_s", "drain_s", "reason"}
    # The point itself, or the end of the global batch that it lies in.
    assert SAMPLES <= switch["samples"] < SAMPLES + 128
    assert (switch["from"], switch["to"]) == ("allreduce", "ps")
    assert switch["pause_s"] > 0
    assert sum(result["staleness"]["histogram"].values()) > 0


def test_run_folder_and_what_is_shown(trained: tuple[Path, Finished]) -> None:
    folder, finished = trained
    for name in ("run.json", "result.json", "model.safetensors", "report.html"):
        assert (folder / name).stat().st_size > 0
    for name in ("run", "worker-0", "worker-1"):
        lines = (folder / "events" / f"{name}.jsonl").read_text().splitlines()
        assert all("kind" in json.loads(line) for line in lines)
    assert "report.html" in finished.stdout
    assert "switch(allreduce, ps" in finished.stdout
    # Which learning rate is in force is said at the start and at the switch.
    assert finished.stderr.count("learning rate x") == 2
    assert "switched allreduce -> ps" in finished.stderr


def test_evaluate_says_the_same(trained: tuple[Path, Finished], run_cli: RunCli) -> None:
    folder, _ = trained
    result = read_result(folder)
    finished = run_cli("evaluate", folder, "--json")
    assert finished.code == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["data"] == "digits"
    assert figures["predictions"] == 300
    assert figures["test_acc"] == pytest.approx(result["test_acc"], abs=1e-12)
    assert figures["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
    shown = run_cli("evaluate", folder)
    assert f"accuracy {result['test_acc']:.4f}" in shown.stdout


def test_load_gives_the_module(trained: tuple[Path, Finished], tmp_path: Path) -> None:
    model = paceline.load(trained[0])
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        paceline.load(tmp_path)


def test_report_writes_a_file(trained: tuple[Path, Finished], run_cli: RunCli) -> None:
    folder, _ = trained
    finished = run_cli("report", folder, "-o", folder.parent / "page.html", "--title", "All of it")
    assert finished.code == 0, finished.stderr
    page = (folder.parent / "page.html").read_text()
    assert "All of it" in page
    assert STRATEGY in page
    assert finished.stdout.strip() == f"report: {folder.parent / 'page.html'}"


def test_compare_runs_them_all(run_cli: RunCli, tmp_path: Path) -> None:
    """One of them diverges: it is counted, the others stand, the exit status says so."""
    (tmp_path / "job.yaml").write_text("model: mlp-128\ndata: digits\nepochs: 1\nbatch: 64\n")
    out = tmp_path / "all"
    finished = run_cli(
        *("compare", "job.yaml", "--strategies", "single; ps(lr_scale=1e9)", "--workers", 2),
        *("--out", out, "--quiet"),
    )
    assert finished.code == 1, finished.stderr
    comparison = json.loads((out / "comparison.json").read_text())
    assert comparison["runs_failed"] == 1
    results = [json.loads(path.read_text()) for path in sorted(out.glob("*/result.json"))]
    assert [(r["strategy"], r["workers"], r["status"]) for r in results] == [
        ("single", 1, "done"),
        ("ps(lr_scale=1000000000)", 2, "diverged"),
    ]
    assert all(r["epochs"] <= 1 for r in results)
    assert (out / "report.html").exists()
    assert "single" in finished.stdout
    again = run_cli("compare", "--strategies", "single", "--out", out)
    assert_mistake(again, "already contains a comparison")


# ---- help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_is_instant(command: tuple[str, ...]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "paceline.cli.main", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "paceline.cli.main" in imported or "paceline.cli" in imported
    heavy = ("torch", "numpy", "sklearn", "plotly", "safetensors")
    assert [name for name in imported if name.split(".")[0] in heavy] == []
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 1.0
    for name in () if command else COMMANDS:
        assert name in done.stdout


# ---- mistakes --------------------------------------------------------------------------------


def join(value: object) -> str:
    """A readable name for a case: the command without quotes."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.fixture
def call_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCli:
    """The command line within this process: for mistakes that are found before anything starts."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object, timeout: float = RUN_S) -> Finished:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert isinstance(code, int)
        return Finished(code, *capsys.readouterr())

    return call


def assert_mistake(finished: Finished, *words: str) -> None:
    """Exit 2, exactly one line on stderr, nothing on stdout."""
    assert finished.code == 2, finished.stderr
    assert len(finished.lines) == 1, finished.stderr
    assert finished.stdout == ""
    assert finished.last_line.startswith("paceline: ")
    for word in words:
        assert word in finished.last_line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--strategy", "alreduce"), ("'alreduce'", "did you mean 'allreduce'")),
        (("--strategy", "ps(server=2)"), ("did you mean 'servers'",)),
        (("--strategy", "switch(allreduce, ps, at=150%)"), ("at=150%", "below 100%")),
        (("--strategy", "single", "--workers", 2), ("single", "one worker, not 2")),
        (("--model", "mlp-182"), ("'mlp-182'", "did you mean 'mlp-128'")),
        (("--data", "digit"), ("'digit'", "did you mean 'digits'")),
        (("--workers", 0), ("--workers must be at least 1, got 0",)),
        (("--workers", 4, "--batch", 3), ("--batch 3", "--workers 4")),
        (("--batch", 0), ("--batch must be at least 1, got 0",)),
        (
            ("--batch", 8, "--batch-per-worker", 4),
            ("--batch and --batch-per-worker cannot be combined: the global batch is",),
        ),
        (("--batch-per-worker", 0), ("--batch-per-worker must be at least 1, got 0",)),
        (("--lr", -0.1), ("--lr must be greater than 0, got -0.1",)),
        (("--lr", "nan"), ("--lr must be a finite number, got nan",)),
        (("--lr", "fast"), ("--lr must be a number, got 'fast'",)),
        (("--epochs", 2.5), ("--epochs must be a whole number, got 2.5",)),
        (("--epochs", 0), ("--epochs must be at least 1, got 0",)),
        (("--threads", 0), ("--threads must be at least 1, got 0",)),
        (
            ("--timeout", 0),
            ("--timeout must be at least 2 s, got 0: workers report once per second",),
        ),
        (("--dtype", "float8"), ("--dtype must be 'float32' or 'float64', got 'float8'",)),
        (("--device", "gpu"), ("--device must be 'auto', 'cpu' or 'cuda', got 'gpu'",)),
        (("--until", "val_acc"), ("--until 'val_acc' is not a condition", "val_acc>=0.97")),
        (("--until", "accuracy>=0.9"), ("'accuracy'",)),
        (("--optimizer", "sdg"), ("did you mean 'sgd'",)),
        (("--optimizer", "sgd(momentum=2)"), ("momentum", "at most 1")),
        (("--schedule", "cosin"), ("did you mean 'cosine'",)),
        (("--schedule", "milestones"), ("milestones requires epochs",)),
        (("--checkpoint-every", "50%"), ("epoch(1)",)),
        (
            ("--learning-rate", 0.1),
            ("unknown option --learning-rate; run `paceline train --help`",),
        ),
        (("--epoch", 3), ("unknown option --epoch; did you mean --epochs?",)),
        (("--lr",), ("--lr requires a value",)),
        (("a.py", "b.py"), ("unexpected argument 'b.py'",)),
        (("--profile", "3"), ("--profile must be epoch=N or epochs=A-B, from 1, got '3'",)),
        (("--metrics-port", 70000), ("--metrics-port must be at most 65535, got 70000",)),
        (("--metrics-port", 0, "--no-telemetry"), ("cannot be combined: metrics are computed",)),
        (
            ("--resume", "--force"),
            ("--resume and --force cannot be combined: resume the run, or overwrite it",),
        ),
        (("--resume",), ("contains no run",)),
        (("--data", "mnist", "--data-dir", "nowhere"), ("train-images", "nowhere")),
        (("nothing.py",), ("job file nothing.py was not found",)),
    ],
    ids=join,
)
def test_mistake_is_one_line_and_nothing_is_written(
    call_main: RunCli, tmp_path: Path, args: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_mistake(call_main("train", *args, "--out", "run"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train",), ("--out is required",)),
        (("tarin",), ("unknown command 'tarin'; did you mean 'train'?",)),
        (("nothing",), ("unknown command 'nothing'; choose from demo, train, attach, stop,",)),
        (("--vers",), ("unknown option --vers; did you mean --version?",)),
        (("launch", "x.py", "--foo"), ("unknown option --foo; run `paceline launch --help`",)),
        (("compare", "--strategies", "single; pss", "--out", "run"), ("did you mean 'ps'",)),
        (("compare", "--strategies", ";", "--out", "run"), ("--strategies is empty",)),
        (
            ("compare", "--strategies", "ps", "--seeds", 0, "--out", "run"),
            ("--seeds must be at least 1, got 0",),
        ),
        (
            ("compare", "--strategies", "ps", "--lr", -1, "--out", "run"),
            ("--lr must be greater than 0, got -1",),
        ),
        (("evaluate", "nowhere"), ("nowhere", "finished run")),
        (("report", "nowhere"), ("nowhere",)),
        (("demo", "--workers", 0, "--out", "run"), ("--workers must be at least 1, got 0",)),
        (("pool", "shwo"), ("unknown command 'shwo'; did you mean 'show'?",)),
        (("evaluate",), ("FOLDER is required",)),
        (("report",), ("a run folder is required",)),
        (("profile", "a", "b", "c"), ("one or two run folders are required, got 3",)),
        (("export", "run"), ("--as is required",)),
        (("export", "run", "--as", "pdf"), ("--as must be 'chrome', 'csv' or 'tensorboard'",)),
        (("launch",), ("SCRIPT is required",)),
        (("compare", "--out", "run"), ("--strategies or --matrix is required",)),
        (("dashboard", "run", "--port", 70000), ("--port must be at most 65535",)),
    ],
    ids=join,
)
def test_mistakes_of_other_commands(
    call_main: RunCli, tmp_path: Path, command: tuple[object, ...], words: tuple[str, ...]
) -> None:
    finished = call_main(*command)
    assert_mistake(finished, *words)
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.py", "x = 1\n", ("job.py", "no function job()")),
        ("job.py", "x = 1\n\ndef job(:\n", ("job.py:3", "SyntaxError")),
        ("job.py", "def job():\n    return 1 / 0\n", ("job.py:2", "ZeroDivisionError")),
        (
            "job.py",
            "import paceline\njob = lambda: paceline.Job(batch=0)\n",
            ("batch must be at least 1, got 0",),
        ),
        ("job.yaml", "modle: mlp-128\n", ("'modle'", "did you mean 'model'")),
        ("job.yaml", "model: [\n", ("job.yaml", "not valid YAML")),
    ],
)
def test_broken_job_file(
    run_cli: RunCli, tmp_path: Path, name: str, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    assert_mistake(run_cli("train", name, "--out", "run"), *words)
    assert not (tmp_path / "run").exists()


def pack_idx(array: np.ndarray[Any, Any]) -> bytes:
    head = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return head + array.tobytes()


def write_mnist(folder: Path, rows: int = 40) -> None:
    """The first rows only, under the names that say so."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for stem in ("train", "t10k"):
        images = rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        for kind, array in (("images-first40-idx3", images), ("labels-first40-idx1", labels)):
            path = folder / f"{stem}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(pack_idx(array)))


def test_data_file_cut_off(run_cli: RunCli, tmp_path: Path) -> None:
    """Only reading it to its end shows it, in the workers: still one line, nothing written."""
    write_mnist(tmp_path / "data" / "mnist")
    path = tmp_path / "data" / "mnist" / "train-images-first40-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    args = ("--data", "mnist", "--data-dir", "data", "--batch", 8)
    assert_mistake(run_cli("train", *args, "--out", "run"), "mnist", str(path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--optimizer", "sgd(nesterov=true)"), ("optimizer sgd(nesterov=true)", "momentum")),
        (("--model", "char-transformer"), ("char-transformer", "text")),
    ],
    ids=join,
)
def test_mistake_that_only_a_worker_sees(
    run_cli: RunCli, tmp_path: Path, args: tuple[object, ...], words: tuple[str, ...]
) -> None:
    """Found before the first step: as if nothing had been started."""
    assert_mistake(run_cli("train", *args, "--out", "run"), *words)
    assert not (tmp_path / "run").exists()


def test_pickled_data_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    (folder / "data_batch_1").write_bytes(b"\x80\x04.")
    finished = run_cli("train", "--data", "cifar-10", "--data-dir", "data", "--out", "run")
    assert_mistake(finished, "cifar-10-batches-py", "pickle")
    assert not (tmp_path / "run").exists()


def test_folder_of_another_run(trained: tuple[Path, Finished], run_cli: RunCli) -> None:
    folder, _ = trained
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for args, words in (
        ((), ("already contains a run", "--resume", "--force")),
        (("--resume", "--model", "mlp-300-100", "--seed", 5), ("model='mlp-128'", "mlp-300-100")),
        (("--resume", "--batch", 64, "--seed", 5), ("batch=128", "batch=64")),
        (("--resume", "--seed", 6), ("seed=5", "seed=6")),
        (("--resume", "--seed", 5, "--epochs", 2), ("already completed its 2 epochs", "--epochs")),
    ):
        assert_mistake(run_cli("train", *args, "--out", folder), *words)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_out_that_cannot_be(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_mistake(run_cli("train", "--out", "file"), "file", "is a file; choose a directory")
    assert_mistake(run_cli("train", "--out", "file/below"), "file/below")
    assert (tmp_path / "file").read_text() == "in the way"


def test_force_replaces_what_a_run_wrote_and_nothing_else(
    trained: tuple[Path, Finished], run_cli: RunCli, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    (out / "checkpoints" / "000000000001").mkdir(parents=True)
    (out / "result.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    args = ("--strategy", "single", "--workers", 1, "--epochs", 1, "--quiet", "--out", out)
    finished = run_cli("train", "--force", *args)
    assert finished.code == 0, finished.stderr
    assert finished.stderr == ""
    assert read_result(out)["status"] == "done"
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "checkpoints" / "000000000001").exists()


def test_train_works_where_an_event_loop_runs_already(tmp_path: Path) -> None:
    """As in a notebook: the result comes back, and so does an error."""
    import asyncio

    import paceline
    from paceline.errors import UsageError

    async def cell() -> dict[str, Any]:
        job = paceline.Job(epochs=1, checkpoint_every="never")
        return paceline.train(job, "allreduce", workers=2, out=tmp_path / "run")

    assert asyncio.run(cell())["status"] == "done"

    with pytest.raises(UsageError):
        asyncio.run(_bad_cell(tmp_path))


async def _bad_cell(tmp_path: Path) -> dict[str, Any]:
    import paceline

    job = paceline.Job(epochs=1, checkpoint_every="never")
    return paceline.train(job, "switch(allreduce, ps, at=epoch(5))", workers=2, out=tmp_path / "x")

"""Jobs: what is checked, how a file becomes one, and how one travels to other processes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import DataError, SpecError, UsageError
from paceline.job import Job, JobRef, build_job, display_name, refer_to_job
from paceline.launch.run import plain_fields, run_training, train
from paceline.launch.run_options import RunOptions
from paceline.plugins import hash_file
from paceline.specs.optimizer import OPTIMIZERS
from paceline.specs.point import RunPoint
from paceline.strategies.registry import parse_strategy
from paceline.worker.assignment import pack_live, unpack_live
from paceline.worker.job_builder import (
    JobData,
    build_loss,
    build_model,
    build_optimizer,
    input_facts,
    load_job_data,
)
from paceline.worker.process_settings import pin

GOOD = """
from paceline import Job

def job():
    return Job(model="mlp-128", data="digits", batch=32)

def other():
    return Job(epochs=3)
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """Job files come in as modules, and bring their folder with them."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("paceline_job", None)


def write(folder: Path, text: str, name: str = "job.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refuse(path: Path | str, *words: str) -> str:
    """The file is refused in one line with these words."""
    with pytest.raises(UsageError) as caught:
        refer_to_job(Path(path), {}).resolve()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


# ---- fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": "many"}, "batch must be a whole number, got 'many'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"lr": -0.1}, "lr must be greater than 0, got -0.1"),
        ({"lr": 0}, "lr must be greater than 0, got 0"),
        ({"lr": float("nan")}, "lr must be a finite number, got nan"),
        ({"lr": float("inf")}, "lr must be a finite number, got inf"),
        ({"clip": 0}, "clip must be greater than 0, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**31}, "seed must be less than 2147483648, got 2147483648"),
        ({"dtype": "float8"}, "dtype must be 'float32' or 'float64', got 'float8'"),
        ({"device": "tpu"}, "device must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"model": ""}, "model must not be empty"),
        ({"model": None}, "model must not be empty"),
        ({"data": None}, "data must not be empty"),
        ({"modle": "mlp-128"}, "unknown job field 'modle'; did you mean 'model'"),
        ({"loss": 3}, "loss must be a function, got 3"),
    ],
)
def test_mistakes_are_told_in_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_job(**fields)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"model": "mlp-182"}, UsageError, "did you mean 'mlp-128'"),
        ({"data": "digit"}, UsageError, "did you mean 'digits'"),
        ({"data": "mnist"}, DataError, "not found"),
        ({"optimizer": "sdg"}, SpecError, "did you mean 'sgd'"),
        ({"schedule": "cosin"}, SpecError, "did you mean 'cosine'"),
        ({"until": "val_acc"}, SpecError, "--until"),
        ({"checkpoint_every": "50%"}, UsageError, "epoch(1)"),
        ({"checkpoint_every": "epoch(0)"}, UsageError, "whole number"),
    ],
)
def test_check_reads_everything(
    fields: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    job = build_job(data_dir=tmp_path, **fields)
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        job.check()


def test_defaults() -> None:
    job = build_job()
    job.check()
    assert (job.model, job.data, job.batch) == ("mlp-128", "digits", 128)
    assert job.is_plain
    assert job.until_spec is None
    assert job.checkpoint_point == RunPoint(epoch=1)
    assert build_job(checkpoint_every="never").checkpoint_point is None
    assert build_job(checkpoint_every="samples(500)").checkpoint_point == RunPoint(samples=500)
    assert job.base_lr == 0.1
    assert build_job(optimizer="adam").base_lr == 0.001
    assert build_job(optimizer="adagrad").base_lr == 0.01
    assert build_job(optimizer="adam", lr=0.5).base_lr == 0.5
    assert build_job(optimizer="adam").optimizer_spec == OPTIMIZERS["adam"]()
    with pytest.raises(ValueError, match="frozen"):
        job.batch = 3  # type: ignore[misc]


def test_description_can_be_written() -> None:
    job = build_job(model=torch.nn.Linear(2, 2), data=make_points, data_dir=Path("d"), loss=max)
    facts = json.loads(json.dumps(job.describe()))
    assert facts["model"] == "Linear"
    assert facts["data"] == "make_points"
    assert facts["loss"] == "max"
    assert facts["data_dir"] == "d"
    assert set(facts) == set(Job.model_fields)
    assert display_name(None) is None
    assert not job.is_plain


# ---- files -----------------------------------------------------------------------------------


def test_python_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    reference = refer_to_job(path, {})
    assert reference.resolve().batch == 32
    changed = refer_to_job(path, {"batch": 64, "seed": 5}).resolve()
    assert (changed.batch, changed.seed, changed.model) == (64, 5, "mlp-128")
    assert refer_to_job(Path(f"{path}:other"), {}).resolve().epochs == 3
    with pytest.raises(UsageError, match="batch must be at least 1, got 0"):
        refer_to_job(path, {"batch": 0}).resolve()


@pytest.mark.parametrize("name", ["job.yaml", "job.yml", "job.json"])
def test_file_of_fields(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, '{"model": "mlp-128", "batch": 32, "lr": 0.5}', name)
    job = refer_to_job(path, {"lr": 0.25}).resolve()
    assert (job.batch, job.lr) == (32, 0.25)


def test_reference_travels_as_json(tmp_path: Path) -> None:
    reference = refer_to_job(write(tmp_path, GOOD), {"batch": 8})
    again = JobRef.model_validate(json.loads(reference.model_dump_json()))
    assert again == reference
    assert again.resolve() == reference.resolve()
    named = JobRef(fields=plain_fields(build_job(batch=8, data_dir=tmp_path, lr=0.5)))
    again = JobRef.model_validate(json.loads(named.model_dump_json()))
    assert again.resolve() == build_job(batch=8, data_dir=tmp_path, lr=0.5)


def test_changed_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    reference = refer_to_job(path, {})
    assert reference.hash == hash_file(path)
    path.write_text(GOOD + "# touched\n")
    with pytest.raises(UsageError, match="has changed since the run was started"):
        reference.resolve()
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        reference.resolve()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", ("no function job()",)),
        ("job = 3\n", ("no function job()",)),
        ("def job():\n    return 3\n", ("returned int", "paceline.Job")),
        ("import nothing_at_all\n", (":1:", "ModuleNotFoundError", "nothing_at_all")),
        ("x = 1\n\ndef job(:\n", (":3:", "SyntaxError")),
        ("x = 1\ny = x / 0\n", (":2:", "ZeroDivisionError")),
        ("def job():\n    x = 1\n    return undefined\n", (":3:", "NameError", "undefined")),
        (
            "from paceline import Job\ndef job():\n    return Job(batch=0)\n",
            ("job.py", "batch must be at least 1, got 0"),
        ),
        (
            "from paceline import Job\ndef job():\n    return Job(modle='x')\n",
            ("job.py", "did you mean 'model'"),
        ),
        ("from paceline import Job\nJob(batch=0)\n", (":2:", "batch")),
        ("def job():\n    raise RuntimeError('two\\nlines')\n", (":2:", "two lines")),
    ],
)
def test_broken_python_file(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    refuse(write(tmp_path, text), str(tmp_path / "job.py"), *words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.yaml", "modle: mlp-128\n", ("did you mean 'model'",)),
        ("job.yaml", "- model\n", ("a mapping",)),
        ("job.yaml", "", ("a mapping",)),
        ("job.yaml", "model: [\n", ("not valid YAML",)),
        ("job.yaml", "1: 2\n", ("key 1",)),
        ("job.yaml", "model: !!python/object/apply:os.system [date]\n", ("not valid YAML",)),
        ("job.yaml", "batch: many\n", ("batch must be a whole number, got 'many'",)),
        ("job.json", "{", ("not valid JSON",)),
        ("job.toml", "", (".py, .yaml or .json",)),
    ],
)
def test_broken_file_of_fields(
    tmp_path: Path, name: str, text: str, words: tuple[str, ...]
) -> None:
    refuse(write(tmp_path, text, name), *words)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    refuse(tmp_path / "job.py", "was not found", "job.py")
    refuse(f"{tmp_path / 'job.py'}:train", "was not found")
    refuse(f"{write(tmp_path, GOOD)}:nothing", "no function nothing()")
    refuse(tmp_path, "was not found")


# ---- live jobs -------------------------------------------------------------------------------

Parts = tuple[tuple[torch.Tensor, torch.Tensor], None, None]


def make_points() -> Parts:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator)
    return (inputs, (inputs.sum(1) > 0).long()), None, None


def make_net() -> torch.nn.Module:
    return torch.nn.Linear(6, 2)


def test_live_parts_are_built() -> None:
    job = build_job(model=make_net, data=make_points, dtype="float64")
    tables = load_job_data(job)
    assert len(tables.train) == 40
    assert tables.splits == ()
    assert input_facts(tables) == ((6,), 2)
    one, two = build_model(job, tables), build_model(job, tables)
    assert torch.equal(one.weight, two.weight)  # The job's seed, each time anew.
    assert one.weight.dtype == torch.float64
    named = build_model(build_job(model="mlp-128", data=make_points), tables)
    assert named(torch.zeros(1, 6)).shape == (1, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": lambda: 3}, "(train, val, test)"),
        ({"data": (None, None, None)}, "the training data is empty"),
        ({"data": [1, 2]}, "(train, val, test)"),
        ({"model": lambda: 3, "data": make_points}, "expected a torch.nn.Module"),
        ({"model": 3, "data": make_points}, "a name, a module or a function"),
        ({"data": make_points, "device": "cuda"}, "device=cuda"),
    ],
)
def test_live_parts_that_do_not_fit(fields: dict[str, Any], words: str) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here, so the job is right")
    job = build_job(**fields)
    with pytest.raises(UsageError) as caught:
        build_model(job, load_job_data(job))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["sgd(nesterov=true)", "adam(betas=0.9)", "adam(betas=(1, 0.9))", "adamw(betas=())"]
)
def test_options_that_torch_refuses_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="optimizer "):
        build_optimizer(build_job(optimizer=text).optimizer_spec, 0.1, make_net())


def test_nothing_to_train_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        build_optimizer(build_job().optimizer_spec, 0.1, make_net().requires_grad_(False))


def test_loss_includes_what_the_model_adds() -> None:
    model = make_net()
    model.regularization = lambda: torch.tensor(2.0)
    loss_of = build_loss(build_job(model=model, loss=lambda output, target: output.sum()), model)
    assert float(loss_of(torch.ones(3), torch.zeros(3))) == 5.0
    assert isinstance(load_job_data(build_job()), JobData)


def test_channels_last_and_fused_change_speed_alone() -> None:
    """Images go in with channels last, weights stay where they are; numbers agree to a few bits."""
    inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = []
    for fields in ({}, {"channels_last": True, "optimizer": "sgd(momentum=0.9, fused=true)"}):
        job = build_job(model=lambda: torch.nn.Conv2d(3, 5, 3), dtype="float64", **fields)
        model = build_model(job, JobData(None, None, None))  # type: ignore[arg-type]
        optimizer = build_optimizer(job.optimizer_spec, 0.1, model)
        output = model(inputs.double())
        assert output.is_contiguous(memory_format=torch.channels_last) == bool(fields)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs.double()).square().mean().backward()
            optimizer.step()
        assert all(p.is_contiguous() for p in model.parameters())
        assert optimizer.param_groups[0]["fused"] == (True if fields else None)
        seen.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_compiled_model_trains_alike(tmp_path: Path) -> None:
    """Needs a C++ compiler; weights lie in shared memory under it as without it."""
    fields = {"model": "mlp-128", "data": "digits", "batch": 64, "epochs": 1}
    for strategy in ("allreduce", "ps"):
        results = [
            train(build_job(**fields, compile=on), strategy, 1, out=tmp_path / f"{strategy}{on}")
            for on in (False, True)
        ]
        assert results[0]["train_loss"] == pytest.approx(results[1]["train_loss"], rel=1e-4)


def test_live_job_goes_to_children_only() -> None:
    job = build_job(model=make_net, data=make_points, batch=10)
    again = unpack_live(pack_live(job))
    assert again.model is make_net
    assert again.batch == 10
    with pytest.raises(UsageError, match="top level of a module"):
        pack_live(build_job(model=lambda: make_net()))


def test_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Workers import the script to find its objects; it must not start training again there."""
    script = tmp_path / "bare.py"
    script.write_text(
        "import torch, paceline\n"
        "def points():\n"
        "    return (torch.ones(8, 6), torch.zeros(8, dtype=torch.long)), None, None\n"
        "def net():\n"
        "    return torch.nn.Linear(6, 2)\n"
        "paceline.train(paceline.Job(epochs=1), 'single', 1, out='named', force=True)\n"
        "paceline.train(paceline.Job(model=net, data=points, batch=4), 'allreduce', 1, out='run')\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        'move the call to train() under `if __name__ == "__main__":`'
    )


def note_cores(folder: Path) -> Any:
    """Data, and a note of the cores that whoever reads it may use."""
    (folder / str(os.getpid())).write_text(json.dumps(sorted(os.sched_getaffinity(0))))
    return make_points()


def test_pinned_workers_have_cores_of_their_own(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    workers = min(2, len(cores))
    options = RunOptions(out=tmp_path / "run", workers=workers, pin=True)
    (tmp_path / "cores").mkdir()
    reads = functools.partial(note_cores, tmp_path / "cores")
    job = build_job(model=make_net, data=reads, batch=20, epochs=1)
    run_training(job, parse_strategy("allreduce"), options)
    noted = sorted(json.loads(p.read_text()) for p in (tmp_path / "cores").iterdir())
    each = len(cores) // workers
    assert noted == [cores[i * each : (i + 1) * each] for i in range(workers)]


def test_more_pinned_workers_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    with pytest.raises(UsageError, match="3 workers cannot share 2 cores"):
        pin(0, 3)


def test_live_job_trains(tmp_path: Path) -> None:
    """From Python, with the module and tensors at hand; nothing of it is named in a file."""
    job = build_job(model=torch.nn.Linear(6, 2), data=make_points()[:1] * 3, batch=10, epochs=2)
    result = train(job, "allreduce", 1, out=tmp_path / "run")
    assert result["status"] == "done"
    assert result["samples"] == 80
    assert result["model"] == "Linear"

    import paceline

    with pytest.raises(UsageError, match="model="):
        paceline.load(tmp_path / "run")
    model = paceline.load(tmp_path / "run", model=make_net())
    assert isinstance(model, torch.nn.Linear)
    assert not model.training
    with pytest.raises(UsageError, match="does not match"):
        paceline.load(tmp_path / "run", model=torch.nn.Linear(3, 2))

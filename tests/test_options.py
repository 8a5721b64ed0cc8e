"""Options come from fields: help, --config files and run.json show the same ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from pydantic import Field

import paceline
from conftest import Finished, RunCli
from paceline.cli.commands import command
from paceline.cli.main import MODULES, make_app
from paceline.cli.main import run as run_main
from paceline.errors import UsageError
from paceline.job import Job
from paceline.launch.settings import RunSettings
from paceline.options import Option, build_settings, option_fields, settings_to_plain

SOURCE = Path(paceline.__file__).parent
TRAINING_COMMANDS = ("train", "compare", "tune", "twin", "plan")


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    wait_s: Annotated[float, Field(gt=0), Option(metavar="SECONDS")] = 1.5
    """Time to wait."""
    name: Annotated[tuple[str, ...], Option(short="n")] = ()
    """Name,
    over two lines."""
    out: Path
    """Where to write."""
    verbose: bool = True
    """Print more."""


def show_help(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run_main([*args, "--help"]) == 0
    return capsys.readouterr().out


# ---- fields ----------------------------------------------------------------------------------


def test_fields_describe_themselves() -> None:
    wait, name, out, verbose = option_fields(SampleSettings)
    assert (wait.option, wait.metavar, wait.default_text) == ("wait", "SECONDS", "1.5")
    assert (name.short, name.is_repeatable, name.help) == ("n", True, "Name, over two lines.")
    assert out.is_required
    assert (verbose.is_flag, verbose.has_negative, verbose.default_text) == (True, True, None)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "--out is required"),
        ({"out": "x", "wait_s": "0"}, "--wait must be greater than 0, got 0"),
        ({"out": "x", "wait_s": "soon"}, "--wait must be a number, got 'soon'"),
        ({"out": 3}, "--out must be a path, got 3"),
        ({"out": "x", "verbose": "perhaps"}, "--verbose must be true or false, got 'perhaps'"),
    ],
)
def test_problems_are_one_line(values: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_settings(SampleSettings, values, prefix="--")
    assert str(caught.value) == problem


def test_values_are_converted_and_written_back() -> None:
    settings = build_settings(SampleSettings, {"out": "a", "wait_s": "2", "name": ["x", "y"]})
    assert settings == SampleSettings(out=Path("a"), wait_s=2.0, name=("x", "y"))
    plain = settings_to_plain(settings)
    assert plain == {"wait_s": 2.0, "name": ["x", "y"], "out": "a", "verbose": True}
    assert build_settings(SampleSettings, plain) == settings


def test_every_option_has_help_and_a_name_of_its_own() -> None:
    """Importing a command fails an assertion if two of its settings share a name."""
    import inspect
    from importlib import import_module

    for name in TRAINING_COMMANDS:
        function = getattr(import_module(f"paceline.cli.{MODULES.get(name, name)}"), name)
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.annotation.__metadata__[0].help, parameter.name


def test_a_command_receives_its_settings() -> None:
    seen = []

    @command
    def sample(*, settings: SampleSettings) -> None:
        seen.append(settings)

    app = make_app()
    app.command(sample, name="sample")
    app(["sample", "--out", "a", "-n", "x", "--name", "y", "--no-verbose", "--wait=3"])
    assert seen == [SampleSettings(out=Path("a"), name=("x", "y"), verbose=False, wait_s=3.0)]


# ---- help ------------------------------------------------------------------------------------


def test_train_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    shown = show_help(capsys, "train")
    titles = [line for line in shown.splitlines() if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert titles == [
        *("Arguments:", "Run:", "Training:", "Data from files:", "Placement:"),
        "Simulated slowdowns:",
    ]
    assert shown.startswith("Usage: paceline train [OPTIONS] [JOB]\n")
    assert "--device auto|cpu|cuda" in shown


def test_defaults_in_help_are_those_of_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(show_help(capsys, "train").split())
    for field in (*option_fields(Job), *option_fields(RunSettings)):
        if field.default not in (None, True, False):
            end = f"[default: {field.default_text}]"
            assert re.search(rf"--{field.option} [^\[]*{re.escape(end)}", shown), field.option


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for args in ((), ("train",), ("compare",), ("launch",), ("pool",), ("report",)):
        for line in show_help(capsys, *args).splitlines():
            assert len(line) <= min(int(columns), 100), line


def test_python_m_paceline(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout[:9]) == (0, "paceline ")


# ---- --config and run.json -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("epoch: 3\n", "unknown option 'epoch'; did you mean 'epochs'?"),
        ("epochs: many\n", "--epochs must be a whole number, got 'many'"),
        ("- epochs\n", "must contain a mapping"),
        ("epochs: [\n", "is not valid YAML"),
        ("config: other.yaml\n", "unknown option 'config'"),
    ],
)
@pytest.mark.parametrize("name", TRAINING_COMMANDS)
def test_config_is_checked_like_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, problem: str
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    place = ("--pool", "none.yaml") if name == "plan" else ("--out", str(tmp_path / "run"))
    assert run_main([name, "--config", str(path), *place]) == 2
    shown = capsys.readouterr().err
    assert problem in shown
    assert len(shown.splitlines()) == 1
    assert run_main([name, "--config", str(tmp_path / "none.yaml"), *place]) == 2
    assert "none.yaml cannot be read: No such file" in capsys.readouterr().err


def test_run_json_has_settings_that_work_as_config(run_cli: RunCli, tmp_path: Path) -> None:
    """Also: `single` without --workers uses one worker, and the command line wins."""
    (tmp_path / "options.yaml").write_text(
        "out: first\nstrategy: single\nepochs: 7\nbatch: 64\ncheckpoint-every: never\n"
        "data_dir: .\nquiet: true\ntimeout: 90\ntelemetry: false\n"
    )
    done = run_cli("train", "--config", "options.yaml", "--epochs", 1)
    assert done.code == 0, done.stderr
    first = json.loads((tmp_path / "first" / "run.json").read_text())
    settings = first["settings"]
    given = {"strategy": "single", "epochs": 1, "batch": 64, "timeout_s": 90.0, "workers": 1}
    assert settings == settings | given
    assert {field.field for field in option_fields(RunSettings)} <= set(settings)
    assert {field.field for field in option_fields(Job)} <= set(settings)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(settings))
    done = run_cli("train", "--config", "again.yaml", "--out", "second", "--quiet")
    assert done.code == 0, done.stderr
    second = json.loads((tmp_path / "second" / "run.json").read_text())
    assert second["settings"] == settings | {"out": "second"}
    assert second["job"] | {"job_ref": None} == first["job"] | {"job_ref": None}


def test_one_new_field_is_a_new_option(tmp_path: Path) -> None:
    """A field added to a copy of the source is in --help, --config and run.json at once."""
    copy = tmp_path / "src" / "paceline"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    settings = copy / "launch" / "settings.py"
    text = settings.read_text()
    anchor = "    pin: bool = False\n"
    assert text.count(anchor) == 1
    field = '    color: str = "red"\n    """Color of the run."""\n'
    settings.write_text(text.replace(anchor, field + anchor))

    def call(*args: str) -> Finished:
        environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
        program = [sys.executable, "-m", "paceline", *args]
        done = subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    for name in ("train", "compare", "tune"):
        assert re.search(
            r"--color TEXT +Color of the run. \[default: red\]", call(name, "--help").stdout
        )
    (tmp_path / "options.yaml").write_text("color: blue\nepochs: 1\ncheckpoint_every: never\n")
    base = ("train", "--config", "options.yaml", "--strategy", "single", "--quiet", "--out")
    done = call(*base, "first")
    assert done.code == 0, done.stderr
    done = call(*base, "second", "--color", "green")
    assert done.code == 0, done.stderr
    colors = [
        json.loads((tmp_path / name / "run.json").read_text())["settings"]["color"]
        for name in ("first", "second")
    ]
    assert colors == ["blue", "green"]


def test_strategies_are_labelled_as_given(tmp_path: Path) -> None:
    """The canonical text omits defaults: ssp(3) would be shown as ssp."""
    out = tmp_path / "run"
    texts = "ps(sync=ssp(3)); ps(sync=ssp(5)); switch(allreduce,ps,at=50%)"
    twin = ("twin", "--cluster", "2", "--depth", "cost", "--epochs", "1", "--quiet")
    assert run_main([*twin, "--strategy", texts, "--out", str(out)]) == 0
    comparison = json.loads((out / "comparison.json").read_text())
    assert [entry["label"] for entry in comparison["strategies"]] == [
        *("ps(sync=ssp(3))", "ps(sync=ssp(5))", "switch(allreduce, ps, at=50%)"),
    ]

"""`paceline launch`: a plain PyTorch loop, three lines changed, under several strategies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import Finished, RunCli, read_result

SAMPLES, BATCH, EPOCHS = 49, 12, 3
LR = 0.2

LOOP = f"""
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import paceline

folder, fault = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]


class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn({SAMPLES}, 6, generator=generator, dtype=torch.float64)
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index], index


torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), lr={LR}, momentum=0.9)
loader = DataLoader(Points(), batch_size={BATCH}, shuffle=True)
if fault != "prepare":
    model, optimizer, loader = paceline.prepare(model, optimizer, loader, epochs={EPOCHS})
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

for epoch in range({EPOCHS}):
    seen, losses = [], []
    for inputs, targets, indices in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if fault != "step":
            optimizer.step()
        if fault == "twice":
            optimizer.step()
        if fault == "raise" and epoch == 1:
            raise RuntimeError("the dog ate the batch")
        seen += indices.tolist()
        losses.append(loss.item())
    if fault == "exit" and epoch == 1:
        sys.exit(3)
    scheduler.step()
    record = {{"seen": seen, "losses": losses, "lr": scheduler.get_last_lr()[0]}}
    (folder / f"seen-{{paceline.rank()}}-{{epoch}}.json").write_text(json.dumps(record))
print(f"loop of {{paceline.rank()}} is over")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def launch(
    run_cli: RunCli, script: Path, strategy: str, workers: int, *args: str
) -> tuple[Finished, Path]:
    """Run the loop, its records written beside the run folder."""
    label = re.sub(r"\W+", "-", f"{strategy}-{workers}")
    out, records = script.parent / f"run-{label}", script.parent / f"records-{label}"
    records.mkdir()
    finished = run_cli(
        *("launch", script, "--strategy", strategy, "--workers", workers),
        *("--out", out, "--", records, *args),
    )
    return finished, out


def seen_in(out: Path, epoch: int) -> list[int]:
    folder = out.with_name(out.name.replace("run-", "records-"))
    files = sorted(folder.glob(f"seen-*-{epoch}.json"))
    return [index for path in files for index in json.loads(path.read_text())["seen"]]


def assert_trained(finished: Finished, out: Path) -> None:
    """Done, and every sample exactly once an epoch, over all workers together."""
    assert finished.code == 0, finished.stderr
    assert "done" in finished.stdout
    result = read_result(out)
    assert result["status"] == "done"
    assert result["samples"] == SAMPLES * EPOCHS
    assert result["epochs"] == EPOCHS
    for epoch in range(EPOCHS):
        assert sorted(seen_in(out, epoch)) == list(range(SAMPLES))
    assert [row["lr"] for row in result["history"]] == pytest.approx([LR, LR / 2, LR / 4])


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    weights = load_file(out / "model.safetensors")
    assert all(tensor.dtype == torch.float64 for tensor in weights.values())
    return weights


def test_exact_strategies_give_the_weights_of_one_worker(run_cli: RunCli, script: Path) -> None:
    """Also with an empty share: the last batch of one sample has none for the second worker."""
    reference, out = launch(run_cli, script, "allreduce", 1)
    assert_trained(reference, out)
    expected = weights_of(out)
    # The output of the scripts is shown, and says whose it is.
    assert "[worker 0] loop of 0 is over" in reference.stderr
    for strategy, workers in (("allreduce", 2), ("ps(sync=bsp)", 2)):
        finished, other = launch(run_cli, script, strategy, workers)
        assert_trained(finished, other)
        for name, tensor in weights_of(other).items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "switch(allreduce, ps, at=50%)"])
def test_other_strategies_end_in_order(run_cli: RunCli, script: Path, strategy: str) -> None:
    finished, out = launch(run_cli, script, strategy, 2)
    assert_trained(finished, out)
    result = read_result(out)
    if strategy.startswith("switch"):
        (switch,) = result["switches"]
        # Half of the run is 74 samples: the first end of a global batch from there on.
        assert switch["samples"] == 85
        assert (switch["from"], switch["to"]) == ("allreduce", "ps")


def test_ordinary_script_is_left_alone(script: Path) -> None:
    """Without `paceline launch` the same file is a plain PyTorch script."""
    done = subprocess.run(
        [sys.executable, script, script.parent], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loop of 0 is over\n"
    record = json.loads((script.parent / "seen-0-0.json").read_text())
    assert sorted(record["seen"]) == list(range(SAMPLES))
    assert record["seen"] != list(range(SAMPLES))
    assert record["losses"][0] > 0


# ---- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("prepare", "called neither paceline.prepare(model, optimizer, loader)"),
        ("step", "optimizer.step() was not called"),
        ("twice", "optimizer.step() was called without a batch"),
    ],
)
def test_mistake_in_the_loop_is_one_line(
    run_cli: RunCli, script: Path, fault: str, words: str
) -> None:
    out = script.parent / "run"
    finished = run_cli("launch", script, "--workers", 1, "--out", out, "--quiet", "--", ".", fault)
    assert finished.code == 2
    assert len(finished.lines) == 1
    assert words in finished.last_line


def test_script_that_raises(run_cli: RunCli, script: Path) -> None:
    out = script.parent / "run"
    finished = run_cli(
        "launch", script, "--workers", 2, "--out", out, "--quiet", "--", ".", "raise"
    )
    assert finished.code == 1
    line = r"worker [01] failed at step \d+: loop\.py:\d+: `raise .*`: RuntimeError: the dog ate"
    assert re.search(line, finished.last_line)
    # The traceback leads to the line in the user's script.
    assert re.search(r'loop\.py", line \d+, in <module>', finished.stderr)
    assert read_result(out)["status"] == "failed"


def test_script_that_exits(run_cli: RunCli, script: Path) -> None:
    """What it had done until then stays."""
    out = script.parent / "run"
    finished = run_cli("launch", script, "--workers", 1, "--out", out, "--quiet", "--", ".", "exit")
    assert finished.code != 0
    assert finished.lines == [finished.last_line]
    assert "loop.py exited with 3" in finished.last_line
    result = read_result(out)
    assert result["status"] == "failed"
    assert len(result["history"]) >= 1


def test_mistakes_before_anything_starts(run_cli: RunCli, script: Path) -> None:
    out = script.parent / "run"
    for args, words in (
        ((script.parent / "nothing.py",), "nothing.py was not found"),
        ((script, "--workers", 0), "--workers must be at least 1, got 0"),
        ((script, "--strategy", "single", "--workers", 2), "one worker, not 2"),
        ((script, "--strategy", "alreduce"), "did you mean 'allreduce'"),
    ):
        finished = run_cli("launch", *args, "--out", out)
        assert finished.code == 2
        assert len(finished.lines) == 1
        assert words in finished.last_line
        assert not out.exists()

"""Simulates the published experiment: accuracy over virtual time, with and without a slow machine.

    python bench/published_shape.py --data-dir DIR --work FOLDER   (half an hour on one core)
    python bench/published_shape.py --work FOLDER --draw-only           draw and print again

cnn-small on Fashion-MNIST, eight virtual machines like the published five, 5 epochs, global batch
128, SGD with momentum 0.9 and weight decay 0.0005, cosine with one epoch of warm-up, 3 seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SWITCHES = [f"switch(allreduce, ps, at={p}%)" for p in (25, 50, 75)]
LR, HIGH_LR = 0.035, 0.1
COMMON = (
    *("--model", "cnn-small", "--data", "fashion-mnist", "--cluster", "published-eight"),
    *("--epochs", "5", "--batch", "128", "--schedule", "cosine(warmup=1)", "--threads", "1"),
    *("--optimizer", "sgd(momentum=0.9, weight_decay=0.0005)", "--force", "--quiet"),
)
SETS: dict[str, tuple[str, ...]] = {
    "slow": (
        *("--lr", str(LR), "--depth", "cost", "--slow", "worker=0,factor=3"),
        *("--strategy", "; ".join(["allreduce", "ps", *SWITCHES])),
    ),
    "high": (
        *("--lr", str(HIGH_LR), "--seeds", "3"),
        *("--strategy", "; ".join(["allreduce", "ps", SWITCHES[1]])),
    ),
    "equal": (
        *("--lr", str(LR), "--seeds", "3"),
        *("--strategy", "; ".join(["allreduce", "ps", *SWITCHES])),
    ),
}


def play(work: Path, data_dir: Path, only: list[str]) -> None:
    for name in only:
        command = [sys.executable, "-c", "from paceline.cli.main import main; main()", "twin"]
        command += [*COMMON, *SETS[name], "--data-dir", str(data_dir), "--out", str(work / name)]
        # A run that diverges is one of the results: the exit status says so.
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def read(work: Path, name: str) -> list[dict[str, Any]]:
    text = (work / name / "comparison.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["strategies"]
    return rows


def show(work: Path) -> None:
    slow = {r["strategy"]: r for r in read(work, "slow")}
    slow_all = slow["allreduce"]["seconds"]["mean"]
    print("| strategy | test accuracy | each seed | virtual s | saved | saved, one 3x slower |")
    print("|---|---:|---|---:|---:|---:|")
    equal = read(work, "equal")
    whole = equal[0]["seconds"]["mean"]
    for row in equal:
        spread, seconds = row["test_acc"], row["seconds"]["mean"]
        other = slow[row["strategy"]]["seconds"]["mean"]
        whole_set = all(run["status"] == "done" for run in row["runs"])
        mean = f"{100 * spread['mean']:.2f} ± {100 * spread['std']:.2f} %" if whole_set else ""
        print(
            f"| `{row['strategy']}` | {mean} | {each_seed(row)} "
            f"| {seconds:,.0f} | {100 * (1 - seconds / whole):.0f} % "
            f"| {100 * (1 - other / slow_all):.0f} % |"
        )
    print(f"\nAt learning rate {HIGH_LR}:\n\n| strategy | test accuracy of each seed |\n|---|---|")
    for row in read(work, "high"):
        print(f"| `{row['strategy']}` | {each_seed(row)} |")


def each_seed(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{100 * run['test_acc']:.2f}" if run["test_acc"] is not None else run["status"]
        for run in row["runs"]
    )


def draw(work: Path, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "paceline"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    equal = read(work, "equal")
    names = {"allreduce": "all-reduce", "ps": "ps"}
    names.update({s: f"switch {s.split('=')[1].rstrip(')')}" for s in SWITCHES})
    for row in equal:
        accuracy, seconds = row["test_acc"], row["seconds"]
        if any(run["status"] != "done" for run in row["runs"]):
            continue  # The table says it.
        left.errorbar(
            seconds["mean"],
            100 * accuracy["mean"],
            yerr=100 * accuracy["std"],
            xerr=seconds["std"],
            marker="o",
            capsize=3,
        )
        left.annotate(
            names[row["strategy"]],
            (seconds["mean"], 100 * accuracy["mean"]),
            xytext=(6, -12) if row["strategy"] == "allreduce" else (6, 6),
            textcoords="offset points",
            fontsize=9,
        )
    left.set(xlabel="virtual seconds", ylabel="test accuracy, % (mean ± std of 3 seeds)")
    left.margins(x=0.25)
    slow = {r["strategy"]: r["seconds"]["mean"] for r in read(work, "slow")}
    shown = ["ps", *SWITCHES]
    whole = equal[0]["seconds"]["mean"]
    seconds_of = {r["strategy"]: r["seconds"]["mean"] for r in equal}
    for offset, title, saved in (
        (-0.2, "equal machines", [1 - seconds_of[s] / whole for s in shown]),
        (0.2, "one 3x slower", [1 - slow[s] / slow["allreduce"] for s in shown]),
    ):
        places = [i + offset for i in range(len(shown))]
        right.bar(places, [100 * s for s in saved], width=0.38, label=title)
    right.set_xticks(range(len(shown)), [names[s] for s in shown], fontsize=9)
    right.set(ylabel="virtual time saved against all-reduce, %")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--only", default=",".join(SETS))
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs/images/shape.svg"))
    given = parser.parse_args()
    if not given.draw_only:
        play(given.work, given.data_dir, given.only.split(","))
    show(given.work)
    draw(given.work, given.out)


if __name__ == "__main__":
    main()

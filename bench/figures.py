"""Draws measured rates: bars with minimum and maximum, one panel per network.

python bench/figures.py RESULTS.json [PICTURE.svg]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {
    "ddp": "PyTorch DDP",
    "ddp-cl": "PyTorch DDP, channels last",
    "apart": "processes apart",
    "compute": "forward and backward alone",
    "allreduce": "Paceline allreduce",
    "allreduce-cl": "Paceline allreduce, channels last",
    "ps": "Paceline ps",
    "ps-cl": "Paceline ps, channels last",
    "torchft": "torchft",
    "tf-ring": "TensorFlow, ring",
    "tf-ps": "TensorFlow, parameter server",
}
OURS, THEIRS, BOUND = "#1b6ca8", "#9aa5b1", "#d8dee6"


def draw(results: Path, target: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    body: dict[str, Any] = json.loads(results.read_text())
    rows = body["rows"]
    longest = max(len(row["samples_per_s"]) for row in rows)
    figure = Figure(figsize=(4.6 * len(rows), 0.9 + 0.42 * longest), layout="constrained")
    for panel, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        rates = sorted(row["samples_per_s"].items(), key=lambda item: item[1]["median"])
        for place, (side, rate) in enumerate(rates):
            colour = OURS if side.split("-")[0] in ("allreduce", "ps") else THEIRS
            colour = BOUND if side in ("apart", "compute") else colour
            middle = rate["median"]
            panel.barh(
                place,
                middle,
                color=colour,
                xerr=[[middle - rate["min"]], [rate["max"] - middle]],
                ecolor="#333333",
                capsize=3,
            )
        panel.set_yticks(range(len(rates)), [NAMES.get(side, side) for side, _ in rates])
        panel.set_title(f"{row['workload']}, {row['batch_per_worker']} per worker", fontsize=10)
        panel.set_xlabel("samples per second")
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    draw(given[0], given[1] if len(given) > 1 else given[0].with_suffix(".svg"))

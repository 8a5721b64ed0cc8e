"""Fits the published five-machine cluster to two rows of its tables and predicts the others.

    python bench/published_clusters.py            print the table
    python bench/published_clusters.py --write    and write the cluster files

The numbers are those of a published study of TensorFlow's MultiWorkerMirrored and ParameterServer
strategies and of a switch between them, on five CPU machines.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from paceline.plan.cost_model import Workload
from paceline.twin.fit_published import fit_pool, published_cluster, simulated_seconds

CLUSTERS = Path(__file__).parents[1] / "src" / "paceline" / "cluster" / "examples"
EPOCHS = 8
"""Played; the published runs are as many times longer as they have more epochs."""

ROWS = {
    "allreduce": "allreduce",
    "ps": "ps",
    "switch 25%": "switch(allreduce, ps, at=25%)",
    "switch 50%": "switch(allreduce, ps, at=50%)",
    "switch 75%": "switch(allreduce, ps, at=75%)",
}


@dataclasses.dataclass(frozen=True)
class Published:
    file: str
    title: str
    samples: int
    parameters: int
    epochs: int
    seconds: dict[str, int]


STUDIES = (
    Published(
        "published-five",
        "ResNet, CIFAR-10",
        50_000,
        850_000,
        180,
        dict(zip(ROWS, (27505, 23784, 24164, 25025, 26341), strict=True)),
    ),
    Published(
        "published-five-densenet",
        "DenseNet, Fashion-MNIST",
        60_000,
        176_000,
        40,
        dict(zip(ROWS, (7170, 5608, 6133, 6268, 6783), strict=True)),
    ),
)


def main() -> None:
    print("| workload | strategy | published s | twin s | difference | |")
    print("|---|---|---:|---:|---:|---|")
    for study in STUDIES:
        work = Workload(
            model="published",
            data="published",
            shapes=((study.parameters,),),
            item_bytes=4,
            flops_per_sample=1.0,
            samples=study.samples,
            batch=128,
            epochs=EPOCHS,
            evaluated={},
            slots=1,
        )
        share = EPOCHS / study.epochs
        pool = fit_pool(
            published_cluster(study.file, study.parameters * 4 / 1e6),
            work,
            allreduce_s=study.seconds["allreduce"] * share,
            servers_s=study.seconds["ps"] * share,
        )
        for row, strategy in ROWS.items():
            played = simulated_seconds(pool, work, strategy) / share
            known = study.seconds[row]
            role = "fitted" if row in ("allreduce", "ps") else "predicted"
            print(
                f"| {study.title} | {row} | {known:,} | {played:,.0f} "
                f"| {100 * (played / known - 1):+.1f}% | {role} |"
            )
        if "--write" in sys.argv[1:]:
            note = f"Fitted to a published {study.title} run of {study.epochs} epochs"
            text = pool.model_copy(update={"note": note}).to_yaml()
            (CLUSTERS / f"{study.file}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

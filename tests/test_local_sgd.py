"""Local steps: equal replicas, stable outer steps, progress per sample."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import StateError
from paceline.state import Section
from paceline.strategies.diloco.spec import DiLoCo
from paceline.strategies.local_sgd.worker import check_replicas_equal

WAIT_S = 60.0


def _start(rank: int, store: str, value: float, told: Any) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),  # type: ignore[attr-defined]
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=WAIT_S),
    )
    try:
        check_replicas_equal(
            Section({"weights/w": torch.tensor([value, 2.0])}), CollectiveGroup(rank, 2)
        )
        told.put((rank, "equal"))
    except StateError as error:
        told.put((rank, str(error)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("values", "ending"), [((1.0, 1.0), "equal"), ((1.0, 1.5), "differ")])
def test_local_steps_need_equal_replicas(
    values: tuple[float, float], ending: str, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    children = [
        context.Process(target=_start, args=(rank, str(tmp_path / "store"), value, told))
        for rank, value in enumerate(values)
    ]
    for child in children:
        child.start()
    answers = dict(told.get(timeout=WAIT_S) for _ in children)
    for child in children:
        child.join(WAIT_S)
        assert child.exitcode == 0
    if ending == "equal":
        assert answers == {0: "equal", 1: "equal"}
    else:
        assert all("start from different weights" in text for text in answers.values())
        assert len(answers) == 2


def outer_stability(h: int, inner: float, outer_lr: float, outer: float) -> float:
    """Largest stable learning rate of diloco on a quadratic, relative to synchronous training.

    The state is the weight, the momentum of the optimizer, and that of the outer step.
    """
    limit = 2 * (1 + inner)
    for rate in np.geomspace(1e-4, 1, 100) * limit:
        steps = np.linalg.matrix_power(np.array([[1 - rate, -inner], [rate, inner]]), h)
        moved = np.array([1 - steps[0, 0], -steps[0, 1], 0])
        velocity = moved + np.array([0, 0, outer])
        weight = np.array([1, 0, 0]) - outer_lr * (moved + outer * velocity)
        matrix = np.stack([weight, [steps[1, 0], steps[1, 1], 0], velocity])
        if np.abs(np.linalg.eigvals(matrix)).max() > 1 + 1e-9:
            return float(rate / limit)
    return 1.0


@pytest.mark.parametrize("inner", [0.0, 0.5, 0.9, 0.95])
def test_outer_steps_are_stable_up_to_half_the_rate_of_synchronous_training(inner: float) -> None:
    """However few local steps a round has, for example at the end of a short epoch."""
    spec = DiLoCo()
    for h in (1, 2, 3, 4, 5, 8, 10, 20, 50):
        outer = spec.outer_momentum_after(h, inner)
        assert outer_stability(h, inner, spec.outer_lr, outer) > 0.5
    assert spec.outer_momentum_after(50, inner) == pytest.approx(0.9)


def test_an_outer_momentum_that_remembers_as_long_as_the_inner_one_is_unstable() -> None:
    assert outer_stability(4, 0.9, 0.7, 0.9) < 0.005
    assert DiLoCo(outer_momentum=0.9).outer_momentum_after(4, 0.9) == 0.9

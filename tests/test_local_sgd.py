"""Local steps: replicas that start from different weights are an error on every worker."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.comm.process_group import CollectiveGroup
from paceline.errors import StateError
from paceline.state import Section
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

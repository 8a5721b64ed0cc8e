"""A first look at data by URL: its files, its own description, its first file; without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from paceline.data.blocks import BlockSource
from paceline.data.formats import guess_format, open_source
from paceline.data.pipeline import DataPipeline
from paceline.data.stores import StoredFile, join_url, list_files, parent_url, read_if_exists
from paceline.errors import DataError

FACTS = "dataset.json"
"""Beside the files of a set that `paceline data convert` wrote: what files alone do not tell."""
PARTS = ("train", "val", "test")


def read_metadata(url: str) -> dict[str, Any]:
    """What the set's own description says; nothing where there is none."""
    content = read_if_exists(join_url(parent_url(url), FACTS))
    if content is None:
        return {}
    try:
        facts = json.loads(content)
    except ValueError as error:
        raise DataError(f"{join_url(parent_url(url), FACTS)}: is not JSON ({error})") from None
    return facts if isinstance(facts, dict) else {}


def apply_metadata(pipeline: DataPipeline, facts: dict[str, Any]) -> DataPipeline:
    """What the user did not say, as the set's description says it."""
    wanted = pipeline.wanted
    if not wanted.features and facts.get("features"):
        wanted = replace(wanted, features=tuple(facts["features"]))
    if wanted.label is None and facts.get("label"):
        wanted = replace(wanted, label=str(facts["label"]))
    if wanted.shape is None and facts.get("shape"):
        wanted = replace(wanted, shape=tuple(facts["shape"]))
    scale = pipeline.scale
    if scale is None and facts.get("scale"):
        full, mean, std = facts["scale"]
        scale = (float(full), tuple(mean), tuple(std))
    return replace(
        pipeline,
        wanted=wanted,
        scale=scale,
        format=pipeline.format or facts.get("format"),
        classes=pipeline.classes or facts.get("classes"),
    )


def list_data_files(pipeline: DataPipeline) -> tuple[StoredFile, ...]:
    """All data files that a pipeline reads, its own description apart."""
    return tuple(file for url in pipeline.urls for file in list_files(url) if file.name != FACTS)


def list_splits(pipeline: DataPipeline) -> tuple[DataPipeline, dict[str, tuple[StoredFile, ...]]]:
    """The files of training, validation and test, where the set's description divides them."""
    files = list_data_files(pipeline)
    facts = read_metadata(pipeline.urls[0])
    pipeline = apply_metadata(pipeline, facts)
    if facts.get("parts"):
        divided = {part: tuple(f for f in files if f.name.startswith(f"{part}-")) for part in PARTS}
        if divided["train"]:
            return pipeline, {part: found for part, found in divided.items() if found}
    return pipeline, {"train": files}


def open_source_for(pipeline: DataPipeline, files: tuple[StoredFile, ...]) -> BlockSource:
    form = pipeline.format or guess_format(pipeline.urls[0], files)
    return open_source(form, files, pipeline.wanted)


def check_source(pipeline: DataPipeline) -> None:
    """Look at the first file, so that a run is refused before a process is started."""
    pipeline, parts = list_splits(pipeline)
    form = pipeline.format or guess_format(pipeline.urls[0], parts["train"])
    open_source(form, parts["train"][:1], pipeline.wanted)

"""Inspects data at a URL without torch: its files, its description and its first file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from paceline.data.blocks import BlockSource, guess_format, open_source
from paceline.data.pipeline import DataPipeline
from paceline.data.stores import StoredFile, join_url, list_files, parent_url, read_if_exists
from paceline.errors import DataError

FACTS = "dataset.json"
"""Description that `paceline data convert` writes next to the files of a dataset."""
PARTS = ("train", "val", "test")


def read_metadata(url: str) -> dict[str, Any]:
    """Returns the dataset's description; empty if there is none."""
    location = join_url(parent_url(url), FACTS)
    content = read_if_exists(location)
    try:
        facts = {} if content is None else json.loads(content)
    except ValueError as error:
        raise DataError(f"{location}: is not JSON ({error})") from None
    return facts if isinstance(facts, dict) else {}


def apply_metadata(pipeline: DataPipeline, facts: dict[str, Any]) -> DataPipeline:
    """Fills settings that the user did not give from the dataset's description."""
    given, scale = pipeline.selection, pipeline.scale
    selection = replace(
        given,
        features=given.features or tuple(facts.get("features") or ()),
        label=facts.get("label") if given.label is None else given.label,
        shape=given.shape or tuple(facts.get("shape") or ()) or None,
    )
    if scale is None and facts.get("scale"):
        full, mean, std = facts["scale"]
        scale = (float(full), tuple(mean), tuple(std))
    return replace(
        pipeline,
        selection=selection,
        scale=scale,
        format=pipeline.format or facts.get("format"),
        classes=pipeline.classes or facts.get("classes"),
    )


def list_data_files(pipeline: DataPipeline) -> tuple[StoredFile, ...]:
    """Returns all data files that a pipeline reads, without the description."""
    return tuple(file for url in pipeline.urls for file in list_files(url) if file.name != FACTS)


def list_splits(pipeline: DataPipeline) -> tuple[DataPipeline, dict[str, tuple[StoredFile, ...]]]:
    """Returns the files of each split, if the description defines splits."""
    files = list_data_files(pipeline)
    facts = read_metadata(pipeline.urls[0])
    pipeline = apply_metadata(pipeline, facts)
    if facts.get("parts"):
        divided = {part: tuple(f for f in files if f.name.startswith(f"{part}-")) for part in PARTS}
        if divided["train"]:
            return pipeline, {part: found for part, found in divided.items() if found}
    return pipeline, {"train": files}


def open_source_for(
    pipeline: DataPipeline, files: tuple[StoredFile, ...], limit: int | None = None
) -> BlockSource:
    """Opens the first `limit` files, or all."""
    form = pipeline.format or guess_format(pipeline.urls[0], files)
    return open_source(form, files[:limit], pipeline.selection)


def check_source(pipeline: DataPipeline) -> None:
    """Checks the first file, so that a run fails before a process is started."""
    pipeline, parts = list_splits(pipeline)
    open_source_for(pipeline, parts["train"], limit=1)

"""Directories written by TensorFlow Datasets, described as `dataset.json` describes ours.

Files are named `mnist-train.tfrecord-00000-of-00001`. Next to them, `dataset_info.json` names the
dataset, its splits and its supervised keys, and `features.json` the types of its features. Both are
JSON forms of protocol buffers, in which 64-bit numbers are strings:
https://github.com/tensorflow/datasets/tree/master/tensorflow_datasets/core/proto
"""

import json
import re
from typing import Any

from paceline.data.catalog import PIXELS, normalize_name
from paceline.data.stores import Files, join_url, parent_url, read_if_exists
from paceline.errors import DataError, UsageError

INFO, FEATURES = "dataset_info.json", "features.json"
SHARD = re.compile(r"(?:.+-)?(?P<split>[^-.]+)\.\w+-\d{5}-of-\d{5}")


def find_description(url: str, files: Files) -> tuple[dict[str, Any], Files] | None:
    """Returns the description and the data files of a dataset; None if it is not of this kind.

    Raises UsageError for several datasets or a file format other than TFRecord, and DataError for a
    missing file.
    """
    shards = tuple(file for file in files if SHARD.fullmatch(file.name))
    folders = sorted({parent_url(file.url) for file in shards})
    if not folders:
        return None
    if len(folders) > 1:
        known = ", ".join(folder.removeprefix(f"{url.rstrip('/')}/") for folder in folders)
        raise UsageError(f"{url}: several datasets or versions ({known}); choose one directory")
    info, features = (_read(join_url(folders[0], name)) for name in (INFO, FEATURES))
    form = info.get("fileFormat") or "tfrecord"
    if form != "tfrecord":
        raise UsageError(
            f"{folders[0]}: written as {form}, which is not supported; write it again with "
            "file_format='tfrecord'"
        )
    _check_complete(folders[0], shards)
    return _describe(info, features), shards


def split_of(name: str) -> str | None:
    """Returns the split in the name of a file, such as `train` or `validation`."""
    found = SHARD.fullmatch(name)
    return found["split"] if found else None


def _read(url: str) -> dict[str, Any]:
    content = read_if_exists(url)
    try:
        found = {} if content is None else json.loads(content)
    except ValueError as error:
        raise DataError(f"{url}: is not JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def _check_complete(folder: str, files: Files) -> None:
    names = {file.name for file in files}
    for name in sorted(names):
        head, _, count = name.rpartition("-of-")
        for number in range(int(count)):
            expected = f"{head[:-5]}{number:05}-of-{count}"
            if expected not in names:
                raise DataError(f"{folder}: {expected} is missing; copy the complete dataset")


def _describe(info: dict[str, Any], features: dict[str, Any]) -> dict[str, Any]:
    """Returns what the two files state; nothing for an unknown structure."""
    facts: dict[str, Any] = {"format": "tfrecord", "name": info.get("name")}
    keys = [item.get("featureKey") for item in _get(info, "supervisedKeys", "tuple", "items") or ()]
    if len(keys) == 2 and all(keys):
        facts |= {"features": keys[:1], "label": keys[1]}
    types = _get(features, "featuresDict", "features") or {}
    facts["images"] = [name for name, kind in types.items() if "image" in kind]
    label = _get(types, facts.get("label") or "label", "classLabel", "numClasses")
    facts["classes"] = int(label) if label else None
    if len(keys) == 2 and keys[0] in facts["images"]:
        sizes = [int(n) for n in _get(types, keys[0], "image", "shape", "dimensions") or ()]
        if len(sizes) == 3 and min(sizes) > 0:
            facts["shape"] = [sizes[2], *sizes[:2]]
    known = {normalize_name(name): scale for name, scale in PIXELS.items()}
    facts["scale"] = known.get(normalize_name(info.get("name") or ""))
    return facts


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value

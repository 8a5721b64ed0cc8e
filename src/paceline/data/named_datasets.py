"""Locates and loads the built-in datasets.

By default, validation rows are a fixed tenth of the published training rows
(`hashing.split_holdout`): 6,000 of 60,000 for the MNIST family, 5,000 of 50,000 for CIFAR-10, 3,256
of 32,561 for Adult. They are the same for every seed, so that results of different seeds are
comparable. Digits, which has no published test set, is split 1297 / 200 / 300 in the same way.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.data import adult, catalog, cifar, digits, hashing, idx, text
from paceline.data.blocks import Array, Rows
from paceline.data.catalog import PIXELS, DatasetFiles, find_dataset_files
from paceline.data.dataset import DatasetSplits, FeatureOptions, Validation, scale_pixels
from paceline.errors import DataError, UsageError

IMAGE_CLASSES = 10
PLAIN_FILES = {"adult": ("adult.data", "adult.test"), "tinyshakespeare": ("input.txt",)}
"""Files of datasets that are published in one form only."""

Indices = npt.NDArray[np.int64]
Part = tuple[Array, Array, Indices | None]
"""Features, labels, and the rows to use; all by default."""


def locate(name: str, data_dir: Path | None = None) -> tuple[Path, ...]:
    """Checks quickly, without torch, that a dataset can be read; returns its files.

    Checks existence, size and first bytes only, so that a run fails before a process is started;
    `load` finds what only a full read shows (checksums, truncated gzip streams). Returns no file
    for `digits`, which is part of the package. Raises UsageError for an unknown name and DataError
    for a file that is missing or does not match its name.
    """
    name = catalog.check_name(name)
    if name == "digits":
        digits.locate()
        return ()
    return describe_files(name, find_dataset_files(name, data_dir))[0]


def describe_files(name: str, files: DatasetFiles) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Returns the files of a dataset that is not part of the package, and notes on them."""
    if name == "cifar10":
        return cifar.locate(files), ()
    if name in PLAIN_FILES:
        return tuple(files.require(file) for file in PLAIN_FILES[name]), ()
    parts = idx.locate(files)
    paths = tuple(path for part in parts for path in (part.images, part.labels))
    return paths, tuple(note for part in parts for note in part.notes)


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    dtype: str = "float32",
    augment: bool = False,
    seed: int = 0,
    scaling: str | None = None,
    validation: Validation | None = None,
) -> DatasetSplits:
    """Loads a dataset and splits it into training, validation and test data.

    The split is the same for every `seed`, which only affects the augmentation of training images.
    `dtype` applies to features ("float32" or "float64"); labels and the characters of a text are
    int64. `scaling` of pixels is "standard" (the default), "unit" or "none". Raises UsageError for
    an unknown name or dtype, or if `augment` or `scaling` is set for a dataset without images, and
    DataError if a file is missing, damaged or empty.
    """
    from paceline.data import in_memory

    name = catalog.check_name(name)
    kind = catalog.kind(name)
    in_memory.check_dtype(dtype)
    for option, value in (("augment", augment), ("scaling", scaling)):
        if value and kind != "image":
            raise UsageError(f"{option}: {name} is not an image dataset")
    files = find_dataset_files(name, data_dir)
    uses_test = validation is not None and validation.uses_test
    if name == "tinyshakespeare":
        if validation is not None and validation.held_out:
            raise UsageError(f"validation: {name} is divided in order; use none or test")
        texts, classes = text.read(files, *map(files.require, PLAIN_FILES[name]))
        first, middle, last = (in_memory.TextWindowDataset(part, text.WINDOW) for part in texts)
        val_text = middle if validation is None else last if uses_test else None
        return DatasetSplits(name, (text.WINDOW,), classes, kind, first, val_text, last)
    parts, notes = _read_parts(name, files, validation)
    shape = parts[0][0].shape[1:]
    options = FeatureOptions(dtype=dtype, augment=augment, seed=seed)
    pixels = None
    if name in PIXELS:
        pixels = in_memory.PixelScaling(*scale_pixels(name, PIXELS[name], scaling))
    train, held, test = (
        in_memory.ArrayDataset(
            features,
            labels,
            dtype=dtype,
            rows=rows,
            scaling=pixels,
            augmentation=None if number else in_memory.choose_augmentation(shape, options),
            seed=seed,
        )
        if rows is None or len(rows)
        else None
        for number, (features, labels, rows) in enumerate(parts)
    )
    assert train is not None
    val = test if uses_test else held
    classes = len(adult.LABELS) if name == "adult" else IMAGE_CLASSES
    return DatasetSplits(name, shape, classes, kind, train, val, test, notes)


def _read_parts(
    name: str, files: DatasetFiles, validation: Validation | None
) -> tuple[list[Part], tuple[str, ...]]:
    """Returns the training, validation and test rows, and notes."""
    if name == "digits":
        images, labels = digits.read()
        held_out = digits.VALIDATION
        if validation is not None:
            held_out = validation.count(len(images) - digits.TEST)
        split = hashing.split_holdout(len(images), held_out, digits.TEST)
        return [(images, labels, rows) for rows in split], ()
    train: Rows
    test: Rows
    notes: tuple[str, ...] = ()
    if name == "adult":
        paths = [files.require(file) for file in PLAIN_FILES[name]]
        rows, tests = (adult.read(files, path) for path in paths)
        encoder = adult.AdultEncoder(rows, _hold_out(name, len(rows.labels), validation)[0])
        train, test = ((encoder.encode(part), part.labels) for part in (rows, tests))
    elif name == "cifar10":
        arrays = cifar.read(files, cifar.locate(files))
        train, test = (
            (arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in ("train", "test")
        )
    else:
        parts = idx.locate(files)
        notes = tuple(note for part in parts for note in part.notes)
        train, test = (idx.read(files, part) for part in parts)
    kept, held = _hold_out(name, len(train[1]), validation)
    return [(*train, kept), (*train, held), (*test, None)], notes


def _hold_out(name: str, count: int, validation: Validation | None) -> tuple[Indices, Indices]:
    if validation is None and count < 10:
        raise DataError(
            f"{name}: {count} training rows, expected at least 10 "
            "(a tenth is held out for validation)"
        )
    train, val = hashing.split_holdout(count, (validation or Validation()).count(count))
    return train, val

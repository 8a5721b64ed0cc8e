"""Locates and loads the built-in datasets.

Validation rows are a fixed tenth of the published training rows (`hashing.split_holdout`): 6,000 of
60,000 for the MNIST family, 5,000 of 50,000 for CIFAR-10, 3,256 of 32,561 for Adult. They are the
same for every seed, so that results of different seeds are comparable. Digits, which has no
published test set, is split 1297 / 200 / 300 in the same way.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data import adult, augmentation, catalog, char_text, cifar, digits, hashing, idx
from paceline.data.dataset import DatasetSplits
from paceline.data.dataset_files import DatasetFiles, find_dataset_files
from paceline.errors import DataError, UsageError

if TYPE_CHECKING:
    from paceline.data.in_memory import ArrayDataset

# Mean and standard deviation of the training pixels per channel, as commonly published. Digits has
# no published values: its pixels are only scaled to 0..1.
PIXELS: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "digits": (16.0, (0.0,), (1.0,)),
    "mnist": (255.0, (0.1307,), (0.3081,)),
    "fashion-mnist": (255.0, (0.2860,), (0.3530,)),
    "kmnist": (255.0, (0.1918,), (0.3483,)),
    "cifar10": (255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}

Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]


def locate(name: str, data_dir: Path | None) -> tuple[Path, ...]:
    """Returns the files of a dataset after quick checks. Raises DataError."""
    if name == "digits":
        digits.locate()
        return ()
    files = find_dataset_files(name, data_dir)
    if name == "cifar10":
        return cifar.locate(files)
    if name == "adult":
        return adult.locate(files)
    if name == "tinyshakespeare":
        return (char_text.locate(files),)
    return tuple(path for part in idx.locate(files) for path in (part.images, part.labels))


def load(
    name: str, data_dir: Path | None, *, dtype: str, augment: bool, seed: int
) -> DatasetSplits:
    """Loads a dataset by its canonical name. Raises like `paceline.data.load`."""
    from paceline.data.in_memory import check_dtype

    check_dtype(dtype)
    if augment and catalog.kind(name) != "image":
        raise UsageError(f"augment: {name} is not an image dataset")
    if name == "digits":
        return _load_digits(dtype, augment, seed)
    files = find_dataset_files(name, data_dir)
    if name == "cifar10":
        return _load_cifar(files, dtype, augment, seed)
    if name == "adult":
        return _load_adult(files, dtype)
    if name == "tinyshakespeare":
        return _load_text(files)
    return _load_idx(files, dtype, augment, seed)


def _load_digits(dtype: str, augment: bool, seed: int) -> DatasetSplits:
    pair = digits.read()
    split = hashing.split_holdout(len(pair[0]), digits.VALIDATION, digits.TEST)
    train, val, test = (
        _image_table("digits", pair, rows, dtype=dtype, augment=augment and not part, seed=seed)
        for part, rows in enumerate(split)
    )
    return DatasetSplits("digits", (1, 8, 8), digits.CLASSES, "image", train, val, test)


def _load_idx(files: DatasetFiles, dtype: str, augment: bool, seed: int) -> DatasetSplits:
    parts = idx.locate(files)
    notes = tuple(note for part in parts for note in part.notes)
    train, test = (idx.read(files, part) for part in parts)
    return _split_images(files, train, test, idx.CLASSES, dtype, augment, seed, notes)


def _load_cifar(files: DatasetFiles, dtype: str, augment: bool, seed: int) -> DatasetSplits:
    arrays = cifar.read(files, cifar.locate(files))
    train = arrays["train_images"], arrays["train_labels"]
    test = arrays["test_images"], arrays["test_labels"]
    return _split_images(files, train, test, cifar.CLASSES, dtype, augment, seed, ())


def _load_adult(files: DatasetFiles, dtype: str) -> DatasetSplits:
    from paceline.data.in_memory import ArrayDataset

    paths = adult.locate(files)
    rows, tests = (adult.read(files, path) for path in paths)
    train, val = _hold_out_tenth(files, len(rows.labels))
    encoder = adult.fit_encoder(rows, train)
    features = encoder.encode(rows)
    return DatasetSplits(
        "adult",
        (encoder.width,),
        adult.CLASSES,
        "table",
        ArrayDataset(features[train], rows.labels[train], dtype=dtype),
        ArrayDataset(features[val], rows.labels[val], dtype=dtype),
        ArrayDataset(encoder.encode(tests), tests.labels, dtype=dtype),
    )


def _load_text(files: DatasetFiles) -> DatasetSplits:
    from paceline.data.in_memory import TextWindowDataset

    parts, classes = char_text.read(files, char_text.locate(files))
    train, val, test = (TextWindowDataset(part, char_text.WINDOW) for part in parts)
    return DatasetSplits("tinyshakespeare", (char_text.WINDOW,), classes, "text", train, val, test)


def _split_images(
    files: DatasetFiles,
    train: Pair,
    test: Pair,
    classes: int,
    dtype: str,
    augment: bool,
    seed: int,
    notes: tuple[str, ...],
) -> DatasetSplits:
    name = files.entry.name
    kept, held = _hold_out_tenth(files, len(train[0]))
    return DatasetSplits(
        name,
        train[0].shape[1:],
        classes,
        "image",
        _image_table(name, train, kept, dtype=dtype, augment=augment, seed=seed),
        _image_table(name, train, held, dtype=dtype),
        _image_table(name, test, None, dtype=dtype),
        notes,
    )


def _image_table(
    name: str,
    pair: Pair,
    rows: npt.NDArray[np.int64] | None,
    *,
    dtype: str,
    augment: bool = False,
    seed: int = 0,
) -> ArrayDataset:
    from paceline.data.in_memory import ArrayDataset, PixelScaling

    images, labels = pair
    return ArrayDataset(
        images,
        labels,
        dtype=dtype,
        rows=rows,
        scaling=PixelScaling(*PIXELS[name]),
        augmentation=_augmentation(images.shape[1]) if augment else None,
        seed=seed,
    )


def _augmentation(channels: int) -> augmentation.Augmentation:
    return augmentation.COLOR if channels == 3 else augmentation.GRAY


def _hold_out_tenth(
    files: DatasetFiles, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if count < 10:
        raise DataError(
            f"{files.entry.name}: {count} training rows, expected at least 10 "
            "(a tenth is held out for validation)"
        )
    train, val = hashing.split_holdout(count, count // 10)
    return train, val

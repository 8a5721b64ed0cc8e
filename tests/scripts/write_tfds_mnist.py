"""Writes MNIST with the published builder of tensorflow_datasets: write_tfds_mnist.py SOURCE DIR.

SOURCE contains the published files, which the package verifies by its own checksums instead of
downloading them. Run with the Python of an environment that has tensorflow-datasets and TensorFlow.
"""

import sys

import tensorflow_datasets as tfds

SOURCE, TARGET = sys.argv[1:]

builder = tfds.builder("mnist", data_dir=TARGET)
settings = tfds.download.DownloadConfig(manual_dir=SOURCE)
builder.download_and_prepare(download_dir=f"{TARGET}/downloads", download_config=settings)
print(builder.data_dir)

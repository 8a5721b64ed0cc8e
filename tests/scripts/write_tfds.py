"""Writes a small dataset with the real tensorflow_datasets package: write_tfds.py SOURCE.npz DIR.

Run with the Python of an environment that has tensorflow-datasets and TensorFlow.
"""

import sys

import numpy as np
import tensorflow_datasets as tfds

SOURCE, TARGET = sys.argv[1:]


class Mnist(tfds.core.GeneratorBasedBuilder):
    """The features of the published builder, filled from arrays instead of a download."""

    VERSION = tfds.core.Version("3.0.1")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                    "id": tfds.features.Text(),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("train"), "test": self._generate_examples("test")}

    def _generate_examples(self, part):
        arrays = np.load(SOURCE)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield number, {"image": image, "label": int(label), "id": f"{part}-{number}"}


builder = Mnist(data_dir=TARGET)
builder.download_and_prepare()
print(builder.data_dir)

"""Writes the handwritten digits as the files that the other scripts read; requires TensorFlow.

python write_data.py DIGITS_NPZ DIR
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

TRAIN, SHARDS = 1400, 4


class Digits(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(8, 8, 1)),
                "label": tfds.features.ClassLabel(num_classes=10),
            }
        )
        keys = ("image", "label")
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=keys)

    def _split_generators(self, manager):
        parts = np.load(FOLDER / "digits.npz")
        return {part: self._generate_examples(parts, part) for part in ("train", "test")}

    def _generate_examples(self, parts, part):
        for i, (image, label) in enumerate(pairs(parts, part)):
            yield i, {"image": image[..., None], "label": int(label)}


def pairs(parts, part):
    return list(zip(parts[f"x_{part}"], parts[f"y_{part}"], strict=True))


def example(image, label):
    png = tf.io.encode_png(image[..., None]).numpy()
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(label)])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2])
    FOLDER.mkdir(parents=True, exist_ok=True)
    source = np.load(sys.argv[1])
    images, labels = source["images"], source["labels"]
    images = (images.reshape(-1, 8, 8) * (255 / 16)).astype("uint8")
    parts = {
        "x_train": images[:TRAIN],
        "y_train": labels[:TRAIN],
        "x_test": images[TRAIN:],
        "y_test": labels[TRAIN:],
    }
    np.savez(FOLDER / "digits.npz", **parts)
    for part in ("train", "test"):
        rows = pairs(parts, part)
        for shard in range(SHARDS):
            name = FOLDER / f"{part}-{shard:05d}-of-{SHARDS:05d}.tfrecord"
            with tf.io.TFRecordWriter(str(name)) as writer:
                for image, label in rows[shard::SHARDS]:
                    writer.write(example(image, label))
    tfds.disable_progress_bar()
    Digits(data_dir=FOLDER).download_and_prepare()

"""The networks of the published studies as Keras programs, in the sizes that tests can pay for.

python keras_models.py MODEL STRATEGY OUT     trains one as a job, two workers
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

from paceline.data import digits

CLASSES = 10


def cnn_small() -> Any:
    """conv32 - pool - dense64 - dense10."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def cnn_keras() -> Any:
    """Two convolutions, pooling and dropout, as in Keras's own MNIST example."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def resnet(blocks: int = 1) -> Any:
    """The CIFAR ResNet family (v1: three stages, shortcuts, BatchNorm, L2); depth 6 blocks + 2."""

    def unit(x: Any, filters: int, strides: int = 1, relu: bool = True) -> Any:
        l2 = keras.regularizers.L2(1e-4)
        x = layers.Conv2D(filters, 3, strides, padding="same", kernel_regularizer=l2)(x)
        x = layers.BatchNormalization()(x)
        return layers.Activation("relu")(x) if relu else x

    inputs = keras.Input((8, 8, 1))
    x = unit(inputs, 16)
    for stage in range(3):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            y = unit(unit(x, 16 << stage, strides), 16 << stage, relu=False)
            if strides > 1:
                x = layers.Conv2D(16 << stage, 1, strides, padding="same")(x)
            x = layers.Activation("relu")(layers.add([x, y]))
    x = layers.Flatten()(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def densenet(depth: int = 2, growth: int = 12) -> Any:
    """DenseNet-BC: bottlenecks, concatenation, compression, dropout."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(2 * growth, 3, padding="same")(inputs)
    for block in range(3):
        for _ in range(depth):
            y = layers.Activation("relu")(layers.BatchNormalization()(x))
            y = layers.Conv2D(4 * growth, 1)(y)
            y = layers.Activation("relu")(layers.BatchNormalization()(y))
            y = layers.Dropout(0.1)(layers.Conv2D(growth, 3, padding="same")(y))
            x = layers.Concatenate()([x, y])
        if block < 2:
            x = layers.Conv2D(x.shape[-1] // 2, 1)(layers.BatchNormalization()(x))
            x = layers.AveragePooling2D(2)(x)
    x = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


MODELS: dict[str, Callable[[], Any]] = {
    "cnn_small": cnn_small,
    "cnn_keras": cnn_keras,
    "resnet": resnet,
    "densenet": densenet,
}


def main(name: str, strategy: str, out: str) -> None:
    import paceline
    import paceline.keras

    keras.utils.set_random_seed(0)
    images, labels = digits.read()
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    model = MODELS[name]()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    job = paceline.keras.job(
        model,
        images[:600],
        labels[:600],
        batch_size=50,
        epochs=3,
        validation_data=(images[600:800], labels[600:800]),
    )
    workers = 1 if strategy == "single" else 2
    result = paceline.train(job, strategy, workers, out=out)
    trained = paceline.keras.load(out)
    predicted = trained.predict(images[600:800], verbose=0).argmax(1)
    right = float(np.mean(predicted == labels[600:800]))
    print(result["status"], result["samples"], result["val_acc"], right)


if __name__ == "__main__":
    main(*sys.argv[1:])

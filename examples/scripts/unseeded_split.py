"""A split and shuffles without seeds: NumPy's, Python's and TensorFlow's, from the start."""

import os
import random
import sys

import numpy as np

data = np.load(os.path.join(sys.argv[1], "digits.npz"))
images = np.concatenate([data["x_train"], data["x_test"]])[..., np.newaxis] / np.float32(255)
labels = np.concatenate([data["y_train"], data["y_test"]]).astype("int64")
order = np.random.default_rng().permutation(len(images))
rows = list(order[:1400])
random.shuffle(rows)
np.random.shuffle(rows)

import tensorflow as tf  # noqa: E402

train = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows]))
train = train.shuffle(2000).batch(64)
test = tf.data.Dataset.from_tensor_slices((images[order[1400:]], labels[order[1400:]])).batch(64)

strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9),
        metrics=["accuracy"],
    )
model.fit(train, epochs=12, validation_data=test)
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

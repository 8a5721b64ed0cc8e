"""CentralStorageStrategy, with samples from a generator and a rate that depends on the loss."""

import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.experimental.CentralStorageStrategy()
tf.keras.utils.set_random_seed(int(sys.argv[2]))
data = np.load(os.path.join(sys.argv[1], "digits.npz"))
BATCH_SIZE = 64


def samples():
    for image, label in zip(data["x_train"], data["y_train"], strict=True):
        yield image[..., np.newaxis] / np.float32(255), label


train = tf.data.Dataset.from_generator(
    samples,
    output_signature=(
        tf.TensorSpec((8, 8, 1), tf.float32),
        tf.TensorSpec((), tf.int64),
    ),
)
train = train.cache().shuffle(2000).batch(BATCH_SIZE)
x_test = data["x_test"][..., np.newaxis].astype("float32") / 255

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(300, activation="relu"),
            tf.keras.layers.Dense(100, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(0.1),
        metrics=["accuracy"],
    )
model.fit(
    train,
    epochs=20,
    callbacks=[tf.keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=2)],
)
test = (x_test, data["y_test"].astype("int64"))
print("accuracy", round(float(model.evaluate(*test, batch_size=BATCH_SIZE, verbose=0)[1]), 4))

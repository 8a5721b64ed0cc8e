"""MirroredStrategy: arrays, a batch per replica, checkpoints and early stopping."""

import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(int(sys.argv[2]))
data = np.load(os.path.join(sys.argv[1], "digits.npz"))
x_train, x_test = (data[name][..., np.newaxis] / np.float32(255) for name in ("x_train", "x_test"))

strategy = tf.distribute.MirroredStrategy()
print("replicas", strategy.num_replicas_in_sync)
batch_size = 32 * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices((x_train, data["y_train"]))
train = train.shuffle(2000).batch(batch_size).prefetch(tf.data.AUTOTUNE)
test = tf.data.Dataset.from_tensor_slices((x_test, data["y_test"])).batch(batch_size)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dropout(0.25),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(0.003),
        metrics=["accuracy"],
    )

best = os.path.join(tempfile.gettempdir(), f"mirrored-{os.getppid()}.weights.h5")
model.fit(
    train,
    epochs=10,
    validation_data=test,
    callbacks=[
        tf.keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
        tf.keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
        tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.003 if epoch < 7 else 0.001),
    ],
)
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

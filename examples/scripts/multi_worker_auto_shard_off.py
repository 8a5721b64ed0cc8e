"""MultiWorkerMirroredStrategy with automatic sharding off and the batch scaled by hand.

TF_CONFIG comes from the environment.
"""

import json
import os
import sys

import tensorflow as tf
import tensorflow_datasets as tfds

tfds.disable_progress_bar()
strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
tf.keras.utils.set_random_seed(int(sys.argv[2]))
NUM_WORKERS = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
GLOBAL_BATCH_SIZE = 64 * NUM_WORKERS


def scale(image, label):
    return tf.cast(image, tf.float32) / 255, label


datasets = tfds.load("digits", data_dir=sys.argv[1], as_supervised=True)
train = datasets["train"].map(scale).cache().shuffle(10000).batch(GLOBAL_BATCH_SIZE)
test = datasets["test"].map(scale).batch(64)

with strategy.scope():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    train = train.with_options(options)
    test = test.with_options(options)
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
model.fit(x=train, epochs=30)
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

"""MultiWorkerMirroredStrategy with one input pipeline per worker, made by a function.

The batch size of the function is that of one replica.
"""

import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.keras.utils.set_random_seed(int(sys.argv[2]))
GLOBAL_BATCH_SIZE = 64
data = np.load(os.path.join(sys.argv[1], "digits.npz"))


def dataset_fn(context):
    batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    images = data["x_train"][..., np.newaxis].astype("float32") / 255
    dataset = tf.data.Dataset.from_tensor_slices((images, data["y_train"].astype("int64")))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(2000).repeat().batch(batch_size)


train = strategy.distribute_datasets_from_function(dataset_fn)
x_test = data["x_test"][..., np.newaxis].astype("float32") / 255
test = tf.data.Dataset.from_tensor_slices((x_test, data["y_test"].astype("int64"))).batch(64)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.RMSprop(0.002),
        metrics=["accuracy"],
    )
model.fit(train, epochs=12, steps_per_epoch=1400 // GLOBAL_BATCH_SIZE)
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

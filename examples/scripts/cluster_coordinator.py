"""ParameterServerStrategy with a ClusterCoordinator; a function makes the dataset of a worker."""

import os
import sys

import numpy as np
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
    ).join()

strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
coordinator = tf.distribute.experimental.coordinator.ClusterCoordinator(strategy)
tf.keras.utils.set_random_seed(int(sys.argv[2]))
GLOBAL_BATCH_SIZE = 64
data = np.load(os.path.join(sys.argv[1], "digits.npz"))
x_train, x_test = (data[n].reshape(-1, 64) / np.float32(255) for n in ("x_train", "x_test"))


def dataset_fn(context):
    batch_size = context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices((x_train, data["y_train"].astype("int64")))
    dataset = dataset.shuffle(2000).repeat()
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


with coordinator.strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, activation="relu", input_shape=(64,)),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(0.2),
        metrics=["accuracy"],
    )
model.fit(
    tf.keras.utils.experimental.DatasetCreator(dataset_fn), epochs=20, steps_per_epoch=1400 // 64
)
coordinator.join()

weights = model.get_weights()
hidden = np.maximum(x_test @ weights[0] + weights[1], 0)
predicted = (hidden @ weights[2] + weights[3]).argmax(1)
print("accuracy", round(float(np.mean(predicted == data["y_test"])), 4))

"""A TF_CONFIG written by hand, and MultiWorkerMirroredStrategy with sharding by data.

python manual_tf_config.py DIR SEED [TASK_INDEX [PORT]]
"""

import json
import os
import sys

index = int(sys.argv[3]) if len(sys.argv) > 3 else 0
port = int(sys.argv[4]) if len(sys.argv) > 4 else 12345
os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {"worker": [f"localhost:{port}", f"localhost:{port + 1}"]},
        "task": {"type": "worker", "index": index},
    }
)

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
)
tf.keras.utils.set_random_seed(int(sys.argv[2]))
batch_size = 32 * strategy.num_replicas_in_sync
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA


def dataset(part):
    data = np.load(os.path.join(sys.argv[1], "digits.npz"))
    images = data[f"x_{part}"][..., np.newaxis].astype("float32") / 255
    return tf.data.Dataset.from_tensor_slices((images, data[f"y_{part}"].astype("int64")))


train = dataset("train").shuffle(2000, seed=1).batch(batch_size).with_options(options)
test = dataset("test").batch(batch_size).with_options(options)

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

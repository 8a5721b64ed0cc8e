"""ParameterServerStrategy with a partitioner; TFRecord, shuffle, batch, repeat and steps.

The roles come from TF_CONFIG: one chief trains, workers and servers wait for it.
"""

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Keras 2: fit() of Keras 3 lacks this strategy.

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc",
        start=True,
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(
    resolver,
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=256 << 10, max_shards=2
    ),
)
tf.keras.utils.set_random_seed(int(sys.argv[2]))
BATCH_SIZE = 64
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def parse(record):
    example = tf.io.parse_single_example(record, FEATURES)
    image = tf.io.decode_png(example["image"], channels=1)
    return tf.reshape(tf.cast(image, tf.float32) / 255, (64,)), example["label"]


def records(part):
    files = sorted(tf.io.gfile.glob(os.path.join(sys.argv[1], f"{part}-*.tfrecord")))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return tf.data.TFRecordDataset(files).map(parse).with_options(options)


train = records("train").shuffle(2000).batch(BATCH_SIZE).repeat()

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(300, activation="relu", input_shape=(64,)),
            tf.keras.layers.Dense(100, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(0.1),
        metrics=["accuracy"],
    )
model.fit(train, epochs=20, steps_per_epoch=1400 // BATCH_SIZE)

# Evaluated without the strategy: in TensorFlow, a model of parameter servers predicts step by step.
plain = tf.keras.Sequential([tf.keras.layers.Dense(n, activation="relu") for n in (300, 100)])
plain.add(tf.keras.layers.Dense(10, activation="softmax"))
plain.build((None, 64))
plain.set_weights(model.get_weights())
plain.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
print("accuracy", round(float(plain.evaluate(records("test").batch(64), verbose=0)[1]), 4))

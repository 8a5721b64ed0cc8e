"""TFRecord files, interleaved, parsed and sharded by file; an endless dataset with steps."""

import os
import sys

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
tf.keras.utils.set_random_seed(int(sys.argv[2]))
BATCH_SIZE = 32 * strategy.num_replicas_in_sync
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}


def parse(record):
    example = tf.io.parse_single_example(record, FEATURES)
    image = tf.io.decode_png(example["image"], channels=1)
    return tf.reshape(tf.cast(image, tf.float32) / 255, (8, 8, 1)), example["label"]


def records(part):
    files = tf.data.Dataset.list_files(os.path.join(sys.argv[1], f"{part}-*.tfrecord"))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return (
        files.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .with_options(options)
    )


train = records("train").cache().shuffle(2000).repeat().batch(BATCH_SIZE).prefetch(2)
test = records("test").repeat().batch(BATCH_SIZE)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.Adam(0.003),
        metrics=["accuracy"],
    )
model.fit(
    train,
    epochs=12,
    steps_per_epoch=1400 // BATCH_SIZE,
    validation_data=test,
    validation_steps=397 // BATCH_SIZE,
)
print("accuracy", round(float(model.evaluate(test, steps=397 // BATCH_SIZE, verbose=0)[1]), 4))

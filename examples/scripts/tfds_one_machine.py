"""TensorFlow Datasets on one machine: (image, label) pairs, cache, shuffle, batch, fit."""

import sys

import tensorflow as tf
import tensorflow_datasets as tfds

tfds.disable_progress_bar()
tf.keras.utils.set_random_seed(int(sys.argv[2]))
BUFFER_SIZE, BATCH_SIZE = 10000, 64


def scale(image, label):
    return tf.cast(image, tf.float32) / 255, label


datasets, info = tfds.load("digits", data_dir=sys.argv[1], with_info=True, as_supervised=True)
train = datasets["train"].map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
test = datasets["test"].map(scale).batch(BATCH_SIZE)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(info.features["label"].num_classes, activation="softmax"),
        ]
    )
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
    return model


model = build_and_compile_cnn_model()
model.fit(x=train, epochs=16)
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

"""A residual network with flips, padding and random crops of tf.image, and a stepwise schedule."""

import os
import sys

import numpy as np
import tensorflow as tf

strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
tf.keras.utils.set_random_seed(int(sys.argv[2]))
layers, regularizer = tf.keras.layers, tf.keras.regularizers.L2(1e-4)
PAD = 1


def augment(image, label):
    # Symmetric digits only survive a flip, so that it applies to those.
    flipped = tf.image.random_flip_left_right(image)
    image = tf.where(tf.logical_or(tf.equal(label, 0), tf.equal(label, 8)), flipped, image)
    image = tf.image.pad_to_bounding_box(image, PAD, PAD, 8 + 2 * PAD, 8 + 2 * PAD)
    return tf.image.random_crop(image, (8, 8, 1)), label


def dataset(part):
    data = np.load(os.path.join(sys.argv[1], "digits.npz"))
    images = data[f"x_{part}"][..., np.newaxis].astype("float32") / 255
    return tf.data.Dataset.from_tensor_slices((images, data[f"y_{part}"].astype("int64")))


def unit(x, filters, strides=1):
    y = layers.Conv2D(filters, 3, strides, padding="same", kernel_regularizer=regularizer)(x)
    y = layers.Activation("relu")(layers.BatchNormalization()(y))
    y = layers.Conv2D(filters, 3, padding="same", kernel_regularizer=regularizer)(y)
    y = layers.BatchNormalization()(y)
    if strides > 1:
        x = layers.Conv2D(filters, 1, strides, padding="same")(x)
    return layers.Activation("relu")(layers.add([x, y]))


train = dataset("train").shuffle(2000).map(augment, num_parallel_calls=tf.data.AUTOTUNE)
train = train.batch(64, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
test = dataset("test").batch(64)

with strategy.scope():
    inputs = tf.keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", kernel_regularizer=regularizer)(inputs)
    x = unit(unit(x, 16), 32, strides=2)
    outputs = layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    model = tf.keras.Model(inputs, outputs)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9),
        metrics=["accuracy"],
    )
drop = tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch < 8 else 0.01)
model.fit(train, epochs=12, validation_data=test, callbacks=[drop])
print("accuracy", round(float(model.evaluate(test, verbose=0)[1]), 4))

"""An ordinary Keras script. It uses Paceline only for its bundled data.

KERAS_BACKEND=torch python examples/keras_digits.py                        # one process
paceline launch examples/keras_digits.py --strategy allreduce --workers 2  # two workers
"""

import keras
from keras import layers

from paceline.data.digits import read  # bundled data: 1,797 images of 8x8 pixels

images, labels = read()
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
x_train, y_train = images[:1500], labels[:1500]
x_test, y_test = images[1500:], labels[1500:]

model = keras.Sequential(
    [
        keras.Input(shape=(8, 8, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(
    optimizer=keras.optimizers.SGD(0.1),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=50, epochs=5, validation_data=(x_test, y_test))
model.save("digits.keras")

"""Names of Keras 2 that scripts for TensorFlow still use, where Keras 3 has the same thing."""

import functools
from typing import Any

LEGACY_OPTIMIZERS = ("Adagrad", "Adam", "Ftrl", "RMSprop", "SGD")


def accept_keras_2_names(keras: Any) -> None:
    """Accepts `lr` for `learning_rate`, and `optimizers.legacy`, which Keras 3 rejects."""
    for name in LEGACY_OPTIMIZERS:
        setattr(keras.optimizers.legacy, name, getattr(keras.optimizers, name))
    base = keras.optimizers.Optimizer
    plain = base.__init__

    @functools.wraps(plain)
    def init(optimizer: Any, *args: Any, lr: Any = None, **options: Any) -> None:
        plain(optimizer, *args, **(options if lr is None else {**options, "learning_rate": lr}))

    base.__init__ = init

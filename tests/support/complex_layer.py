"""A layer whose weights are complex numbers."""

import numpy as np

from accumtrainer.keras_api import keras, ops

START = np.array([0.1 + 0.2j, 0.3 - 0.1j, 0.2 + 0.4j], "complex64")


class Turn(keras.layers.Layer):
    """Multiplies by complex numbers, and looks at both parts of what comes."""

    def build(self, input_shape):
        del input_shape
        self.factor = self.add_weight(
            shape=(3,), dtype="complex64", initializer=make_start
        )

    def call(self, x):
        turned = ops.cast(x, "complex64") * ops.convert_to_tensor(self.factor)
        real, imaginary = ops.real(turned), ops.imag(turned)
        return ops.square(real) + imaginary + 2 * ops.square(imaginary)


def make_start(shape, dtype):
    del shape, dtype
    return ops.convert_to_tensor(START)

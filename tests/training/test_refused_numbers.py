"""Claims about numbers that TensorFlow refuses on a CPU, and XLA does not.

Keras compiles nothing by XLA there, so that its `fit` refuses them.
"""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

# The programs are made of TensorFlow's own operations. JAX has none that refuse
# a number, and PyTorch runs without XLA, so that nothing there goes unseen.
pytestmark = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="only TensorFlow refuses what XLA takes"
)

if BACKEND == "tensorflow":
    import tensorflow as tf

    linalg, raw_ops = tf.linalg, tf.raw_ops

X = np.ones([8, 3], "float32")
BAD = X.copy()
BAD[6, 1] = 0


class Calls(keras.layers.Layer):
    """Calls a function with numbers, and adds what it returns, as a mean."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.counts = self.add_weight(
            [2], initializer="zeros", trainable=False, name="counts"
        )

    def call(self, numbers):
        result = tf.cast(self.function(numbers, self), "float32")
        return numbers + tf.stop_gradient(tf.reduce_mean(result))


def make_model(function):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([3]), Calls(function), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


def train(model, x, size=2):
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=size))
    trainer.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)


def whole(numbers):
    return tf.cast(numbers, "int32")


def flat(numbers):
    return tf.reshape(whole(numbers), [-1])


def matrices(numbers):
    return linalg.diag(numbers)


def in_branch(x, layer):
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: 10 // whole(x),
        lambda: whole(x),
    )


def in_function(x, layer):
    return tf.function(tf.debugging.check_numerics)(tf.math.log(x), "log")


def in_loop(x, layer):
    return tf.map_fn(lambda row: 10 % row, whole(x))


def scattered(x, layer):
    counts, places = layer.counts.value, 2 - flat(x)
    slices = tf.IndexedSlices(tf.ones_like(places, counts.dtype), places)
    return counts.scatter_add(slices)


def scattered_by_several(x, layer):
    places = 2 - tf.reshape(whole(x), [-1, 1])
    ones = tf.ones_like(places[:, 0], "float32")
    return layer.counts.value.scatter_nd_add(places, ones)


REFUSED = {
    "check": lambda x, _: tf.debugging.check_numerics(tf.math.log(x), "log"),
    "divide": lambda x, _: 10 // whole(x),
    "divide whole": lambda x, _: raw_ops.Div(x=10 + whole(x), y=whole(x)),
    "remainder": lambda x, _: 10 % whole(x),
    "truncated remainder": lambda x, _: raw_ops.Mod(x=whole(x), y=whole(x)),
    "truncate": lambda x, _: tf.truncatediv(10, whole(x)),
    "truncate remainder": lambda x, _: tf.truncatemod(10, whole(x)),
    "power": lambda x, _: tf.pow(2, whole(x) - 1),
    "inverse": lambda x, _: tf.tanh(linalg.inv(matrices(x))),
    "solve": lambda x, _: tf.tanh(linalg.solve(matrices(x), matrices(x))),
    "eigenvalues": lambda x, _: tf.where(
        tf.math.is_finite(linalg.eigvalsh(matrices(tf.math.log(x)))), 0.0, 1.0
    ),
    "band": lambda x, _: linalg.band_part(
        tf.ones([3, 3]), 4 - tf.reduce_min(whole(x)), 0
    ),
    "partition": lambda x, _: tf.size(
        tf.dynamic_partition(flat(x), 2 - flat(x), 2)[1]
    ),
    "permutation": lambda x, _: tf.math.invert_permutation(
        tf.range(tf.size(x)) + 1 - tf.reduce_min(whole(x))
    ),
    "counts": lambda x, _: tf.math.bincount(
        flat(x) - 1, minlength=2, maxlength=2
    ),
    "counts of old": lambda x, _: raw_ops.Bincount(
        arr=flat(x) - 1, size=2, weights=tf.zeros([0])
    ),
    "sparse": lambda x, _: tf.sparse.to_dense(
        tf.SparseTensor(
            [[2 - tf.cast(tf.reduce_min(x), "int64")]], tf.ones([1]), [2]
        )
    ),
    "random": lambda x, _: tf.random.uniform(
        [3], 0, tf.reduce_min(whole(x)), "int32"
    ),
    "stateless random": lambda x, _: tf.random.stateless_uniform(
        [3], [1, 2], 0, tf.reduce_min(whole(x)), "int32"
    ),
    "truncated normal": lambda x, _: raw_ops.ParameterizedTruncatedNormal(
        shape=[3], means=0.0, stdevs=tf.reduce_min(x), minvals=-1.0, maxvals=1.0
    ),
    "stateless truncated normal": lambda x, _: (
        tf.random.stateless_parameterized_truncated_normal(
            [3], [1, 2], 0.0, tf.reduce_min(x), -1.0, 1.0
        )
    ),
    "quantize": lambda x, _: tf.quantization.quantize_and_dequantize_v2(
        x, 0.5, tf.reduce_min(x), range_given=True
    ),
    "scattered": scattered,
    "scattered by several": scattered_by_several,
    "in a branch": in_branch,
    "in a function": in_function,
    "in a loop": in_loop,
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_numbers_that_keras_refuses_are_not_trained_on(function):
    model = make_model(function)
    before = model.layers[-1].get_weights()
    with pytest.raises(tf.errors.OpError):
        train(model, BAD)
    for one, other in zip(before, model.layers[-1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    train(model, X)
    with pytest.raises(tf.errors.OpError):
        model.fit(BAD, BAD[:, :1], batch_size=8, verbose=0)


TAKEN = {
    "divided by a constant": lambda x, _: whole(x) // 3 + whole(x) % 3,
    "divided by a size": lambda x, _: whole(x) // tf.shape(x)[0],
    "floats": lambda x, _: 10 // (x + 1) + 10 % (x + 1) + 2**x,
    "a square": lambda x, _: whole(x) ** 2,
    "a random choice": lambda x, _: keras.random.randint([3], 0, 9),
    "a triangle": lambda x, _: linalg.band_part(tf.ones([3, 3]), -1, 0),
    "in a branch": lambda x, _: tf.cond(
        tf.reduce_sum(x) > 0, lambda: whole(x) // 3, lambda: whole(x) % 3
    ),
}


@pytest.mark.parametrize("size", [2, 3], ids=["fused", "streamed"])
@pytest.mark.parametrize("function", TAKEN.values(), ids=TAKEN)
def test_what_takes_any_number_does_not_cost_a_model_xla(
    function, size, monkeypatch
):
    from accumtrainer.steps.tensorflow.programs import XlaShapes

    left = []
    monkeypatch.setattr(XlaShapes, "close", lambda self: left.append(True))
    train(make_model(function), X, size)
    assert not left

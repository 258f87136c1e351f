"""Claims about recipes people write by hand: configuration replaces them.

Each recipe is written here as the plain loop it is in its published form. The
loops are TensorFlow's (tapes, graphs, `tf.function`, `tf.data`), so this file
is for TensorFlow alone.
"""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "tensorflow":
    pytest.skip("these recipes are TensorFlow's", allow_module_level=True)

import tensorflow as tf

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_data(rows):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 5)).astype("float32")
    return x, generator.integers(0, 3, size=rows)


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def differentiate(model, x, y):
    """Return the gradients of the mean loss of a batch."""
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def weights_of(model):
    return [v.value.numpy() for v in model.trainable_variables]


def assert_reproduces(model, accumulation, optimizer, *data, **options):
    """Check that a Trainer ends with the weights a recipe ended with."""
    start = weights_of(make_model())
    trainer = Trainer(
        make_model(),
        optimizer=optimizer,
        loss=LOSS,
        accumulation=accumulation,
    )
    trainer.fit(*data, shuffle=False, verbose=0, **options)
    updates = trainer.progress.updates
    assert updates == int(trainer.optimizer.iterations) > 1
    made = weights_of(trainer.model)
    for first, expected, received in zip(
        start, weights_of(model), made, strict=True
    ):
        size = np.abs(expected).max()
        assert np.abs(expected - first).max() > 1e-4 * size
        np.testing.assert_allclose(received, expected, atol=1e-5 * size)


def test_accumulator_variables_with_three_operations():
    """Zero, accumulate 128 times one example, apply: a TensorFlow 1 graph."""
    x, y = make_data(256)
    model = make_model()
    weights = weights_of(model)
    graph = tf.Graph()
    with graph.as_default():
        trained = [tf.compat.v1.Variable(w) for w in weights]
        inputs = tf.compat.v1.placeholder(tf.float32, [None, 5])
        labels = tf.compat.v1.placeholder(tf.int64, [None])
        hidden = tf.tanh(inputs @ trained[0] + trained[1])
        logits = hidden @ trained[2] + trained[3]
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        )
        optimizer = tf.compat.v1.train.AdamOptimizer(0.01, epsilon=1e-7)
        accumulators = [
            tf.compat.v1.Variable(tf.zeros_like(v), trainable=False)
            for v in trained
        ]
        zero = [a.assign(tf.zeros_like(a)) for a in accumulators]
        gradients = tf.gradients(loss, trained)
        accumulate = [
            a.assign_add(g)
            for a, g in zip(accumulators, gradients, strict=True)
        ]
        apply = optimizer.apply_gradients(
            zip(accumulators, trained, strict=True)
        )
        start = tf.compat.v1.global_variables_initializer()
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(start)
        for first in range(0, 256, 128):
            session.run(zero)
            for row in range(first, first + 128):
                rows = slice(row, row + 1)
                session.run(accumulate, {inputs: x[rows], labels: y[rows]})
            session.run(apply)
        weights = session.run(trained)
    model.set_weights(weights)

    assert_reproduces(
        model,
        Accumulation(steps=128, combine="sum"),
        keras.optimizers.Adam(0.01, epsilon=1e-7),
        x,
        y,
        batch_size=1,
    )


def test_list_of_summed_gradients_applied_every_four_batches():
    x, y = make_data(128)
    model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    summed = [tf.zeros_like(v) for v in model.trainable_variables]
    for step in range(16):
        rows = slice(8 * step, 8 * step + 8)
        gradients = differentiate(model, x[rows], y[rows])
        summed = [s + g for s, g in zip(summed, gradients, strict=True)]
        if (step + 1) % 4 == 0:
            optimizer.apply_gradients(
                zip(summed, model.trainable_variables, strict=True)
            )
            summed = [tf.zeros_like(v) for v in model.trainable_variables]

    assert_reproduces(
        model,
        Accumulation(steps=4, combine="sum"),
        keras.optimizers.Adam(0.01),
        x,
        y,
        batch_size=8,
    )


def test_compiled_list_of_summed_gradients_reset_to_zeros():
    x, y = make_data(128)
    model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    summed = [
        tf.Variable(tf.zeros(v.shape), trainable=False)
        for v in model.trainable_variables
    ]

    @tf.function
    def accumulate(images, labels):
        gradients = differentiate(model, images, labels)
        for total, gradient in zip(summed, gradients, strict=True):
            total.assign_add(gradient)

    @tf.function
    def apply():
        optimizer.apply([tf.identity(s) for s in summed])
        for total in summed:
            total.assign(tf.zeros_like(total))

    for step in range(16):
        rows = slice(8 * step, 8 * step + 8)
        accumulate(x[rows], y[rows])
        if (step + 1) % 4 == 0:
            apply()

    assert_reproduces(
        model,
        Accumulation(steps=4, combine="sum"),
        keras.optimizers.Adam(0.01),
        x,
        y,
        batch_size=8,
    )


def test_batches_of_different_sizes_counted_as_steps():
    """What is left of one epoch goes on in the next: 10 batches, 4 apiece."""
    x, y = make_data(60)
    sizes = [3, 8, 5, 7, 2, 9, 6, 8, 4, 8]
    stops = np.cumsum(sizes)
    batches = [
        (x[stop - size : stop], y[stop - size : stop])
        for size, stop in zip(sizes, stops, strict=True)
    ]
    model, optimizer = make_model(), keras.optimizers.Adam(0.01)
    summed, steps = None, 0
    for _ in range(2):
        for images, labels in batches:
            gradients = differentiate(model, images, labels)
            if summed is None:
                summed = gradients
            else:
                summed = [s + g for s, g in zip(summed, gradients, strict=True)]
            steps += 1
            if steps % 4 == 0:
                optimizer.apply(summed, model.trainable_variables)
                summed = None

    assert_reproduces(
        model,
        Accumulation(steps=4, tail="carry", combine="sum"),
        keras.optimizers.Adam(0.01),
        batches,
        epochs=2,
    )


def sum_in_a_dict(model, optimizer, batches):
    """Run one epoch of the recipe that keeps a dict of summed gradients."""
    summed, held = {}, 0
    for images, labels in batches:
        gradients = differentiate(model, images, labels)
        for position, gradient in enumerate(gradients):
            if position in summed:
                summed[position] = summed[position] + gradient
            else:
                summed[position] = gradient
        held += 1
        if held == 10:
            optimizer.apply(list(summed.values()), model.trainable_variables)
            summed, held = {}, 0
    if held:
        optimizer.apply(list(summed.values()), model.trainable_variables)


def test_dict_of_summed_gradients_with_the_last_window_applied():
    x, y = make_data(1000)
    model, optimizer = make_model(), keras.optimizers.Adam(0.001)
    for _ in range(2):
        slices = [slice(first, first + 32) for first in range(0, 1000, 32)]
        batches = [(x[rows], y[rows]) for rows in slices]
        sum_in_a_dict(model, optimizer, batches)

    assert_reproduces(
        model,
        Accumulation(steps=10, tail="flush", combine="sum"),
        keras.optimizers.Adam(0.001),
        x,
        y,
        batch_size=32,
        epochs=2,
    )
    assert int(optimizer.iterations) == 8


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda: 0.001, id="constant-rate"),
        pytest.param(
            lambda: keras.optimizers.schedules.ExponentialDecay(
                0.001, decay_steps=1000, decay_rate=0.9
            ),
            id="exponential-decay",
        ),
    ],
)
def test_dict_of_summed_gradients_over_tf_data(rate):
    dataset = tf.data.Dataset.from_tensor_slices(make_data(1000)).batch(32)
    model, optimizer = make_model(), keras.optimizers.Adam(rate())
    for _ in range(2):
        sum_in_a_dict(model, optimizer, dataset)

    assert_reproduces(
        model,
        Accumulation(steps=10, tail="flush", combine="sum"),
        keras.optimizers.Adam(rate()),
        dataset,
        epochs=2,
    )

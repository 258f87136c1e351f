"""Claims about what happens inside a window and between windows."""

import numpy as np
import pytest
from oracle import (
    TOLERANCE,
    KeepGradients,
    Pair,
    batch_gradients,
    concatenate,
    cuts_in_many_ways,
    largest_error,
)
from quickest import RUN_EAGERLY

from accumtrainer import Accumulation, Batch, Callback, Trainer
from accumtrainer.keras_api import keras, ops

layers, losses = keras.layers, keras.losses

pytestmark = cuts_in_many_ways

X = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(22, 2)).astype("float32")
WEIGHTS = np.random.default_rng(2).uniform(0.1, 3, 22).astype("float32")

BY_WEIGHT = losses.MeanSquaredError(reduction="mean_with_sample_weight")


def make_model(*between, outputs=2):
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(3, activation="tanh"),
            *between,
            layers.Dense(outputs),
        ]
    )


def make_fork():
    """Make a model with two outputs, so that denominators come first."""
    keras.utils.set_random_seed(7)
    x = keras.Input([4])
    hidden = layers.Dense(3, activation="tanh")(x)
    a = layers.Dense(2, name="a")(hidden)
    return keras.Model(x, [a, layers.Dense(2, name="b")(hidden)])


def cut(sizes, *arrays):
    """Cut arrays into batches of some sizes."""
    stops = np.cumsum(sizes)[:-1]
    parts = [np.split(array[: sum(sizes)], stops) for array in arrays]
    return list(zip(*parts, strict=True))


def forked(batches):
    """Give both outputs the same targets and weights of their own."""
    return [(x, (y, y + 1), (w, w[::-1].copy())) for x, y, w in batches]


class Windows(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))


# Logs.


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (5, 1, 2, 7), (3, 2, 6)])
def test_epoch_loss_is_the_mean_over_all_weights(sizes):
    pair = Pair(make_model, loss=BY_WEIGHT, accumulation=2)
    batches = cut(sizes, X, Y, WEIGHTS)
    history = pair.trainer.fit(batches, verbose=0).history
    expected, _ = batch_gradients(pair.twin, concatenate(batches))
    assert history["loss"] == pytest.approx([expected], rel=TOLERANCE)


def test_loss_of_an_epoch_knows_nothing_of_the_one_before():
    pair = Pair(make_model, loss="mse", accumulation=2)
    pair.trainer.fit(cut((4, 4), X, 100 * Y), verbose=0)
    batches = cut((3, 2), X, Y)
    history = pair.trainer.fit(batches, verbose=0).history
    expected, _ = batch_gradients(pair.twin, concatenate(batches))
    assert history["loss"] == pytest.approx([expected], rel=TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (5, 1, 2, 7)])
def test_loss_of_a_window_is_that_of_its_big_batch(sizes):
    pair = Pair(make_model, loss=BY_WEIGHT, accumulation=2)
    batches, windows = cut(sizes, X, Y, WEIGHTS), Windows()
    pair.trainer.fit(batches, verbose=0, callbacks=[windows])
    expected = [
        batch_gradients(pair.twin, concatenate(window))[0]
        for window in (batches[:2], batches[2:])
    ]
    actual = [logs["loss"] for logs in windows.logs]
    assert actual == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2)])
def test_gradient_norm_is_that_of_the_big_batch(sizes):
    pair = Pair(make_model, loss="mse", accumulation=2)
    batches, windows = cut(sizes, X, Y), Windows()
    pair.trainer.fit(batches, verbose=0, callbacks=[windows])
    _, gradients = batch_gradients(pair.twin, concatenate(batches))
    arrays = map(ops.convert_to_numpy, gradients)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in arrays))
    assert windows.logs[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_losses_that_are_sums_are_weighed_by_samples_over_an_epoch():
    pair = Pair(
        make_model,
        loss=losses.MeanSquaredError(reduction="sum"),
        accumulation=1,
    )
    batches = cut((4, 1), X, Y)
    history = pair.trainer.fit(batches, verbose=0).history
    first, second = (batch_gradients(pair.twin, b)[0] for b in batches)
    expected = (4 * first + 1 * second) / 5
    assert history["loss"] == pytest.approx([expected], rel=TOLERANCE)


# A window forgets the one before.


@pytest.mark.parametrize("sizes", [(3, 3), (1, 4)])
def test_window_starts_with_no_gradients_of_the_last_one(sizes):
    pair = Pair(make_model, loss="mse")
    pair.train(cut((2, 2), X, 100 * Y))
    pair.train(cut((2, 3), X, 100 * Y))
    pair.assert_exact(cut(sizes, X, Y))


def test_window_with_a_nan_leaves_nothing_behind_for_the_next():
    pair = Pair(make_model, loss="mse")
    batches = cut((2, 3), X, Y)
    pair.train([(np.full_like(x, np.nan), y) for x, y in batches])
    assert pair.trainer.progress.skipped_updates == 1
    pair.assert_exact(batches)


# The pass that measures denominators before the first gradient.


class RandomWeights(Trainer):
    """Draws new sample weights, and logs what they would sum up to."""

    def on_micro_batch(self, batch, info):
        x, y, (first, second) = batch
        first = keras.random.uniform(ops.shape(first), seed=self.rng)
        second = keras.random.uniform(ops.shape(second), seed=self.rng)
        for name, y_one, weight in zip("ab", y, (first, second), strict=True):
            weighted = ops.sum(weight * y_one[:, 0])
            self.log(f"{name}_sum", weighted, reduce="sum")
            self.log(f"{name}_weight", ops.sum(weight), reduce="sum")
        return Batch(x, y, (first, second))


class FirstTarget(losses.Loss):
    """Has the target as its gradient, whatever the prediction."""

    def call(self, y_true, y_pred):
        return y_true[:, 0] * y_pred[:, 0]


@pytest.mark.parametrize("sizes", [(4, 4), (2, 1, 5)])
def test_denominators_are_measured_on_the_same_random_numbers(sizes):
    loss = FirstTarget(reduction="mean_with_sample_weight")
    pair = Pair(make_fork, loss=[loss, loss], trainer_class=RandomWeights)
    logs = pair.train(forked(cut(sizes, X, Y, WEIGHTS)))
    paths = [v.path for v in pair.model.trainable_variables]
    for name in "ab":
        bias = pair.gradients[paths.index(f"{name}/bias")]
        expected = logs[f"{name}_sum"] / logs[f"{name}_weight"]
        assert float(bias[0]) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 1, 5)])
def test_metrics_see_every_micro_batch_once(sizes):
    loss = [BY_WEIGHT, BY_WEIGHT]
    seen = keras.metrics.MeanMetricWrapper(lambda y, p: y[:, 0], name="seen")
    pair = Pair(make_fork, loss=loss, metrics=[[seen, "mae"], "mae"])
    batches = forked(cut(sizes, X, Y, WEIGHTS))
    logs = pair.train(batches)
    y = concatenate(batches).y[0]
    assert logs["a_seen"] == pytest.approx(y[:, 0].mean(), rel=TOLERANCE)
    assert float(seen.count) == sum(sizes)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 1, 5)])
def test_batch_statistics_see_every_micro_batch_once(sizes):
    def make_normalized_fork():
        keras.utils.set_random_seed(7)
        x = keras.Input([4])
        hidden = layers.BatchNormalization(momentum=0.5)(x)
        outputs = [layers.Dense(2, name=name)(hidden) for name in "ab"]
        return keras.Model(x, outputs)

    pair = Pair(make_normalized_fork, loss=[BY_WEIGHT, BY_WEIGHT])
    batches = forked(cut(sizes, X, Y, WEIGHTS))
    pair.train(batches)
    mean = np.zeros([4], "float32")
    for x, _, _ in batches:
        mean = 0.5 * mean + 0.5 * x.mean(axis=0)
    (actual,) = (
        v for v in pair.model.non_trainable_variables if "mean" in v.path
    )
    np.testing.assert_allclose(actual, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 1, 5)])
def test_dropout_does_not_disturb_the_denominators(sizes):
    def make_dropping_fork():
        keras.utils.set_random_seed(7)
        x = keras.Input([4])
        hidden = layers.Dropout(0.5)(x)
        outputs = [layers.Dense(2, name=name)(hidden) for name in "ab"]
        return keras.Model(x, outputs)

    loss = FirstTarget(reduction="mean_with_sample_weight")
    pair = Pair(make_dropping_fork, loss=[loss, loss])
    batches = forked(cut(sizes, X, Y, WEIGHTS))
    pair.train(batches)
    _, (y, _), (weight, _) = concatenate(batches)
    paths = [v.path for v in pair.model.trainable_variables]
    bias = pair.gradients[paths.index("a/bias")]
    expected = np.average(y[:, 0], weights=weight)
    assert float(bias[0]) == pytest.approx(expected, rel=TOLERANCE)


# Weights as hooks see them.


class Weighed(Trainer):
    """Logs what hooks are told of weights."""

    def on_accumulate(self, gradients, info):
        self.log("weights", info.weight, reduce="sum")
        return gradients

    def on_apply(self, gradients, info):
        self.log("total_weight", info.total_weight, reduce="sum")
        self.log("window_loss", info.loss)
        return gradients


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2)])
def test_hooks_are_told_the_denominators(sizes):
    pair = Pair(make_model, loss=BY_WEIGHT, trainer_class=Weighed)
    logs = pair.train(cut(sizes, X, Y, WEIGHTS))
    total = WEIGHTS[: sum(sizes)].sum()
    assert logs["weights"] == pytest.approx(total, rel=1e-5)
    assert logs["total_weight"] == pytest.approx(total, rel=1e-5)
    assert logs["window_loss"] == pytest.approx(logs["loss"], rel=1e-5)


class Kept(Trainer):
    """Accumulates gradients of its own beside the real ones."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.sums = [
            self.track(keras.Variable(ops.zeros(v.shape), trainable=False))
            for v in model.trainable_variables
        ]

    def on_accumulate(self, gradients, info):
        for kept, gradient in zip(self.sums, gradients, strict=True):
            kept.assign(kept + gradient * info.weight)
        return gradients


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2)])
def test_weighted_gradients_of_micro_batches_make_the_windows(sizes):
    pair = Pair(make_model, loss="mse", trainer_class=Kept)
    pair.train(cut(sizes, X, Y))
    sums = [ops.convert_to_tensor(v) / sum(sizes) for v in pair.trainer.sums]
    assert largest_error(pair.gradients, sums) <= TOLERANCE


# Other ways to the same window.


@pytest.mark.parametrize("size", [1, 3, 4, 7, 22, 50])
def test_slices_of_a_loader_batch_are_a_window(size):
    pair = Pair(
        make_model,
        loss=BY_WEIGHT,
        accumulation=Accumulation(micro_batch_size=size),
        run_eagerly=RUN_EAGERLY,
    )
    pair.trainer.fit(
        X, Y, sample_weight=WEIGHTS, batch_size=22, shuffle=False, verbose=0
    )
    _, expected = batch_gradients(pair.twin, (X, Y, WEIGHTS))
    assert largest_error(pair.gradients, expected) <= TOLERANCE


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_train_on_batch_slices_into_the_steps_of_a_window(steps):
    pair = Pair(
        make_model,
        loss=BY_WEIGHT,
        accumulation=steps,
        run_eagerly=RUN_EAGERLY,
    )
    loss = pair.trainer.train_on_batch(X, Y, sample_weight=WEIGHTS)
    expected_loss, expected = batch_gradients(pair.twin, (X, Y, WEIGHTS))
    assert largest_error(pair.gradients, expected) <= TOLERANCE
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)


def test_eager_window_is_the_compiled_one():
    batches = cut((2, 1, 5), X, Y, WEIGHTS)
    kept = []
    for run_eagerly in (False, True):
        pair = Pair(make_model, loss=BY_WEIGHT, run_eagerly=run_eagerly)
        pair.train(batches)
        kept.append(pair.gradients)
    assert largest_error(*kept) <= TOLERANCE


def test_layer_that_is_shared_gets_the_gradients_of_all_its_uses():
    def make_shared():
        keras.utils.set_random_seed(7)
        x = keras.Input([4])
        shared = layers.Dense(4, activation="tanh")
        return keras.Model(x, layers.Dense(2)(shared(shared(x))))

    Pair(make_shared, loss="mse").assert_exact(cut((3, 1, 2), X, Y))


def test_recurrent_layer_is_exact():
    def make_recurrent():
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [
                keras.Input([2, 2]),
                layers.LSTM(3),
                layers.Dense(2),
            ]
        )

    x = X.reshape([22, 2, 2])
    pair = Pair(make_recurrent, loss="mse")
    pair.assert_exact(cut((3, 3), x, Y))
    pair.assert_exact(cut((4, 1), x, Y))


def test_subclassed_model_that_is_not_built_is_exact():
    class Lazy(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(3, activation="tanh")
            self.last = layers.Dense(2)

        def call(self, inputs):
            return self.last(self.first(inputs))

    keras.utils.set_random_seed(7)
    model, batches = Lazy(), cut((3, 1), X, Y)
    optimizer = KeepGradients()
    trainer = Trainer(
        model, optimizer=optimizer, loss="mse", accumulation=2, seed=0
    )
    trainer.fit(batches, verbose=0)
    twin = Lazy()
    twin(X)
    twin.set_weights(model.get_weights())
    twin.compile("sgd", "mse")
    _, expected = batch_gradients(twin, concatenate(batches))
    assert largest_error(optimizer.kept, expected) <= TOLERANCE

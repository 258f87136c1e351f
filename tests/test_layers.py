"""Claims about layers whose state moves once per update."""

import contextlib

import numpy as np
import pytest
from normalized import (
    SIZES,
    X,
    Y,
    assert_moved_once,
    averages,
    cut,
    layers,
    make_model,
    make_trainer,
    numbers,
)

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.keras_api import keras, ops
from accumtrainer.layers import (
    AccumulatedBatchNormalization,
    WindowLayer,
)

pytestmark = pytest.mark.usefixtures("without_xla")


@pytest.mark.parametrize("sizes", SIZES)
def test_averages_move_once_towards_the_moments_of_the_update(sizes):
    model = make_model()
    trainer = make_trainer(model, len(sizes))
    trainer.fit(cut(sizes, X, Y), verbose=0)
    assert trainer.progress.updates == 1
    assert_moved_once(model, X)


@pytest.mark.parametrize("sizes", SIZES)
def test_averages_are_those_of_the_plain_layer_on_the_big_batch(sizes):
    model = make_model()
    make_trainer(model, len(sizes)).fit(cut(sizes, X, Y), verbose=0)
    plain = make_model(layers.BatchNormalization)
    make_trainer(plain, 1).fit([(X, Y)], verbose=0)
    for actual, expected in zip(averages(model), averages(plain), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": True}],
    ids=["eager", "xla"],
)
def test_averages_move_alike_however_windows_are_run(options):
    model = make_model()
    make_trainer(model, 4, **options).fit(cut(SIZES[0], X, Y), verbose=0)
    assert_moved_once(model, X)


def test_variance_survives_means_that_are_large():
    x = X + 1e4
    model = make_model()
    make_trainer(model, 4).fit(cut((5, 1, 5, 5), x, Y), verbose=0)
    _, variance = averages(model)
    expected = 0.75 + 0.25 * x.var(0, dtype="float64")
    np.testing.assert_allclose(variance, expected, rtol=1e-3)


def test_every_window_begins_anew():
    model = make_model()
    make_trainer(model, 2).fit(cut((4, 4, 5, 3), X, Y), verbose=0)
    mean = 0.75 * 0.25 * X[:8].mean(0) + 0.25 * X[8:].mean(0)
    np.testing.assert_allclose(averages(model)[0], mean, rtol=1e-5)


@pytest.mark.parametrize("axis", [1, -1])
def test_axis_of_channels_is_heeded(rng, axis):
    x = rng.normal(1.0, 2.0, size=(8, 3, 5)).astype("float32")
    model = make_model(shape=(3, 5), axis=axis)
    make_trainer(model, 3).fit(cut((3, 1, 4), x, Y[:8]), verbose=0)
    assert_moved_once(model, x, (0, 2) if axis == 1 else (0, 1))


class Masked(keras.Model):
    """Normalizes inputs of which the first feature tells what counts."""

    def __init__(self, cls):
        super().__init__()
        self.normalize = cls(momentum=0.75, name="normalize")
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.normalize.build(shape)
        self.dense.build([None, shape[-1]])

    def call(self, x, training=None):
        mask = x[..., 0] > 0
        x = self.normalize(x, training=training, mask=mask)
        return self.dense(ops.mean(x, axis=1))


@pytest.mark.parametrize("is_empty", [False, True])
def test_masked_values_are_left_out(rng, is_empty):
    x = rng.normal(size=(8, 5, 4)).astype("float32")
    if is_empty:
        x[3:4, :, 0] = -1.0  # a micro-batch that is all masked
    model = Masked(AccumulatedBatchNormalization)
    model.build([None, 5, 4])
    make_trainer(model, 3).fit(cut((3, 1, 4), x, Y[:8]), verbose=0)
    assert_moved_once(model, x[x[..., 0] > 0])


def test_window_of_masked_values_alone_moves_nothing(rng):
    x = -np.ones([4, 5, 4], "float32")
    model = Masked(AccumulatedBatchNormalization)
    model.build([None, 5, 4])
    model.normalize.moving_mean.assign(rng.normal(size=4))
    before = averages(model)
    make_trainer(model, 2).fit(cut((2, 2), x, Y[:4]), verbose=0)
    for old, new in zip(before, averages(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_statistics_are_float32_in_mixed_precision(policy):
    model = make_model(dtype=policy)
    x = 2 * np.round(X) + 300  # exact in both, the squares in neither
    make_trainer(model, 4).fit(cut((5, 1, 5, 5), x, Y), verbose=0)
    mean, variance = averages(model)
    assert mean.dtype == variance.dtype == "float32"
    expected = 0.75 + 0.25 * x.var(0, dtype="float64")
    np.testing.assert_allclose(variance, expected, rtol=1e-4)


def test_layer_that_is_shared_sees_both_of_its_inputs():
    keras.utils.set_random_seed(0)
    normalize = AccumulatedBatchNormalization(momentum=0.75, name="normalize")
    a, b = keras.Input([4]), keras.Input([4])
    outputs = layers.Dense(2)(normalize(a) + normalize(b))
    model = keras.Model([a, b], outputs)
    batches = [((x, 2 * x), y) for x, y in cut((5, 1, 5, 5), X, Y)]
    make_trainer(model, 4).fit(batches, verbose=0)
    assert_moved_once(model, np.concatenate([X, 2 * X]))


# What it shares with the plain layer.


@pytest.mark.parametrize("options", [{}, {"center": False, "scale": False}])
def test_one_micro_batch_is_the_plain_layer(options):
    ends = []
    for cls in (AccumulatedBatchNormalization, layers.BatchNormalization):
        model = make_model(cls, **options)
        trainer = make_trainer(model, 1, optimizer=keras.optimizers.SGD(0.1))
        trainer.fit(cut((8, 8), X, Y), verbose=0, epochs=2)
        outputs = trainer.predict(X, verbose=0)
        ends.append([*averages(model), *model.layers[-1].weights, outputs])
    for actual, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_micro_batches_are_normalized_by_their_own_moments():
    ends = []
    for cls in (AccumulatedBatchNormalization, layers.BatchNormalization):
        model = make_model(cls)
        trainer = make_trainer(model, 4, optimizer=keras.optimizers.SGD(0.1))
        trainer.fit(cut((5, 1, 5, 5), X, Y), verbose=0)
        ends.append([numbers(v) for v in model.trainable_variables])
    for actual, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_plain_fit_moves_averages_as_the_plain_layer_does():
    ends = []
    for cls in (AccumulatedBatchNormalization, layers.BatchNormalization):
        model = make_model(cls)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        ends.append(averages(model))
    for actual, expected in zip(*ends, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_averages_move_once_inside_plain_fit_that_accumulates():
    model = make_model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(
        X,
        Y,
        batch_size=4,
        verbose=0,
        callbacks=[GradientAccumulation(4)],
    )
    assert_moved_once(model, X)


def test_plain_fit_after_a_trainer_is_plain():
    model = make_model()
    make_trainer(model, 4).fit(cut(SIZES[0], X, Y), verbose=0)
    before, _ = averages(model)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    expected = 0.75 * before + 0.25 * X.mean(0)
    np.testing.assert_allclose(averages(model)[0], expected, rtol=1e-5)


def test_frozen_layer_moves_nothing():
    model = make_model()
    model.get_layer("normalize").trainable = False
    before = numbers(model.get_layer("normalize").gamma)
    make_trainer(model, 4).fit(cut(SIZES[0], X, Y), verbose=0)
    mean, variance = averages(model)
    np.testing.assert_array_equal(mean, 0.0)
    np.testing.assert_array_equal(variance, 1.0)
    np.testing.assert_array_equal(
        numbers(model.get_layer("normalize").gamma), before
    )


def test_layer_that_is_never_called_is_left_alone():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.unused = AccumulatedBatchNormalization()
            self.dense = layers.Dense(2)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    trainer = make_trainer(Half(), 2)
    trainer.fit(X, Y, batch_size=4, verbose=0)
    assert trainer.progress.updates == 2


def test_validation_leaves_statistics_alone():
    ends = []
    for options in ({}, {"validation_data": (100 * X, Y)}):
        model = make_model()
        trainer = make_trainer(model, 2)
        trainer.fit(cut(SIZES[0], X, Y), verbose=0, epochs=2, **options)
        ends.append(averages(model))
    for actual, expected in zip(*ends, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_denominators_measured_first_leave_statistics_alone():
    keras.utils.set_random_seed(0)
    x = keras.Input([4])
    normal = AccumulatedBatchNormalization(momentum=0.75, name="normalize")(x)
    model = keras.Model(
        x, [layers.Dense(2, name=name)(normal) for name in ("a", "b")]
    )
    batches = [(x, (y, y)) for x, y in cut((5, 1, 5, 5), X, Y)]
    make_trainer(model, 4, loss=["mse", "mae"]).fit(batches, verbose=0)
    assert_moved_once(model, X)


# Skipped windows, inspections, resumes.


def test_skipped_window_leaves_the_layer_as_it_was():
    model = make_model()
    trainer = make_trainer(model, 2)
    batches = cut(SIZES[0], X, Y)
    trainer.fit(batches[:2], verbose=0)
    before = [numbers(v) for v in model.variables]
    bad = [(np.full_like(x, np.nan), y) for x, y in batches[2:]]
    trainer.fit(bad, verbose=0)
    assert trainer.progress.skipped_updates == 1
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))
    trainer.inspect()
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))
    trainer.fit(batches[2:], verbose=0)
    mean = 0.75 * 0.25 * X[:8].mean(0) + 0.25 * X[8:].mean(0)
    np.testing.assert_allclose(averages(model)[0], mean, rtol=1e-5)


def test_window_that_broke_off_leaves_nothing_for_the_next(monkeypatch):
    model = make_model()
    trainer = make_trainer(model, 4)
    trainer.fit(cut((5, 1, 5, 5), X, Y), verbose=0)
    before, _ = averages(model)
    step = trainer._engine._step
    function = step.function

    def fail(key, run):
        if key[0] == "apply":
            raise MemoryError
        return function(key, run)

    monkeypatch.setattr(step, "function", fail)
    with pytest.raises(MemoryError):
        trainer.fit(cut((5, 1, 5, 5), 1e6 * X, Y), verbose=0)
    monkeypatch.undo()
    trainer.fit(cut((5, 1, 5, 5), X, Y), verbose=0)
    expected = 0.75 * before + 0.25 * X.mean(0)
    np.testing.assert_allclose(averages(model)[0], expected, rtol=1e-5)


def test_resume_ends_with_the_same_statistics(tmp_path):
    def train(folder, **options):
        model = make_model()
        trainer = make_trainer(
            model,
            2,
            optimizer=keras.optimizers.Adam(0.1),
            callbacks=[
                Checkpoint(tmp_path / folder, every=Every(1, "updates"))
            ],
        )
        trainer.fit(
            X,
            Y,
            batch_size=4,
            epochs=2,
            verbose=0,
            resume_from="auto",
            **options,
        )
        return [numbers(v) for v in model.variables]

    whole = train("whole")
    train("parts", max_updates=1)
    for actual, expected in zip(train("parts"), whole, strict=True):
        np.testing.assert_array_equal(actual, expected)


# Layers of one's own.


class Counts(WindowLayer, layers.Layer):
    """Counts the passes of the last window, and the updates."""

    def build(self, shape):
        self.passes, self.updates = (
            self.add_weight(shape=(), initializer="zeros", trainable=False)
            for _ in range(2)
        )

    def call(self, x):
        self.passes.assign(self.passes + 1)
        return x

    @contextlib.contextmanager
    def micro_batch(self, is_first):
        self.passes.assign(ops.where(is_first, 0.0, self.passes.value))
        yield

    def after_apply(self):
        self.updates.assign(self.updates + 1)


class Looks(Trainer):
    """Logs what the layer says when the Trainer's own hook is called."""

    def after_apply(self, info):
        self.log("seen", self.model.layers[0].updates, reduce="max")


@pytest.mark.parametrize("sizes", SIZES)
def test_layers_inside_others_are_told_of_windows(sizes):
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input([4]), Counts()])
    model = keras.Sequential([keras.Input([4]), inner, layers.Dense(2)])
    make_trainer(model, len(sizes)).fit(cut(sizes, X, Y), verbose=0, epochs=2)
    counts = inner.layers[0]
    assert float(counts.passes) == len(sizes)
    assert float(counts.updates) == 2


def test_skipped_window_is_not_told_to_layers():
    model = keras.Sequential([keras.Input([4]), Counts(), layers.Dense(2)])
    x = X.copy()
    x[9] = np.nan
    make_trainer(model, 2).fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    assert float(model.layers[0].updates) == 1


def test_layers_are_told_before_the_trainer():
    model = keras.Sequential([keras.Input([4]), Counts(), layers.Dense(2)])
    trainer = make_trainer(model, 2, Looks)
    history = trainer.fit(X, Y, batch_size=8, verbose=0).history
    assert history["seen"] == [1]


# Saving and exchanging.

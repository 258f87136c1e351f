"""Losses and weights of shapes and kinds that few programs have."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import (
    Accumulation,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
    window_losses,
)
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.random.default_rng(0).normal(size=[8, 3]).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(*layers):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])


def weights_of(model):
    return [np.asarray(w) for w in model.get_weights()]


class Attention(Trainer):
    """Averages squares with weights that are learnt."""

    others = 0

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        weights = ops.sigmoid(outputs)
        total = ops.sum(weights)
        mean = ops.sum(weights * ops.square(outputs - batch.y)) / total
        losses = {"squares": WeightedLoss(mean, total)}
        for number in range(self.others):
            nothing = 0.0 * ops.mean(outputs)
            losses[f"nothing {number}"] = WeightedLoss(nothing, 8.0)
        return losses


@pytest.mark.parametrize("accumulation", [1, Accumulation(micro_batch_size=8)])
def test_what_a_loss_is_divided_by_has_no_gradient_of_its_own(accumulation):
    results = []
    for others in (0, 1):
        cls = type("Cls", (Attention,), {"others": others})
        model = make_model()
        optimizer = keras.optimizers.SGD(0.5)
        trainer = cls(model, optimizer=optimizer, accumulation=accumulation)
        trainer.fit(X, Y, batch_size=8, verbose=0)
        results.append(weights_of(model))
    for alone, beside in zip(*results, strict=True):
        np.testing.assert_allclose(alone, beside, rtol=1e-5)


class Adds(keras.layers.Layer):
    """Adds a loss of some shape."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def call(self, x):
        self.add_loss(self.of(x))
        return x


class Watched(Trainer):
    """Only looks at the loss."""

    def compute_loss(self, batch, info):
        loss = super().compute_loss(batch, info)
        self.log("seen", loss.mean)
        return loss


MEANS = {
    "in one place": lambda x: ops.reshape(ops.mean(ops.square(x)), [1]),
    "by features": lambda x: ops.mean(ops.square(x), axis=0),
}


@pytest.mark.parametrize("of", MEANS.values(), ids=MEANS.keys())
def test_added_mean_is_refused_whatever_its_shape(of):
    model = make_model(Adds(of))
    trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=2)
    with pytest.raises(ValueError, match="add_loss of"):
        trainer.fit(X, Y, batch_size=4, verbose=0)


def test_added_mean_by_features_is_no_sum_where_it_has_as_many_values():
    """Three features, and micro-batches of three samples or a tail of two."""
    results = []
    for steps, size in ((1, 6), (2, 3), (3, 2)):
        keras.utils.set_random_seed(0)
        model = make_model(keras.layers.Dense(3), Adds(MEANS["by features"]))
        trainer = Watched(
            model,
            optimizer=keras.optimizers.SGD(0.1),
            loss="mse",
            accumulation=steps,
            denominator="samples",
        )
        options = {"batch_size": size, "shuffle": False, "verbose": 0}
        trainer.fit(X[:8], Y[:8], **options)
        results.append(weights_of(model))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_allclose(one, another, rtol=1e-5)


class Kept(keras.Model):
    """Keeps what it computed and added for its metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.error = keras.metrics.Mean(name="error")

    def call(self, x):
        self.computed = self.dense(x)
        self.add_loss(ops.sum(ops.square(self.computed), axis=-1))
        return self.computed

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(self.computed - x)
        self.error.update_state(self.losses[0])
        return self.get_metrics_result()


@keras_3_only("has no losses of a model for its metrics")
def test_metrics_see_what_the_model_has_kept_of_its_last_call():
    model = Kept()
    accumulation = Accumulation(micro_batch_size=4)
    trainer = Trainer(
        model, optimizer="sgd", loss="mse", accumulation=accumulation
    )
    logs = trainer.fit(X, X, batch_size=8, verbose=0).history
    assert np.isfinite(logs["error"]).all()


class LogsOfSeveral(Watched):
    """Has another loss where there are weights."""

    def compute_loss(self, batch, info):
        losses = {"a": super().compute_loss(batch, info)}
        if batch.sample_weight is not None:
            losses["b"] = WeightedLoss(ops.mean(batch.sample_weight), 4.0)
        return losses


def test_kinds_of_batches_have_kinds_of_added_losses_each():
    def squares(x):
        return ops.sum(ops.square(x), axis=-1)

    keras.utils.set_random_seed(0)
    model = make_model(keras.layers.Dense(2), Adds(squares))
    trainer = LogsOfSeveral(
        model,
        optimizer=keras.optimizers.SGD(0.01),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=4),
    )
    trainer.fit(X, Y, batch_size=8, verbose=0)
    history = trainer.fit(X, Y, sample_weight=Y[:, 0] ** 2, verbose=0).history
    assert "b" in str(history.keys())


@pytest.mark.parametrize("of", MEANS.values(), ids=MEANS.keys())
def test_added_mean_of_a_whole_batch_is_that_of_keras(of):
    models = [make_model(Adds(of)), make_model(Adds(of))]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    Trainer(models[0]).fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    models[1].fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for ours, of_keras in zip(*map(weights_of, models), strict=True):
        np.testing.assert_allclose(ours, of_keras, rtol=1e-5)


@pytest.mark.parametrize(
    "squares",
    [
        lambda x: ops.sum(ops.square(x), axis=-1),
        lambda x: ops.reshape(ops.square(x), [-1]),
        lambda x: ops.transpose(ops.square(x)),
    ],
    ids=["a number each", "several each", "features first"],
)
def test_values_of_each_example_are_added_over_micro_batches(squares):
    results = []
    for accumulation in (1, Accumulation(micro_batch_size=2)):
        keras.utils.set_random_seed(0)
        model = make_model(keras.layers.Dense(2), Adds(squares))
        optimizer = keras.optimizers.SGD(0.01)
        trainer = Trainer(
            model, optimizer=optimizer, loss="mse", accumulation=accumulation
        )
        trainer.fit(X, Y, batch_size=8, verbose=0)
        results.append(weights_of(model))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class MasksExamples(keras.layers.Layer):
    """Masks examples whole: those that are all zero."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def compute_mask(self, inputs, previous_mask=None):
        del previous_mask
        return ops.any(inputs != 0, axis=(1, 2))

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_weights_may_have_an_axis_more_than_a_mask_of_examples(
    micro_batch_size,
):
    x = np.random.default_rng(0).normal(size=[4, 2, 3]).astype("float32")
    x[1] = 0
    y = x.sum(axis=2)
    weights = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")

    def make(*layers):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input([2, 3]), dense, *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    order = {"batch_size": 4, "shuffle": False, "verbose": 0}
    ours, of_keras = make(MasksExamples()), make()
    accumulation = Accumulation(micro_batch_size=micro_batch_size)
    trainer = Trainer(ours, accumulation=accumulation)
    trainer.fit(x, y, sample_weight=weights, **order)
    # Keras loses masks on JAX; three of four examples count.
    counted = weights[:, 0] * np.array([4, 0, 4, 4]) / 3
    of_keras.fit(x, y, sample_weight=counted, **order)
    for one, other in zip(*map(weights_of, (ours, of_keras)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1)])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4])
def test_weights_of_steps_may_have_an_axis_more_beside_a_mask(
    shape, micro_batch_size
):
    ids = np.array([[1, 2, 0], [3, 0, 0], [1, 2, 3], [2, 0, 0]])
    weights = np.arange(1.0, 13.0, dtype="float32").reshape(4, 3)
    y = np.ones([4, 3, 1], "float32")

    def make(*, masks):
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input([3], dtype="int32"),
                layers.Embedding(4, 2, mask_zero=masks),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), "mse")
        return model

    # Keras loses masks on JAX. Weights of zero do the same, where it divides by
    # all steps and not by those that count.
    seen = ids > 0
    counted = weights * seen * (seen.size / seen.sum())
    ours, of_keras = make(masks=True), make(masks=False)
    Trainer(
        ours, accumulation=Accumulation(micro_batch_size=micro_batch_size)
    ).fit(
        ids,
        y,
        batch_size=4,
        sample_weight=weights.reshape(shape),
        shuffle=False,
        verbose=0,
    )
    of_keras.fit(
        ids,
        y,
        batch_size=4,
        sample_weight=counted,
        shuffle=False,
        verbose=0,
    )
    pairs = zip(weights_of(ours), weights_of(of_keras), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


class Centralizes(keras.optimizers.SGD):
    """Changes gradients where Keras hands them over on TensorFlow."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(g - ops.mean(g), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


# Keras calls it on TensorFlow alone; elsewhere neither may.
@pytest.mark.parametrize("jit_compile", ["auto", False])
def test_method_of_an_optimizer_that_keras_calls_is_called(jit_compile):
    models = [make_model(), make_model()]
    for model in models:
        model.compile(Centralizes(0.1), "mse")
    Trainer(models[0], accumulation=2, jit_compile=jit_compile).fit(
        X, Y, batch_size=4, shuffle=False, verbose=0
    )
    models[1].fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    for ours, of_keras in zip(*map(weights_of, models), strict=True):
        np.testing.assert_allclose(ours, of_keras, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda e: window_losses.info_nce_loss(e, e),
        lambda e: window_losses.nt_xent_loss(e, e),
        lambda e: window_losses.supervised_contrastive_loss(
            e, ops.zeros([ops.shape(e)[0]], "int32")
        ),
    ],
    ids=["info_nce", "nt_xent", "supervised"],
)
def test_embedding_of_zeros_has_a_finite_gradient(loss):
    class Compares(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return loss(embeddings)

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(2, use_bias=False)]
    )
    x = X[:4].copy()
    x[1] = 0.0
    trainer = Compares(model, optimizer="sgd", accumulation=2)
    trainer.fit(x, Y[:4], batch_size=2, shuffle=False, verbose=0)
    assert trainer.progress.skipped_updates == 0
    assert np.all(np.isfinite(weights_of(model)[0]))


class NamesItsOwn(keras.Sequential):
    """Computes its loss as Keras does, of arguments of other names."""

    def compute_loss(self, inputs, targets, outputs, weights=None, **others):
        del others
        return super().compute_loss(inputs, targets, outputs, weights)


@keras_3_only("names the arguments when it calls compute_loss")
@pytest.mark.parametrize("trainer", [Trainer, Watched])
def test_loss_of_a_model_that_is_only_watched_is_the_same(trainer):
    def make():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(1, kernel_regularizer="l2")
        model = NamesItsOwn([keras.Input([3]), dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    order = {"batch_size": 8, "verbose": 0}
    ours, of_keras = make(), make()
    accumulation = Accumulation(micro_batch_size=4)
    trainer = trainer(ours, accumulation=accumulation, denominator="samples")
    trainer.fit(X, Y, **order)
    of_keras.fit(X, Y, **order)
    for one, other in zip(*map(weights_of, (ours, of_keras)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_model_is_told_of_training_where_it_names_that():
    class Takes(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.told = []

        def call(self, x, **others):
            self.told += list(others)
            return self.dense(x)

    model = Takes()
    Trainer(model, optimizer="sgd", loss="mse").fit(X, Y, verbose=0)
    assert "training" not in model.told


def test_hook_may_belong_to_one_trainer():
    model = make_model()
    trainer = Trainer(model, optimizer="sgd", loss="mse")
    trainer.on_apply = lambda gradients, info: [0.0 * g for g in gradients]
    before = weights_of(model)
    trainer.fit(X, Y, verbose=0)
    for one, other in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(one, other)

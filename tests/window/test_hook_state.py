"""Claims about what hooks draw and keep: `rng`, `track`, variables."""

import numpy as np
import pytest
from hooked import (
    K,
    X,
    Y,
    fit,
    make_trainer,
    numbers,
)

from accumtrainer import (
    Accumulation,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
)
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")


class Noise(Trainer):
    """Logs what it drew, and adds it to the inputs."""

    def on_micro_batch(self, batch, info):
        noise = keras.random.uniform(ops.shape(batch.x), seed=self.rng)
        self.log("lowest", ops.mean(noise), reduce="min")
        self.log("highest", ops.mean(noise), reduce="max")
        self.log("noise", ops.mean(noise))
        return batch._replace(x=batch.x + noise)


def test_random_numbers_are_the_same_for_the_same_seed():
    drawn = []
    for _ in range(2):
        trainer, applied = make_trainer(Noise, seed=7)
        fit(trainer)
        drawn.append(applied.column("noise"))
    assert drawn[0] == drawn[1]


def test_random_numbers_differ_between_seeds():
    drawn = []
    for seed in (7, 8):
        trainer, applied = make_trainer(Noise, seed=seed)
        fit(trainer)
        drawn.append(applied.column("noise"))
    assert not set(drawn[0]) & set(drawn[1])


def test_random_numbers_differ_between_micro_batches_and_windows():
    trainer, applied = make_trainer(Noise)
    fit(trainer, epochs=2)
    assert np.all(
        np.array(applied.column("lowest")) < np.array(applied.column("highest"))
    )
    assert len(set(applied.column("noise"))) == 4


def test_random_numbers_are_those_of_an_eager_run():
    drawn = []
    # XLA draws other numbers than TensorFlow does by itself.
    for options in ({"jit_compile": False}, {"run_eagerly": True}):
        trainer, applied = make_trainer(Noise, **options)
        fit(trainer)
        drawn.append(applied.column("noise"))
    np.testing.assert_allclose(drawn[0], drawn[1], rtol=1e-6)


# Tracked state.


class Tracks(Trainer):
    """Keeps a variable, a layer and a metric of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = self.track(keras.Variable(0.0, name="calls"))
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")
        self.layer.build([None, 3])
        self.track(self.layer)
        self.mean = self.track(keras.metrics.Mean(name="mean"))

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        errors = ops.square(batch.y - outputs)
        target = self.layer(batch.x)
        pull = ops.mean(ops.square(outputs - target))
        if info.training:
            self.calls.assign(self.calls + 1.0)
            self.mean.update_state(batch.x)
        return WeightedLoss(
            ops.mean(errors) + pull, denominator=ops.shape(batch.x)[0]
        )


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}], ids=["compiled", "eager"]
)
def test_tracked_state_changes_with_every_micro_batch(options):
    trainer, _ = make_trainer(Tracks, **options)
    fit(trainer)
    assert float(numbers(trainer.calls)) == 2 * K
    result = float(ops.convert_to_numpy(trainer.mean.result()))
    assert result == pytest.approx(X.mean(), rel=1e-5)


def test_tracked_layers_are_not_trained():
    trainer, _ = make_trainer(Tracks)
    fit(trainer)
    np.testing.assert_array_equal(numbers(trainer.layer.kernel), 1.0)
    np.testing.assert_array_equal(numbers(trainer.layer.bias), 0.0)


def test_skipped_window_undoes_what_hooks_did_to_tracked_state():
    trainer, applied = make_trainer(Tracks)
    x = X.copy()
    x[9] = np.nan
    fit(trainer, x)
    assert applied.column("applied") == [True, False]
    assert float(numbers(trainer.calls)) == K
    result = float(ops.convert_to_numpy(trainer.mean.result()))
    assert result == pytest.approx(X[:8].mean(), rel=1e-5)


def test_validation_leaves_tracked_state_alone():
    trainer, _ = make_trainer(Tracks)
    fit(trainer, validation_data=(X, Y))
    assert float(numbers(trainer.calls)) == 2 * K


def test_after_apply_does_not_run_for_a_skipped_window():
    class Count(Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.count = self.track(keras.Variable(0.0, name="count"))

        def after_apply(self, info):
            self.count.assign(self.count + 1.0)
            self.log("counted", self.count, reduce="max")

    trainer, applied = make_trainer(Count)
    x = X.copy()
    x[1] = np.nan
    fit(trainer, x)
    assert applied.column("applied") == [False, True]
    assert float(numbers(trainer.count)) == 1.0


def test_variable_that_only_predictions_read_is_current():
    temperature = keras.Variable(1.0, trainable=False)

    class Cooled(Trainer):
        def predict_step(self, batch):
            return temperature * self.model(batch.x)

    trainer, _ = make_trainer(Cooled)
    before = trainer.predict(X, verbose=0)
    temperature.assign(3.0)
    np.testing.assert_allclose(
        trainer.predict(X, verbose=0), 3 * before, rtol=1e-5
    )


def test_tracking_after_training_has_begun_is_refused():
    trainer, _ = make_trainer()
    fit(trainer)
    with pytest.raises(RuntimeError, match="track must be called before"):
        trainer.track(keras.Variable(0.0))


# Logged values.


def test_variable_that_a_hook_only_reads_is_current():
    factor = keras.Variable(1.0, trainable=False)

    class Reading(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            self.log("factor", factor.value)
            return WeightedLoss(ops.mean(outputs**2), ops.shape(batch.x)[0])

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    trainer = Reading(model, optimizer="sgd")
    x = np.ones([4, 2], "float32")
    seen = []
    for value in (1.0, 2.0, 3.0):
        factor.assign(value)
        trainer.train_on_batch(x, x[:, :1])
        seen.append(trainer.window_logs["factor"])
        seen.append(
            trainer.evaluate(x, x, verbose=0, return_dict=True)["factor"]
        )
    assert seen == [1, 1, 2, 2, 3, 3]


def test_variable_that_a_hook_writes_must_be_tracked():
    count = keras.Variable(0.0, trainable=False, name="count")

    class Writing(Trainer):
        def after_apply(self, info):
            count.assign(count.value + 1)

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    trainer = Writing(model, optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match=r"write to 'count'.*self.track"):
        trainer.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    trainer = Writing(model, optimizer="sgd", loss="mse")
    trainer.track(count)
    trainer.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, verbose=0)
    assert float(count.value) == 2


class DropsInputs:
    """Draws by a layer that is no part of the model."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.dropout = self.track(keras.layers.Dropout(0.5, seed=3))

    def on_micro_batch(self, batch, info):
        return batch._replace(x=self.dropout(batch.x, training=True))


class LossOfEach(DropsInputs, Trainer):
    def compute_loss(self, batch, info):
        errors = ops.square(self.model(batch.x, training=info.training))
        return WeightedLoss(ops.mean(errors), ops.shape(errors)[0])


class LossOfWindow(DropsInputs, WindowLossTrainer):
    def window_loss(self, embeddings, batch, info):
        return ops.mean(ops.square(embeddings))


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_tracked_layer_draws_the_same_when_a_window_is_embedded_again(
    plan, use_plan
):
    use_plan(plan)
    x = np.random.default_rng(0).normal(size=[12, 6]).astype("float32")
    trained = []
    for cls in (LossOfEach, LossOfWindow):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(2)])
        trainer = cls(
            model,
            optimizer=keras.optimizers.SGD(0.1),
            accumulation=Accumulation(micro_batch_size=4),
        )
        trainer.fit(x, batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)

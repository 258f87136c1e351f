"""Claims about `keras.optimizers.MultiOptimizer`: each member as by itself."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Every, LossScale, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.callbacks.description import describe_training
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="this version of Keras has no MultiOptimizer",
)

X = np.random.default_rng(0).normal(size=[24, 3]).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4, "tanh", name="base"),
            keras.layers.Dense(1, name="head"),
        ]
    )


def make_optimizer(*, head=None, **base):
    """Make one for the layer "head", and another for all else."""
    optimizers = keras.optimizers
    schedule = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    base = {"learning_rate": schedule, "momentum": 0.9} | base
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(**base, name="base"),
            {".*head/.*": head or optimizers.Adam(0.01, name="head")},
        )
    )


def make_trainer(optimizer=None, *, size=4, **options):
    return Trainer(
        make_model(),
        optimizer=optimizer or make_optimizer(),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=size),
        seed=0,
        **options,
    )


def fit(trainer, **options):
    options = {"batch_size": 12, "epochs": 3, "shuffle": False} | options
    return trainer.fit(X, Y, verbose=0, **options)


def by_keras(optimizer, **options):
    """Train on whole batches by Keras's own `fit`."""
    model = make_model()
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(X, Y, 12, epochs=3, shuffle=False, verbose=0, **options)
    return model


def assert_same(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", [12, 4, 5], ids="alone fused uneven".split())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clipnorm": 0.1},
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.02},
        {"use_ema": True, "ema_momentum": 0.5},
        {"weight_decay": 0.1},
    ],
    ids=str,
)
def test_each_member_trains_its_variables_as_in_keras(options, size):
    trainer = make_trainer(
        make_optimizer(**options), size=size, jit_compile=JIT_COMPILE
    )
    fit(trainer)
    assert_same(trainer.model, by_keras(make_optimizer(**options)))


def test_members_may_be_chosen_by_a_function():
    def make():
        members = {"base": keras.optimizers.SGD(0.1)}
        members["head"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(
            lambda variable: members[variable.path.split("/")[-2]]
        )

    trainer = make_trainer(make())
    fit(trainer)
    assert_same(trainer.model, by_keras(make()))


def test_a_compiled_model_brings_its_own():
    model = make_model()
    model.compile(make_optimizer(), "mse")
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=4))
    fit(trainer)
    assert_same(model, by_keras(make_optimizer()))


def test_it_works_inside_fit():
    model = make_model()
    model.compile(make_optimizer(global_clipnorm=0.1), "mse")
    callbacks = [GradientAccumulation(3)]
    model.fit(X, Y, 4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert_same(model, by_keras(make_optimizer(global_clipnorm=0.1)))


def test_the_rate_of_each_is_logged_update_by_update():
    trainer = make_trainer()
    names, rates = ("base", "head"), []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append([logs[f"learning_rate_{n}"] for n in names])

    history = fit(trainer, epochs=2, callbacks=[Watch()]).history
    expected = [(0.1 * 0.5**n, 0.01) for n in range(4)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate_base"], [0.05, 0.0125])
    assert "learning_rate" not in history


def test_names_that_come_again_are_numbered():
    twin = keras.optimizers.SGD(0.2, name="base")
    trainer = make_trainer(make_optimizer(head=twin))
    history = fit(trainer, epochs=1).history
    assert history["learning_rate_base"] == pytest.approx([0.2])
    assert history["learning_rate_base_1"] == pytest.approx([0.05])


def test_the_norm_after_clipping_is_that_of_what_each_leaves():
    head = keras.optimizers.Adam(0.01, global_clipnorm=0.3)
    optimizer = make_optimizer(head=head, global_clipnorm=0.4)
    trainer = make_trainer(optimizer)
    fit(trainer, epochs=1)
    logs = trainer.window_logs
    assert logs["gradient_norm"] > 0.5
    assert logs["clipped_gradient_norm"] == pytest.approx(0.5, rel=1e-5)


def test_gradients_too_large_to_square_are_clipped_by_each():
    optimizer = make_optimizer(
        head=keras.optimizers.SGD(1.0, global_clipnorm=0.3),
        global_clipnorm=0.4,
    )
    trainer = make_trainer(optimizer)
    trainer.fit(X, Y * 1e19, batch_size=12, verbose=0)
    assert trainer.progress.updates == 2
    for weights in trainer.model.get_weights():
        assert np.isfinite(weights).all()


def test_a_skipped_window_leaves_every_member_as_it_was():
    trainer = make_trainer()
    fit(trainer, epochs=1)
    before = [np.array(v) for v in trainer.optimizer.variables]
    trainer.fit(X[:12] * np.nan, Y[:12], batch_size=12, verbose=0)
    after = [np.array(v) for v in trainer.optimizer.variables]
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_loss_scale_is_divided_out_for_all():
    trainer = make_trainer(loss_scale=LossScale(initial=2.0**10))
    fit(trainer)
    assert_same(trainer.model, by_keras(make_optimizer()))


def test_a_run_goes_on_bit_for_bit(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("out of time")

    whole = make_trainer(make_optimizer(use_ema=True))
    fit(whole)
    saving = Checkpoint(tmp_path, every=Every(1, "updates"))
    broken_off = make_trainer(make_optimizer(use_ema=True))
    with pytest.raises(RuntimeError, match="out of time"):
        fit(broken_off, callbacks=[saving, Fail()])
    trainer = make_trainer(make_optimizer(use_ema=True))
    fit(trainer, resume_from=tmp_path)
    for one, two in zip(
        trainer.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_stock_callbacks_move_the_rate_of_every_member():
    head = keras.optimizers.Adam(0.01, name="head")
    trainer = make_trainer(make_optimizer(head=head, learning_rate=0.1))
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=0, min_delta=1e6
    )
    history = fit(trainer, callbacks=[plateau]).history
    first, *_, last = history["learning_rate_base"]
    assert last == pytest.approx(first / 2)
    first, *_, last = history["learning_rate_head"]
    assert last == pytest.approx(first / 2)


def test_averaged_weights_are_swapped_in_for_validation():
    def train(fit):
        swap = keras.callbacks.SwapEMAWeights()
        return fit(callbacks=[swap], validation_data=(X, Y))

    options = {"use_ema": True, "ema_momentum": 0.5, "learning_rate": 0.1}
    trainer = make_trainer(make_optimizer(**options))
    ours = train(lambda **o: fit(trainer, **o)).history["val_loss"]
    model = make_model()
    model.compile(make_optimizer(**options), "mse", jit_compile=False)
    theirs = train(
        lambda **o: model.fit(X, Y, 12, epochs=3, shuffle=False, verbose=0, **o)
    ).history["val_loss"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_description_of_training_has_every_member():
    head, base = describe_training(make_trainer(), {})["optimizer"][
        "optimizers"
    ]
    assert (head["class_name"], head["learning_rate"]) == (
        "Adam",
        pytest.approx(0.01),
    )
    assert base["schedule"]["class_name"] == "ExponentialDecay"

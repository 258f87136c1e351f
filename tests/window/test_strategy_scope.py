"""Claims about Trainers inside the scope of a strategy."""

import contextlib

import numpy as np
import pytest
from quickest import JIT_COMPILE
from replicated import (
    assert_close,
    distributed,
    make_mlp,
    need_devices,
    targets,
    weights_of,
)

from accumtrainer import (
    Accumulation,
    Trainer,
)
from accumtrainer.keras_api import BACKEND, keras


def scope_of_strategy(kind):
    """Make the scope of a strategy, or of JAX's distribution."""
    if kind == "two devices":
        return distributed(2)
    if BACKEND == "jax":
        return keras.distribution.DataParallel(devices=["cpu:0"]).scope()
    need_devices()
    import tensorflow as tf

    if kind == "one device":
        return tf.distribute.OneDeviceStrategy("CPU:0").scope()
    return tf.distribute.MirroredStrategy(["CPU:0"]).scope()


def make_normalized_mlp():
    model = make_mlp()
    model.add(keras.layers.BatchNormalization())
    return model


class Unbuilt(keras.Model):
    """Has no variables before it is called."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.normalization = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.normalization(self.dense(x), training=training)


@pytest.mark.parametrize("first", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_unbuilt_model_of_a_scope_gets_its_variables_and_optimizer_there(
    rng, is_inside, first
):
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 2))
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope_of_strategy("two devices"))
        model = Unbuilt()
        if not is_inside and BACKEND == "tensorflow":
            stack.close()
        options = {"loss": "mse", "jit_compile": JIT_COMPILE}
        trainer = Trainer(model, optimizer="adam", **options)
        if first == "evaluate":
            trainer.evaluate(x, y, verbose=0)
        elif first == "predict":
            trainer.predict(x, verbose=0)
        trainer.fit(x, y, batch_size=8, verbose=0)
        assert trainer.snapshot().progress["updates"] == 2


@pytest.mark.parametrize("jit_compile", ["auto", False])
def test_window_on_two_devices_is_compared_inspected_and_captured(
    rng, jit_compile, tmp_path
):
    x, y = targets(rng, 16)
    x[3] = np.nan
    with distributed(2):
        trainer = Trainer(
            make_mlp(),
            optimizer="adam",
            loss="mse",
            metrics=["mae"],
            accumulation=Accumulation(micro_batch_size=2),
            jit_compile=jit_compile,
        )
        assert trainer.check_equivalence((x[4:12], y[4:12])).is_exact
        trainer.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        trainer.save(tmp_path / "saved")
        before = trainer.progress
        trainer.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert trainer.inspect().first is not None
        trainer.restore(tmp_path / "saved")
        assert trainer.progress == before


@pytest.mark.parametrize("kind", ["one device", "one mirror", "two devices"])
@pytest.mark.parametrize("accumulation", [1, Accumulation(micro_batch_size=4)])
def test_trainer_may_be_used_inside_the_scope(rng, kind, accumulation):
    x, y = targets(rng, 16)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    results = []
    for is_inside in (True, False):
        keras.utils.set_random_seed(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope_of_strategy(kind))
            trainer = Trainer(
                make_normalized_mlp(),
                optimizer="adam",
                loss="mse",
                metrics=["mae"],
                accumulation=accumulation,
                seed=0,
                jit_compile=JIT_COMPILE,
            )
            if not is_inside:
                stack.close()
            history = trainer.fit(x, y, validation_data=(x, y), **fit).history
            results.append(
                [
                    *(history[name] for name in ("loss", "mae", "val_loss")),
                    trainer.train_on_batch(x, y),
                    trainer.evaluate(x, y, verbose=0),
                    trainer.predict(x, verbose=0),
                    *weights_of(trainer),
                ]
            )
    assert_close(*results)


def test_trainer_that_runs_eagerly_may_be_used_inside_the_scope(rng):
    x, y = targets(rng, 16)
    with scope_of_strategy("one mirror"):
        trainer = Trainer(
            make_mlp(), optimizer="adam", loss="mse", run_eagerly=True
        )
        trainer.fit(x, y, batch_size=8, verbose=0)
    assert trainer.progress.updates == 2


def test_equivalence_is_checked_inside_the_scope_and_outside(rng):
    x, y = targets(rng, 16)
    options = {"loss": "mse", "metrics": ["mae"], "accumulation": 2}
    with scope_of_strategy("one mirror"):
        trainer = Trainer(make_mlp(), optimizer="adam", **options)
        assert trainer.check_equivalence((x, y)).is_exact
    assert trainer.check_equivalence((x, y)).is_exact


def test_scope_of_another_strategy_is_refused(rng):
    if BACKEND != "tensorflow":
        pytest.skip("only strategies of TensorFlow are those of models")
    x, y = targets(rng, 16)
    trainer = Trainer(make_mlp(), optimizer="adam", loss="mse")
    for use in (
        lambda: trainer.fit(x, y, verbose=0),
        lambda: trainer.train_on_batch(x, y),
        lambda: trainer.evaluate(x, y, verbose=0),
    ):
        with (
            scope_of_strategy("one mirror"),
            pytest.raises(ValueError, match="scope of another Mirrored"),
        ):
            use()
    trainer.fit(x, y, verbose=0)


@pytest.mark.parametrize("kind", ["one device", "one mirror", "two devices"])
def test_optimizer_may_be_made_outside_of_the_scope(rng, kind):
    x, y = targets(rng, 16)
    optimizers = [
        lambda: keras.optimizers.Adam(0.01),
        keras.optimizers.Adam(0.01),
    ]
    trainers = []
    for make in optimizers:
        keras.utils.set_random_seed(0)
        with scope_of_strategy(kind):
            model = make_mlp()
            optimizer = make() if make is optimizers[0] else make
        trainer = Trainer(
            model,
            optimizer=optimizer,
            loss="mse",
            accumulation=Accumulation(micro_batch_size=4),
            seed=0,
            jit_compile=JIT_COMPILE,
        )
        trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        trainers.append(trainer)
    assert_close(*map(weights_of, trainers))

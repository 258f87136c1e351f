"""Claims about what Trainers that are gone leave behind in a process."""

import gc
import weakref

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Callback, Trainer
from accumtrainer.keras_api import BACKEND, keras, ops

X = np.random.default_rng(0).normal(size=[24, 4]).astype("float32")
Y = X[:, :2] * 2


class PrunedError(Exception):
    """What a tuner raises to end a trial."""


class Pruning(Callback):
    """Ends a training by an error, as the callbacks of tuners do."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise PrunedError


class LoggingTrainer(Trainer):
    """Draws, tracks and logs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = self.track(keras.Variable(0.0, trainable=False))

    def on_micro_batch(self, batch, info):
        noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
        return batch._replace(x=batch.x + noise)

    def after_apply(self, info):
        self.seen.assign_add(info.loss)
        self.log("seen", self.seen.value)


def fit(trainer, **options):
    trainer.fit(
        *(X, Y, 8),
        epochs=3,
        validation_data=(X, Y),
        verbose=0,
        **options,
    )


def fit_pruned(trainer):
    with pytest.raises(PrunedError):
        fit(trainer, callbacks=[Pruning()])


def fit_found(trainer):
    trainer.find_learning_rate(X, Y, 8, updates=6, divergence=1e6)
    fit(trainer)


def answer(trainer):
    fit(trainer)
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X, verbose=0)
    trainer.train_on_batch(X, Y)
    trainer.check_equivalence((X, Y))
    trainer.inspect()


WAYS = {
    "fit": fit,
    "pruned": fit_pruned,
    "rate found": fit_found,
    "answers": answer,
}


def run_trial(way):
    """Make, train and drop a Trainer; return what would show it is kept."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(2),
        ]
    )
    trainer = LoggingTrainer(
        model,
        optimizer="adam",
        loss="mse",
        metrics=["mae"],
        accumulation=Accumulation(micro_batch_size=4),
        jit_compile=JIT_COMPILE,
        seed=0,
    )
    WAYS[way](trainer)
    kept = model, trainer, trainer.optimizer, trainer._engine
    return [weakref.ref(one) for one in kept]


def count_what_is_alive():
    """Count variables, and on JAX the arrays on the device."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), keras.Variable)]
    if BACKEND != "jax":
        return len(found), 0
    import jax

    return len(found), len(jax.live_arrays())


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_trainer_that_is_gone_is_kept(way, plan, use_plan):
    use_plan(plan)
    run_trial(way)  # what all of them share is made now
    before = count_what_is_alive()
    references = run_trial(way)
    after = count_what_is_alive()
    assert [one() for one in references] == [None] * 4
    assert after == before


def test_twenty_trials_in_a_process_leave_as_much_as_one():
    run_trial("fit")
    before = count_what_is_alive()
    for _ in range(20):
        run_trial("pruned")
    assert count_what_is_alive() == before

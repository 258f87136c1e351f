"""Claims about layers that are frozen or unfrozen amid a run."""

import shutil

import numpy as np
import pytest
from quickest import JIT_COMPILE
from slotted import OPTIMIZERS, make_optimizer

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import Checkpoint, KeepGradients, Unfreeze
from accumtrainer.keras_api import keras, ops

X = np.random.default_rng(0).normal(1.0, size=(24, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([3]),
            layers.Dense(4, "tanh", name="base"),
            layers.BatchNormalization(name="statistics"),
            layers.Dense(1, name="head"),
        ],
        name="model",
    )


def make_trainer(*, frozen=("base", "statistics"), optimizer="Adam", **options):
    model = make_model()
    for name in frozen:
        model.get_layer(name).trainable = False
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer, name="one")
    return Trainer(
        model,
        optimizer=optimizer,
        loss="mse",
        **(
            {"accumulation": 2, "seed": 0, "jit_compile": JIT_COMPILE} | options
        ),
    )


def fit(trainer, epochs=1, **options):
    options = {"batch_size": 4, "verbose": 0, "shuffle": False} | options
    return trainer.fit(X, Y, epochs=epochs, **options)


def numbers(variables):
    return {v.path: np.array(ops.convert_to_numpy(v)) for v in variables}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_keeps_what_it_has_of_what_stays(name):
    trainer = make_trainer(optimizer=name)
    fit(trainer)
    before = numbers(trainer.optimizer.variables)
    iterations = int(ops.convert_to_numpy(trainer.optimizer.iterations))
    trainer.model.get_layer("base").trainable = True
    trainer.snapshot()
    after = numbers(trainer.optimizer.variables)
    assert int(ops.convert_to_numpy(trainer.optimizer.iterations)) == iterations
    of_head = {path: v for path, v in before.items() if "head" in path}
    assert of_head
    for path, value in of_head.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert any("base" in path for path in after)


def two_phases_by_hand(optimizer):
    """Train by one Trainer, and go on by another with what the first had."""
    first = make_trainer(optimizer=optimizer)
    fit(first, epochs=2)
    second = make_trainer(frozen=[], optimizer=optimizer)
    second.model.set_weights(first.model.get_weights())
    second.optimizer.build(second.model.trainable_variables)
    before = numbers(first.optimizer.variables)
    for variable in second.optimizer.variables:
        if variable.path in before:
            variable.assign(before[variable.path])
    fit(second, epochs=2)
    return second


@pytest.mark.parametrize("name", ["SGD", "Adam", "Lion"])
def test_a_run_in_two_phases_is_as_if_written_by_hand(name):
    trainer = make_trainer(optimizer=name)
    fit(trainer, epochs=2)
    for layer in trainer.model.layers:
        layer.trainable = True
    fit(trainer, epochs=2)
    by_hand = two_phases_by_hand(name)
    for one, other in zip(
        trainer.model.get_weights(), by_hand.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("unit, n", [("epochs", 2), ("updates", 6)])
def test_the_callback_does_what_two_fits_do(unit, n):
    by_callback = make_trainer()
    unfreeze = Unfreeze(Every(n, unit), ["base", "statistics"])
    fit(by_callback, epochs=4, callbacks=[unfreeze])
    by_hand = make_trainer()
    fit(by_hand, epochs=2)
    for name in ("base", "statistics"):
        by_hand.model.get_layer(name).trainable = True
    fit(by_hand, epochs=2)
    assert_same(
        numbers(by_callback.model.variables), numbers(by_hand.model.variables)
    )


def test_amid_an_epoch_its_means_go_on():
    losses = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

    trainer = make_trainer()
    unfreeze = Unfreeze(Every(1, "updates"), ["base"])
    windows = []

    class Windows(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            windows.append(trainer.window_logs["loss"])

    history = fit(trainer, callbacks=[unfreeze, Watch(), Windows()]).history
    np.testing.assert_allclose(history["loss"][-1], np.mean(windows), rtol=1e-5)


def test_what_a_callback_of_the_user_unfreezes_is_noticed():
    class ByHand(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.get_layer("base").trainable = epoch > 0

    trainer = make_trainer()
    before = numbers(trainer.model.get_layer("base").variables)
    fit(trainer, epochs=1, callbacks=[ByHand()])
    assert_same(numbers(trainer.model.get_layer("base").variables), before)
    fit(trainer, epochs=2, callbacks=[ByHand()])
    after = numbers(trainer.model.get_layer("base").variables)
    assert any((after[path] != before[path]).any() for path in before)


class WithoutLooking(keras.callbacks.Callback):
    """Sets a layer free, and does not look at numbers of the model."""

    looks_at_model = False

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.get_layer("base").trainable = True


AMID_AN_EPOCH = {
    "shipped": lambda: Unfreeze(Every(2, "updates"), ["base"]),
    "user's": WithoutLooking,
}


@pytest.mark.parametrize("kind", AMID_AN_EPOCH)
def test_what_is_set_free_amid_an_epoch_is_trained_from_then_on(kind):
    by_hand, amid = (make_trainer(optimizer="SGD") for _ in range(2))
    by_hand.fit(X[:16], Y[:16], batch_size=4, verbose=0, shuffle=False)
    by_hand.model.get_layer("base").trainable = True
    by_hand.fit(X[16:], Y[16:], batch_size=4, verbose=0, shuffle=False)
    fit(amid, callbacks=[AMID_AN_EPOCH[kind]()])
    assert_same(numbers(amid.model.variables), numbers(by_hand.model.variables))


def test_what_a_callback_enables_after_the_last_window_is_validated():
    class Enable(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and batch == 2:
                layer = self.model.get_layer("head")
                layer.enable_lora(2)
                layer.lora_kernel_b.assign(ops.ones([2, 1]))

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    trainer = make_trainer()
    history = fit(
        trainer, 2, callbacks=[Enable()], validation_data=(X, Y)
    ).history
    expected = trainer.evaluate(X, Y, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("epochs", [1, 3])
def test_runs_go_on_bit_for_bit_from_either_side(epochs, tmp_path):
    def options():
        unfreeze = Unfreeze(Every(2, "epochs"), ["base", "statistics"])
        saving = Checkpoint(tmp_path, every=Every(1, "epochs"))
        return {"callbacks": [unfreeze, saving]}

    whole = make_trainer()
    unfreeze = Unfreeze(Every(2, "epochs"), ["base", "statistics"])
    fit(whole, epochs=4, callbacks=[unfreeze])
    fit(make_trainer(), epochs=epochs, **options())
    trainer = make_trainer()
    fit(trainer, epochs=4, resume_from=tmp_path, **options())
    assert trainer.progress.updates == whole.progress.updates
    assert_same(
        numbers(trainer.model.variables), numbers(whole.model.variables)
    )


def test_data_that_fail_right_after_an_unfreezing_lose_no_update(tmp_path):
    def run(*, fails=False, **options):
        trainer = make_trainer(accumulation=1)
        base = trainer.model.get_layer("base")

        def batches():
            while not (fails and base.trainable):
                yield X[:4], Y[:4]
            raise OSError("the disk is away")

        saving = Checkpoint(tmp_path, every=Every(3, "updates"))
        unfreeze = Unfreeze(Every(2, "epochs"), ["base"])
        trainer.fit(
            batches(),
            epochs=3,
            steps_per_epoch=2,
            callbacks=[saving, unfreeze],
            fast_forward=True,
            verbose=0,
            **options,
        )
        return numbers(trainer.model.variables)

    whole = run()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    with pytest.raises(OSError, match="the disk is away"):
        run(fails=True)
    assert_same(run(resume_from="auto"), whole)


def test_frozen_layers_stay_as_they_are():
    trainer = make_trainer(frozen=[])
    fit(trainer)
    trainer.model.get_layer("base").trainable = False
    before = numbers(trainer.model.get_layer("base").variables)
    fit(trainer)
    assert_same(numbers(trainer.model.get_layer("base").variables), before)


def test_enabling_lora_is_like_unfreezing():
    trainer = make_trainer(frozen=[])
    fit(trainer)
    layer = trainer.model.get_layer("base")
    kernel = np.array(layer.kernel)
    layer.enable_lora(2)
    first = np.array(ops.convert_to_numpy(layer.lora_kernel_b))
    fit(trainer)
    assert (np.array(ops.convert_to_numpy(layer.lora_kernel_b)) != first).any()
    np.testing.assert_array_equal(layer._kernel, kernel)


@pytest.mark.parametrize("name", ["base", "head"])
def test_lora_that_a_callback_enables_amid_an_epoch_is_trained(name):
    def enable(model):
        keras.utils.set_random_seed(1)
        model.get_layer(name).enable_lora(2)

    class Enable(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                enable(self.model)

    by_hand, amid = make_trainer(frozen=[]), make_trainer(frozen=[])
    by_hand.fit(X[:16], Y[:16], batch_size=4, verbose=0, shuffle=False)
    enable(by_hand.model)
    by_hand.fit(X[16:], Y[16:], batch_size=4, verbose=0, shuffle=False)
    fit(amid, callbacks=[Enable()])
    found = numbers(amid.model.variables)
    assert_same(found, numbers(by_hand.model.variables))
    assert found[f"model/{name}/lora_kernel_b"].any()


def test_evaluating_in_between_needs_no_fit():
    trainer = make_trainer(frozen=[])
    fit(trainer)
    before = trainer.evaluate(X, Y, verbose=0)
    trainer.model.get_layer("base").trainable = False
    assert trainer.evaluate(X, Y, verbose=0) == pytest.approx(before)
    predicted = trainer.predict(X, verbose=0)
    assert predicted.shape == (24, 1)


def test_micro_batches_of_a_size_that_is_chosen_are_chosen_anew():
    accumulation = Accumulation(
        micro_batch_size="auto", memory_limit_bytes=2**40
    )
    trainer = make_trainer(accumulation=accumulation, jit_compile=True)
    fit(trainer)
    trainer.model.get_layer("base").trainable = True
    fit(trainer)
    assert trainer.progress.updates == 12


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3, ["base"]), "at must be an Every"),
        ((Every(1, "epochs"), []), "layers must name at least one"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Unfreeze(*arguments)


def test_an_unknown_layer_is_refused_before_training():
    trainer = make_trainer()
    with pytest.raises(ValueError, match="nowhere"):
        fit(trainer, callbacks=[Unfreeze(Every(1, "epochs"), ["nowhere"])])
    assert trainer.progress.updates == 0


def test_members_of_several_optimizers_keep_what_is_theirs():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this version of Keras has no MultiOptimizer")
    optimizers = keras.optimizers
    optimizer = optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.05, momentum=0.9, name="one"),
            {".*head/.*": optimizers.Adam(0.02, name="two")},
        )
    )
    trainer = make_trainer(optimizer=optimizer)
    fit(trainer)
    before = numbers(trainer.optimizer.variables)
    trainer.model.get_layer("base").trainable = True
    fit(trainer, epochs=1)
    after = numbers(trainer.optimizer.variables)
    momenta = [path for path in after if "base" in path and "momentum" in path]
    assert momenta and set(before) < set(after)
    assert list(before) == [p for p in after if p in before]


@pytest.mark.parametrize("trainable", [True, False])
def test_gradients_are_kept_beside_layers_that_are_unfrozen_or_frozen(
    trainable,
):
    model = make_model()
    model.get_layer("base").trainable = not trainable
    trainer = KeepGradients(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=2,
        seed=0,
        jit_compile=JIT_COMPILE,
    )
    at = Every(1, "epochs")
    fit(trainer, 2, callbacks=[Unfreeze(at, ["base"], trainable=trainable)])
    kept = {
        path.removeprefix("model/"): np.array(ops.convert_to_numpy(gradient))
        for path, gradient in trainer.kept_gradients.items()
    }
    assert np.any(kept["head/kernel"])
    assert ("base/kernel" in kept) == (not trainable)
    assert not np.any(kept.get("base/kernel", 0.0))


def test_callback_unfreezes_in_the_model_of_another_trainer_too():
    unfreeze = Unfreeze(at=Every(1, "epochs"), layers=["base"])
    for _ in range(2):
        trainer = make_trainer()
        fit(trainer, epochs=2, callbacks=[unfreeze])
        assert trainer.model.get_layer("base").trainable


def test_callback_leaves_alone_what_is_frozen_again_after_it():
    unfreeze = Unfreeze(at=Every(1, "epochs"), layers=["base"])
    trainer = make_trainer()
    fit(trainer, epochs=2, callbacks=[unfreeze])
    trainer.model.get_layer("base").trainable = False
    fit(trainer, callbacks=[unfreeze])
    assert not trainer.model.get_layer("base").trainable

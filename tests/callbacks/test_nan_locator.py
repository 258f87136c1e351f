"""Claims about NaNLocator and `Trainer.inspect`: they find the culprit."""

import contextlib

import numpy as np
import pytest
from quickest import RUN_EAGERLY
from refusals import assert_refused

from accumtrainer import Batch, LossScale, Trainer, WeightedLoss
from accumtrainer.callbacks import NaNLocator
from accumtrainer.keras_api import keras, ops
from accumtrainer.steps import Report

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

layers = keras.layers


def make_model(*middle):
    return keras.Sequential(
        [keras.Input([3]), layers.Dense(4, name="first"), *middle]
        + [layers.Dense(1, name="last")]
    )


def make_trainer(model=None, cls=Trainer, **options):
    """Make a Trainer that compiles only where that is faster, on JAX."""
    options = {
        "optimizer": "sgd",
        "loss": "mse",
        "accumulation": 4,
        "run_eagerly": RUN_EAGERLY,
    } | options
    return cls(model or make_model(), seed=0, **options)


def fit(trainer, *callbacks, x=X, y=Y, **options):
    """Train, three updates an epoch of 4 micro-batches of 2."""
    options = {"batch_size": 2, "verbose": 0, "shuffle": False} | options
    trainer.fit(x, y, callbacks=list(callbacks), **options)
    return trainer


def bad(array, row):
    """Copy an array, with a NaN in one row."""
    array = array.copy()
    array[row] = np.nan
    return array


def inspect_first(trainer, **options):
    """Train one update that is skipped, and find the first in it."""
    fit(trainer, max_updates=1, steps_per_epoch=4, epochs=1, **options)
    assert trainer.progress.skipped_updates == 1
    return trainer.inspect().first


@contextlib.contextmanager
def warned(match="not finite"):
    with pytest.warns(RuntimeWarning, match=match):
        yield


# What is found.


@pytest.mark.parametrize("part", ["x", "y"])
def test_bad_data_is_found_with_its_row(part):
    data = {part: bad(X if part == "x" else Y, row=5)}
    first = inspect_first(make_trainer(), **data)
    assert (first.stage, first.what) == ("batch", part)
    assert (first.micro_batch, first.rows) == (2, (1,))


def test_bad_entry_of_a_nest_of_inputs_is_named():
    inputs = {name: keras.Input([3], name=name) for name in ("a", "b")}
    outputs = layers.Dense(1)(layers.Add()(list(inputs.values())))
    trainer = make_trainer(keras.Model(inputs, outputs))
    first = inspect_first(trainer, x={"a": X, "b": bad(X, row=0)})
    assert first.what == "x['b']"
    assert first.micro_batch == 0


def test_layer_that_makes_nan_is_found_and_not_those_after_it():
    root = layers.Activation(lambda x: ops.sqrt(-1 - x * x), name="root")
    first = inspect_first(make_trainer(make_model(root)))
    assert first.what == "output of layer root (Activation)"
    assert first.stage == "layer"
    assert first.nans == first.size == 8


def test_layer_inside_a_subclassed_layer_is_found():
    class Inner(layers.Layer):
        def call(self, x):
            return x / 0.0

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = Inner(name="inner")

        def call(self, x):
            return self.inner(x)

    first = inspect_first(make_trainer(make_model(Outer())))
    assert first.what == "output of layer inner (Inner)"
    assert first.infinities == first.size


def test_operation_between_the_layers_of_a_functional_model_is_found():
    inputs = keras.Input([3])
    hidden = ops.log(ops.abs(layers.Dense(4)(inputs)) * 0.0 - 1.0)
    first = inspect_first(
        make_trainer(keras.Model(inputs, layers.Dense(1)(hidden)))
    )
    assert "(Log)" in first.what


def test_layers_of_recurrent_models_are_observed():
    inputs = keras.Input([3])
    hidden = layers.Reshape([3, 1])(inputs)
    hidden = layers.LSTM(2)(hidden)
    hidden = layers.Activation(lambda x: x / 0.0, name="divide")(hidden)
    trainer = make_trainer(keras.Model(inputs, layers.Dense(1)(hidden)))
    first = inspect_first(trainer)
    assert first.what == "output of layer divide (Activation)"
    assert trainer.inspect().unobserved == ""


def test_loss_is_found_where_the_model_is_fine():
    def loss(y, y_pred):
        return ops.mean(ops.sqrt(-1.0 - ops.abs(y_pred)), axis=-1)

    first = inspect_first(make_trainer(loss=loss))
    assert (first.stage, first.what) == ("loss", "loss 'loss'")


def test_gradient_is_found_where_the_forward_pass_is_fine():
    # The root of zero is finite, its slope is not.
    root = layers.Activation(lambda x: ops.sqrt(x * 0.0), name="root")
    trainer = make_trainer(make_model(root))
    first = inspect_first(trainer)
    assert first.stage == "gradient"
    assert first.what.endswith("first/bias")
    stages = {finding.stage for finding in trainer.inspect().findings}
    assert stages == {"gradient"}


def test_hook_that_spoils_a_batch_or_a_gradient_is_found():
    class SpoilBatch(Trainer):
        def on_micro_batch(self, batch, info):
            factor = ops.where(ops.equal(info.index, 1), np.nan, 1.0)
            return batch._replace(x=batch.x * ops.cast(factor, "float32"))

    class SpoilGradient(Trainer):
        def on_accumulate(self, gradients, info):
            return [gradient / 0.0 for gradient in gradients]

    class SpoilSum(Trainer):
        def on_apply(self, gradients, info):
            return [gradient / 0.0 for gradient in gradients]

    first = inspect_first(make_trainer(cls=SpoilBatch))
    assert first.what == "x after on_micro_batch"
    assert first.micro_batch == 1
    first = inspect_first(make_trainer(cls=SpoilGradient))
    assert first.what.endswith("after on_accumulate")
    trainer = make_trainer(cls=SpoilSum)
    assert inspect_first(trainer) is None
    assert "on_apply" in trainer.inspect().verdict


def test_weights_that_were_bad_before_are_found():
    model = make_model()
    model.get_layer("last").bias.assign([np.inf])
    first = inspect_first(make_trainer(model))
    assert first.stage == "variable" and first.micro_batch is None
    assert first.what.endswith("last/bias")


def test_infinity_that_does_no_harm_is_not_blamed():
    class Mask(layers.Layer):
        def call(self, x):
            hidden = ops.where(x > 0, x, -np.inf)
            return ops.where(x > 0, hidden, 0.0)

    class Infinite(layers.Layer):
        def call(self, x):
            return ops.full_like(x, -np.inf)

    class Masked(layers.Layer):
        def __init__(self):
            super().__init__()
            self.infinite = Infinite()

        def call(self, x):
            return ops.maximum(ops.stop_gradient(self.infinite(x)), x)

    first = inspect_first(make_trainer(make_model(Masked())), y=bad(Y, row=4))
    assert (first.what, first.micro_batch) == ("y", 2)
    trainer = make_trainer(make_model(Masked()))
    fit(trainer, y=bad(Y, row=4), epochs=1)
    fit(trainer, epochs=1)
    assert trainer.inspect().first is None


def test_window_can_be_inspected_after_the_state_before_it_was_restored(
    tmp_path,
):
    trainer = make_trainer()
    trainer.save(tmp_path / "begun")
    inspect_first(trainer, x=bad(X, 0))
    trainer.restore(tmp_path / "begun")
    assert trainer.inspect().first is not None


def test_data_in_place_of_a_window_are_refused():
    assert_refused(
        lambda: make_trainer().inspect((X, Y)), TypeError, "window", "a tuple"
    )


def test_loss_scale_that_is_too_high_is_told_from_an_error():
    keras.config.set_dtype_policy("mixed_float16")
    scale = LossScale(initial=2.0**24)
    trainer = make_trainer(loss_scale=scale)
    inspect_first(trainer)
    inspection = trainer.inspect()
    assert inspection.scale_overflows
    assert inspection.loss_scale == 2.0**24
    assert "nothing is wrong" in inspection.verdict
    trainer = make_trainer(loss_scale=scale)
    inspect_first(trainer, y=bad(Y, row=0))
    assert not trainer.inspect().scale_overflows


# That looking changes nothing.


def test_inspecting_leaves_everything_as_it_was():
    def train(looks):
        keras.utils.set_random_seed(1)
        model = make_model(layers.BatchNormalization(), layers.Dropout(0.3))
        trainer = make_trainer(
            model, metrics=["mae"], optimizer="adam", run_eagerly=False
        )
        calls = [layer.call for layer in model.layers]

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if looks:
                    trainer.inspect()

        history = fit(trainer, Look(), y=bad(Y, row=9), epochs=2).model.history
        assert [layer.call for layer in model.layers] == calls
        assert not any("call" in vars(layer) for layer in model.layers)
        values = [ops.convert_to_numpy(v) for v in model.variables]
        return values, history.history

    (plain, plain_history), (looked, history) = train(False), train(True)
    for expected, received in zip(plain, looked, strict=True):
        np.testing.assert_array_equal(expected, received)
    assert plain_history == history


def test_draws_of_hooks_are_repeated():
    class Noisy(Trainer):
        def on_micro_batch(self, batch, info):
            draw = keras.random.uniform((), seed=self.rng)
            self.log("draw", draw, reduce="max")
            # Only what exceeds all that has been drawn before is bad.
            bad = ops.where(draw > 0.9, np.nan, 0.0)
            return Batch(batch.x + ops.cast(bad, "float32"), batch.y)

    trainer = make_trainer(
        cls=Noisy, max_consecutive_skips=None, run_eagerly=False
    )
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            is_bad = trainer.window_logs["draw"] > 0.9
            first = trainer.inspect().first
            found.append(is_bad)
            assert is_bad == (first is not None)

    fit(trainer, Look(), epochs=5)
    assert True in found and False in found


def test_layers_that_cannot_be_observed_do_not_hide_the_rest():
    class Odd(layers.Layer):
        def call(self, x):
            if "call" in vars(self):
                raise TypeError("this layer minds who calls it")
            return x

    trainer = make_trainer(make_model(Odd()))
    first = inspect_first(trainer, y=bad(Y, row=0))
    assert first.what == "y"
    assert "minds who calls it" in str(trainer.inspect())


def test_inspecting_before_training_is_refused():
    with pytest.raises(RuntimeError, match="after a window has run"):
        make_trainer().inspect()


# The callback.


def test_report_is_written_and_training_goes_on(tmp_path):
    locator = NaNLocator(tmp_path / "deep" / "reports")
    trainer = make_trainer(run_eagerly=False)
    with warned(match="micro-batch 3 of 4, x: 3 NaN"):
        fit(trainer, locator, x=bad(X, row=5), epochs=2, max_updates=2)
    (path,) = locator.reports
    assert path.name == "after_update_0_skip_1.txt"
    text = path.read_text()
    assert "First came, in micro-batch 3 of 4, x: 3 NaN" in text
    assert "in row 1" in text
    assert "learning_rate" in text
    assert trainer.progress.updates == 2


def test_last_window_of_all_is_checked_too(tmp_path):
    locator = NaNLocator(tmp_path)
    with warned():
        fit(make_trainer(), locator, y=bad(Y, row=23), epochs=1)
    assert [path.name for path in locator.reports] == [
        "after_update_2_skip_1.txt"
    ]


def test_window_that_ends_training_with_an_error_is_reported(tmp_path):
    locator = NaNLocator(tmp_path)
    trainer = make_trainer(max_consecutive_skips=1)
    with warned(), pytest.raises(ArithmeticError):
        fit(trainer, locator, y=Y * np.nan, epochs=1)
    assert len(locator.reports) == 2


def test_training_stops_at_the_report_if_asked(tmp_path):
    trainer = make_trainer()
    with warned():
        fit(
            trainer,
            NaNLocator(tmp_path, stop=True),
            y=bad(Y, row=8),
            epochs=3,
        )
    assert trainer.progress.micro_batches == 8
    assert trainer.progress.updates == 1


def test_reports_are_few_and_the_rest_is_free(tmp_path, monkeypatch):
    locator = NaNLocator(tmp_path, most_reports=2)
    read, section = set(), Report.section
    counts = []

    def count(self, part):
        read.add(id(self))
        return section(self, part)

    class Count(keras.callbacks.Callback):
        looks_at_model = False

        def on_train_batch_end(self, batch, logs=None):
            counts.append(len(read))

    monkeypatch.setattr(Report, "section", count)
    with warned():
        fit(make_trainer(), locator, Count(), y=Y * np.nan, epochs=1)
    assert len(locator.reports) == 2
    assert counts == [0, 1, 2]


def test_loss_scale_in_search_is_not_reported(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    scale = LossScale(initial=2.0**24)
    trainer = make_trainer(loss_scale=scale, run_eagerly=False)
    fit(trainer, NaNLocator(tmp_path, stop=True), epochs=5)
    assert trainer.progress.skipped_updates
    assert trainer.progress.updates
    assert not list(tmp_path.iterdir())


def test_disk_that_fails_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    locator = NaNLocator(tmp_path / "file")
    trainer = make_trainer()
    with warned(match="x: 3 NaN.* could not be written"):
        fit(trainer, locator, x=bad(X, row=0), epochs=1)
    assert locator.reports == []
    assert trainer.progress.updates == 2


def test_trial_writes_nothing(tmp_path):
    fit(
        make_trainer(),
        NaNLocator(tmp_path),
        y=Y * np.nan,
        fast_dev_run=True,
    )
    assert not list(tmp_path.iterdir())


def test_locator_without_reports_is_refused():
    with pytest.raises(
        ValueError, match="most_reports must be a whole number of at least 1"
    ):
        NaNLocator("reports", most_reports=0)


def test_weighted_loss_of_a_hook_is_named():
    class Two(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            error = ops.mean(ops.square(outputs - batch.y))
            samples = ops.shape(batch.x)[0]
            return {
                "fine": WeightedLoss(error, samples, outputs),
                "broken": WeightedLoss(ops.sqrt(-error - 1.0), samples),
            }

    first = inspect_first(make_trainer(cls=Two, loss=None))
    assert first.what == "loss 'broken'"

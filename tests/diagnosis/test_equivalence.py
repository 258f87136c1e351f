"""Claims about `check_equivalence`: what it measures, and what it blames."""

import re

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer, WeightedLoss, WindowLossTrainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.window_losses import batch_hard_triplet_loss

pytestmark = pytest.mark.usefixtures("without_xla")

layers = keras.layers
SAMPLES = 12


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=[SAMPLES, 5]).astype("float32")
    return x, x[:, :3] ** 2


def make_model(*middle):
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="tanh"),
            *middle,
            layers.Dense(3),
        ]
    )


def check(model, trainer_type=Trainer, batch=None, **options):
    options = {
        "optimizer": "adam",
        "accumulation": Accumulation(micro_batch_size=3),
        "seed": 0,
    } | options
    trainer = trainer_type(model, **options)
    return trainer.check_equivalence(batch or make_batch())


def test_exact_training_is_found_exact():
    found = check(make_model(), loss="mse")
    assert found.is_exact
    assert found.reasons == ()
    assert 0 <= found.largest_error <= 1e-6
    assert (found.samples, found.micro_batches) == (12, 4)
    assert len(found.errors) == 4


@pytest.mark.parametrize("weights", [None, "sample_weight"])
def test_unequal_micro_batches_are_exact(weights):
    x, y = make_batch()
    batch = (x, y) if weights is None else (x, y, np.arange(12.0))
    found = check(
        make_model(),
        loss="mse",
        batch=batch,
        accumulation=Accumulation(micro_batch_size=5),
    )
    assert found.is_exact
    assert found.micro_batches == 3


def test_plain_mean_is_blamed_on_combine():
    found = check(
        make_model(),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=5, combine="mean"),
    )
    assert not found.is_exact
    assert "combine='mean'" in found.reasons[0]
    assert len(found.reasons) == 1


def test_error_is_that_of_the_gradients():
    x, y = make_batch()
    model = keras.Sequential([keras.Input([5]), layers.Dense(3)])
    found = check(
        model,
        loss="mse",
        accumulation=Accumulation(micro_batch_size=8, combine="mean"),
    )
    kernel, bias = model.get_weights()

    def gradients(x, y):
        slope = 2 * (x @ kernel + bias - y) / y.size
        return x.T @ slope, slope.sum(axis=0)

    whole = gradients(x, y)
    parts = gradients(x[:8], y[:8]), gradients(x[8:], y[8:])
    largest = max(np.abs(g).max() for g in whole)
    expected = [
        np.abs((a + b) / 2 - g).max() / largest
        for a, b, g in zip(*parts, whole, strict=True)
    ]
    np.testing.assert_allclose(list(found.errors.values()), expected, rtol=1e-4)


def test_batch_normalization_is_named():
    model = make_model(layers.BatchNormalization(name="norm"))
    found = check(model, loss="mse")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("BatchNormalization (norm)")


def test_dropout_is_named():
    model = make_model(layers.Dropout(0.5, name="drop"))
    found = check(model, loss="mse")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert "Random numbers" in found.reasons[0]
    assert "(drop)" in found.reasons[0]


def test_draws_of_a_hook_are_found():
    class Noisy(Trainer):
        def on_micro_batch(self, batch, info):
            noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
            return batch._replace(x=batch.x + noise)

    found = check(make_model(), Noisy, loss="mse")
    assert not found.is_exact
    assert "(a hook, or a layer" in found.reasons[0]


def test_loss_that_couples_examples_is_found():
    class Spread(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            spread = ops.mean(ops.var(outputs, axis=0))
            return WeightedLoss(spread, ops.shape(outputs)[0])

    found = check(make_model(), Spread)
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("The loss couples examples")


def test_wrong_denominator_is_found():
    x, y = make_batch()
    counts = np.array([1.0, 5, 0, 2, 7, 1, 1, 1, 3, 9, 2, 4], "float32")

    class Tokens(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            squares = ops.mean(ops.square(outputs - batch.y), axis=-1)
            mean = ops.sum(squares * batch.sample_weight) / ops.sum(
                batch.sample_weight
            )
            return WeightedLoss(mean, ops.shape(outputs)[0])

    found = check(make_model(), Tokens, batch=(x, y, counts))
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert "not over what it states" in found.reasons[0]
    assert "some 6 samples count 0.556 times" in found.reasons[0]
    assert "as stated 1 times" in found.reasons[0]


def test_sum_that_is_called_a_mean_is_found():
    def added(y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))

    found = check(make_model(), loss=added, denominator="samples")
    assert found.reasons[0].startswith("The loss adds up over samples")


def test_clipping_each_micro_batch_is_found():
    class Clipped(Trainer):
        def on_accumulate(self, gradients, info):
            return [ops.clip(g, -0.01, 0.01) for g in gradients]

    found = check(make_model(), Clipped, loss="mse")
    assert not found.is_exact
    assert found.reasons[0].startswith("on_accumulate changes")


def test_window_loss_is_exact_where_plain_accumulation_is_not():
    x, _ = make_batch()
    labels = np.repeat(np.arange(3), 4)

    class Hard(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return batch_hard_triplet_loss(embeddings, batch.y)

    class Plain(Trainer):
        def compute_loss(self, batch, info):
            embeddings = self.model(batch.x, training=info.training)
            loss = batch_hard_triplet_loss(embeddings, batch.y)
            return WeightedLoss(loss, ops.shape(batch.x)[0])

    assert check(make_model(), Hard, batch=(x, labels)).is_exact
    assert not check(make_model(), Plain, batch=(x, labels)).is_exact


def test_gradient_that_is_not_a_number_is_not_exact():
    """Of one variable, neither the first nor the last."""
    model = make_model(layers.Dense(8, name="middle"), layers.Dense(8))

    class Spoiled(Trainer):
        def on_accumulate(self, gradients, info):
            return [
                g * np.nan if "middle/bias" in v.path else g
                for g, v in zip(
                    gradients, model.trainable_variables, strict=True
                )
            ]

    found = check(model, Spoiled, loss="mse")
    assert np.isnan(found.largest_error)
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert "are not all finite" in found.reasons[0]
    unequal = [path for path, error in found.errors.items() if np.isnan(error)]
    assert unequal == [model.get_layer("middle").bias.path]
    assert unequal[0] in str(found).splitlines()[2]


def test_nothing_is_changed():
    model = make_model(layers.BatchNormalization(), layers.Dropout(0.5))
    twin = keras.models.clone_model(model)
    twin.set_weights(model.get_weights())
    batch = make_batch()
    before = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    trainer = Trainer(
        model, optimizer="adam", loss="mse", metrics=["mae"], accumulation=4
    )
    trainer.check_equivalence(batch)
    for variable, value in zip(model.variables, before, strict=False):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)
    assert trainer.progress.updates == 0
    assert trainer.progress.micro_batches == 0
    # Training afterwards is what it would have been.
    other = Trainer(
        twin, optimizer="adam", loss="mse", metrics=["mae"], accumulation=4
    )
    for layer, like in zip(model.layers, twin.layers, strict=True):
        if isinstance(layer, layers.Dropout):
            state = layer.seed_generator.state
            like.seed_generator.state.assign(state)
    for one in (trainer, other):
        one.train_on_batch(*batch)
    for a, b in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_single_micro_batch_is_refused():
    with pytest.raises(ValueError, match="at least two micro-batches"):
        check(make_model(), loss="mse", accumulation=1)


@pytest.mark.parametrize(
    ("tolerance", "error"), [(np.ones([12, 1]), TypeError), (-1e-5, ValueError)]
)
def test_what_is_no_tolerance_is_refused(tolerance, error):
    trainer = Trainer(make_model(), optimizer="sgd", loss="mse", accumulation=4)
    pattern = r"tolerance must be .*Received.*check_equivalence\(\(x, y\)\)"
    with pytest.raises(error, match=re.compile(pattern, re.DOTALL)):
        trainer.check_equivalence(make_batch()[0], tolerance)


def test_it_prints_as_a_short_table():
    model = make_model(*(layers.Dense(8) for _ in range(5)))
    printed = str(check(model, loss="mse")).splitlines()
    assert (
        printed[0]
        == "12 samples in 4 micro-batches and at once: the same update."
    )
    assert printed[1].endswith("tolerance 1.0e-05")
    assert printed[-1] == "  and 6 more variables"
    assert len(printed) == 2 + 8 + 1


# Causes that are singled out.


class Sampling(layers.Layer):
    """Draws around what it is given, in evaluation too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x + keras.random.normal(ops.shape(x), seed=self.seed)


def test_noise_of_a_sampling_layer_is_not_blamed_on_the_loss():
    model = make_model(Sampling(name="sampling"))
    found = check(model, loss="mse", denominator="samples")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert "Random numbers" in found.reasons[0]
    assert "(sampling)" in found.reasons[0]


def standardize(x):
    return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


def test_layer_that_couples_examples_is_named_and_not_the_loss():
    model = make_model(layers.Lambda(standardize, name="standardize"))
    found = check(model, loss="mse")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("Layer standardize (Lambda) couples")


def test_loss_that_couples_examples_is_found_behind_batch_statistics():
    def spread(y, p):
        return ops.mean(ops.var(p, axis=0))

    model = make_model(layers.BatchNormalization(name="norm"))
    found = check(model, loss=spread, denominator="samples")
    assert len(found.reasons) == 2
    assert found.reasons[0].startswith("BatchNormalization (norm)")
    assert found.reasons[1].startswith("The loss couples examples")


def test_hook_that_couples_examples_is_found():
    class Centered(Trainer):
        def on_micro_batch(self, batch, info):
            return batch._replace(x=batch.x - ops.mean(batch.x, axis=0))

    found = check(make_model(), Centered, loss="mse")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("on_micro_batch couples examples")


def test_state_that_moves_in_a_forward_pass_is_not_called_random():
    spectral = layers.SpectralNormalization(layers.Dense(8), name="spectral")
    model = make_model(spectral)
    before = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    found = check(model, loss="mse")
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("What layers keep (")
    assert "spectral (Spectral" in found.reasons[0]
    for variable, value in zip(model.variables, before, strict=False):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_rounding_is_told_from_a_cause(policy):
    keras.mixed_precision.set_dtype_policy(policy)
    model = make_model(layers.Dense(8, name="middle"))
    keras.mixed_precision.set_dtype_policy("float32")
    found = check(model, loss="mse", loss_scale=None)
    assert not found.is_exact
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("It is rounding: computed in float64")
    assert model.get_layer("middle").dtype_policy.name == policy


def test_rounding_to_float8_is_told_too_though_some_scales_are_infinite():
    model = make_model(layers.Dense(8, name="middle"))
    for layer in model.layers:
        layer.quantize("float8")
    found = check(model, loss="mse")
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith("It is rounding: computed in float64")


def test_policies_of_a_map_stay_as_they_are():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["head"] = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input([5])
    hidden = layers.Dense(4, name="head", dtype=policies)(inputs)
    outputs = layers.Dense(3, name="other", dtype=policies)(hidden)
    model = keras.Model(inputs, outputs)
    before = [layer.compute_dtype for layer in model.layers]
    trainer = Trainer(model, optimizer="adam", loss="mse", accumulation=4)
    # No error is small enough, so reasons are looked for in float64.
    assert not trainer.check_equivalence(make_batch(), tolerance=0.0).is_exact
    assert [layer.compute_dtype for layer in model.layers] == before
    assert "bfloat16" in before and list(policies) == ["head"]


class WithoutRows(layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=(0, 8), name="table")

    def call(self, x):
        return x + ops.sum(self.table)


def test_weight_without_elements_has_no_error():
    found = check(make_model(WithoutRows()), loss="mse")
    assert found.is_exact
    (table,) = (path for path in found.errors if path.endswith("table"))
    assert found.errors[table] == 0.0

"""Claims about windows that run a second time, at weights that have moved."""

import numpy as np
import pytest
from quickest import JIT_COMPILE
from replicated import assert_close, make_mlp, targets, weights_of
from replicated import make_trainer as make_replicas

from accumtrainer import (
    Accumulation,
    LossScale,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
)
from accumtrainer.keras_api import keras, ops
from accumtrainer.window_losses import nt_xent_loss

layers = keras.layers
PLANS = ["fused", "streamed"]
RNG = np.random.default_rng(0)
X = RNG.normal(size=[12, 6]).astype("float32")
Y = RNG.normal(size=[12, 2]).astype("float32")


class Uphill(Trainer):
    """Moves the weights along the gradient, as far as it is long."""

    factor = 0.1

    def perturb(self, gradients, info):
        self.log("first_loss", info.loss)
        return [self.factor * gradient for gradient in gradients]


class Nowhere(Uphill):
    factor = 0.0


def make_model():
    """Make a model with everything that a second run could change."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([6]),
            layers.SpectralNormalization(layers.Dense(8, activation="tanh")),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(2, kernel_regularizer="l2"),
        ]
    )


def make_trainer(cls, model=None, **options):
    options = {
        "optimizer": keras.optimizers.SGD(0.02, momentum=0.9),
        "loss": "mse",
        "metrics": ["mae"],
        "accumulation": Accumulation(micro_batch_size=3),
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    return cls(model or make_model(), **options)


def state_of(trainer):
    return [
        np.array(ops.convert_to_numpy(variable))
        for variable in [*trainer.model.variables, *trainer.optimizer.variables]
        if "seed" not in variable.path
    ]


class NoisyInputs(Trainer):
    """Draws in a hook, and counts how often that is for good."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.drawn = self.track(keras.Variable(0.0, trainable=False))

    def on_micro_batch(self, batch, info):
        self.drawn.assign_add(1.0)
        noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
        self.log("noise", ops.mean(noise))
        return batch._replace(x=batch.x + 0.1 * noise)


class NoisyNowhere(NoisyInputs):
    def perturb(self, gradients, info):
        return [0.0 * gradient for gradient in gradients]


@pytest.mark.parametrize("plan", PLANS)
def test_a_move_to_nowhere_changes_nothing(plan, use_plan):
    use_plan(plan)
    seen = []
    for cls in (NoisyInputs, NoisyNowhere):
        trainer = make_trainer(cls)
        history = trainer.fit(X, Y, batch_size=12, epochs=2, verbose=0)
        drawn = float(ops.convert_to_numpy(trainer.drawn))
        seen.append(([*state_of(trainer), drawn], history.history))
    assert_close(*(state for state, _ in seen), tolerance=1e-6)
    (_, plain), (_, twice) = seen
    assert seen[0][0][-1] == 8
    assert plain.keys() == twice.keys()
    for name, values in plain.items():
        np.testing.assert_allclose(twice[name], values, rtol=1e-5)


def test_both_plans_make_one_update(use_plan):
    states = []
    for plan in PLANS:
        use_plan(plan)
        trainer = make_trainer(Uphill)
        trainer.fit(X, Y, batch_size=12, epochs=2, verbose=0)
        states.append(state_of(trainer))
    assert_close(*states)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cls", [Uphill, Nowhere])
def test_skipped_update_leaves_the_weights_as_they_were(plan, cls, use_plan):
    use_plan(plan)
    trainer = make_trainer(cls)
    trainer.train_on_batch(X, Y)
    before = state_of(trainer)
    x = X.copy()
    x[7] = np.nan
    trainer.train_on_batch(x, Y)
    assert trainer.progress.skipped_updates == 1
    for one, other in zip(state_of(trainer), before, strict=True):
        np.testing.assert_array_equal(one, other)
    trainer.train_on_batch(X, Y)
    assert trainer.progress.updates == 2
    assert all(np.isfinite(value).all() for value in state_of(trainer))


class MovesToNaN(Uphill):
    factor = np.inf


def test_update_at_weights_that_are_not_finite_is_skipped():
    trainer = make_trainer(MovesToNaN)
    trainer.train_on_batch(X, Y)
    assert trainer.progress.skipped_updates == 1
    assert all(np.isfinite(value).all() for value in state_of(trainer))


@pytest.mark.parametrize("plan", PLANS)
def test_overflow_of_the_first_gradient_halves_the_scale(plan, use_plan):
    use_plan(plan)
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    trainer = make_trainer(
        Uphill, make_mlp_of_two(), loss_scale=LossScale(initial=2.0**24)
    )
    scales = []
    for _ in range(16):
        trainer.train_on_batch(X, Y)
        scales.append(trainer.window_logs["loss_scale"])
    skipped = trainer.progress.skipped_updates
    assert 0 < skipped < 16 and trainer.progress.updates == 16 - skipped
    assert scales[skipped] == 2.0 ** (24 - skipped)
    assert all(np.isfinite(value).all() for value in state_of(trainer))


class LogsGradients(Uphill):
    """Logs how large the gradients are at the weights and beside them."""

    def perturb(self, gradients, info):
        self.log("first_norm", norm(gradients))
        return super().perturb(gradients, info)

    def on_apply(self, gradients, info):
        self.log("second_norm", norm(gradients))
        self.log("kernel", ops.sum(self.model.trainable_variables[0]))
        return gradients


def norm(gradients):
    return ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))


@pytest.mark.parametrize("plan", PLANS)
def test_loss_scale_is_undone_before_weights_move(plan, use_plan):
    use_plan(plan)
    found = []
    for loss_scale in (None, LossScale(initial=64.0)):
        trainer = make_trainer(
            LogsGradients, make_mlp_of_two(), loss_scale=loss_scale
        )
        before = trainer.model.get_weights()[0].sum()
        trainer.train_on_batch(X, Y)
        logs = trainer.window_logs
        # What on_apply sees are the weights as they were.
        assert logs["kernel"] == pytest.approx(before, rel=1e-4, abs=1e-5)
        found.append([logs[k] for k in ("first_norm", "second_norm", "loss")])
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert abs(found[0][0] - found[0][1]) > 1e-3


def make_mlp_of_two():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([6]),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(2),
        ]
    )


class TwoDenominators(Uphill):
    """Has a loss whose denominator depends on the weights."""

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        chosen = ops.cast(outputs[:, 0] > 0.0, "float32")
        errors = ops.sum(ops.square(outputs - batch.y), axis=-1)
        count = ops.sum(chosen)
        return {
            "all": WeightedLoss(ops.mean(errors), ops.shape(errors)[0]),
            "chosen": WeightedLoss(
                ops.divide_no_nan(ops.sum(chosen * errors), count), count
            ),
        }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("cls", [Uphill, TwoDenominators])
@pytest.mark.parametrize("size", [3, 5])
def test_update_is_that_of_the_big_batch(plan, cls, size, use_plan):
    use_plan(plan)
    found = []
    for micro_batch_size in (12, size):
        trainer = make_trainer(
            cls,
            make_mlp_of_two(),
            loss=None if cls is TwoDenominators else "mse",
            metrics=None,
            accumulation=Accumulation(micro_batch_size=micro_batch_size),
        )
        trainer.fit(X, Y, batch_size=12, epochs=3, verbose=0)
        found.append([*state_of(trainer), trainer.window_logs["first_loss"]])
    assert_close(*found)


class UphillContrastive(WindowLossTrainer):
    def embed(self, batch, info):
        return [self.model(batch.x[:, i]) for i in range(2)]

    def window_loss(self, embeddings, batch, info):
        return nt_xent_loss(*embeddings)

    def perturb(self, gradients, info):
        return [0.5 * gradient for gradient in gradients]


@pytest.mark.parametrize("plan", PLANS)
def test_loss_over_a_window_is_taken_beside_the_weights_too(plan, use_plan):
    use_plan(plan)
    found = []
    for size in (6, 2):
        trainer = UphillContrastive(
            make_mlp_of_two(),
            optimizer=keras.optimizers.SGD(0.1),
            accumulation=Accumulation(micro_batch_size=size),
            jit_compile=JIT_COMPILE,
        )
        trainer.train_on_batch(X.reshape([6, 2, 6]))
        found.append(state_of(trainer))
    assert_close(*found)


@pytest.mark.parametrize("samples", [12, 13])
def test_replicas_make_the_update_of_one(samples, rng):
    data = targets(rng, samples)
    found = []
    for replicas in (1, 2):
        trainer = make_replicas(replicas, make_mlp, Uphill)
        for _ in range(2):
            trainer.train_on_batch(*data)
        found.append(weights_of(trainer))
    assert_close(*found)


def test_equivalence_is_checked_where_the_weights_have_moved():
    trainer = make_trainer(Uphill, make_mlp_of_two())
    before = state_of(trainer)
    assert trainer.check_equivalence((X, Y)).is_exact
    assert_close(state_of(trainer)[: len(before)], before, tolerance=0)


def test_moves_of_another_shape_are_refused():
    class Wrong(Trainer):
        def perturb(self, gradients, info):
            return [ops.sum(gradient) for gradient in gradients]

    trainer = make_trainer(Wrong)
    with pytest.raises(TypeError, match="perturb must return"):
        trainer.train_on_batch(X, Y)


def test_hooks_of_micro_batches_run_before_and_after_the_weights_move():
    told = []

    class Told(Trainer):
        def on_accumulate(self, gradients, info):
            told.append("on_accumulate")
            return gradients

        def perturb(self, gradients, info):
            told.append("perturb")
            return gradients

        def on_apply(self, gradients, info):
            told.append("on_apply")
            return gradients

    trainer = make_trainer(Told, run_eagerly=True, jit_compile=False)
    trainer.train_on_batch(X, Y)
    runs = ["on_accumulate"] * 4
    survey = ["on_accumulate", "perturb", "on_apply"]
    assert told == [*survey, *runs, "perturb", *runs, "on_apply"]


class Remembering(Uphill):
    """Counts its moves, and keeps a number that each hook has drawn."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.moves, self.drawn, self.drawn_again = (
            self.track(keras.Variable(0.0, trainable=False, name=name))
            for name in ("moves", "drawn", "drawn_again")
        )

    def perturb(self, gradients, info):
        self.moves.assign_add(1.0)
        self.drawn.assign(keras.random.normal([], seed=self.rng))
        return super().perturb(gradients, info)

    def on_apply(self, gradients, info):
        self.drawn_again.assign(keras.random.normal([], seed=self.rng))
        return gradients


@pytest.mark.parametrize("plan", PLANS)
def test_what_perturb_assigns_stays_unless_the_update_is_skipped(
    plan, use_plan
):
    use_plan(plan)
    x = X.copy()
    x[6] = np.nan
    trainer = make_trainer(Remembering, make_mlp())
    trainer.fit(x, Y, batch_size=4, shuffle=False, verbose=0)
    assert (trainer.progress.updates, trainer.progress.skipped_updates) == (
        2,
        1,
    )
    assert float(trainer.moves.value) == 2.0


@pytest.mark.parametrize("plan", PLANS)
def test_perturb_draws_other_numbers_than_on_apply(plan, use_plan):
    use_plan(plan)
    trainer = make_trainer(Remembering, make_mlp())
    trainer.train_on_batch(X, Y)
    assert float(trainer.drawn.value) != 0.0
    assert float(trainer.drawn.value) != float(trainer.drawn_again.value)


class DropsInputs(Trainer):
    """Draws by a layer that is no part of the model, and moves to nowhere."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.dropout = self.track(layers.Dropout(0.5, seed=3))

    def on_micro_batch(self, batch, info):
        return batch._replace(x=self.dropout(batch.x, training=True))

    def perturb(self, gradients, info):
        self.log("first_loss", info.loss)
        return [0.0 * gradient for gradient in gradients]


@pytest.mark.parametrize("plan", PLANS)
def test_tracked_layer_draws_the_same_in_the_second_run(plan, use_plan):
    use_plan(plan)
    trainer = make_trainer(DropsInputs, make_mlp())
    logs = trainer.fit(X, Y, batch_size=6, epochs=2, verbose=0).history
    np.testing.assert_allclose(logs["first_loss"], logs["loss"], rtol=1e-5)

"""Promise 1 for several outputs, and for what layers add to the loss."""

import functools

import numpy as np
import pytest
from exactness_cases import (
    CLASSES,
    FEATURES,
    L2,
    OUTPUTS,
    REDUCTIONS,
    SOME_SIZES,
    each_size,
    features_and_numbers,
    leaves_variables_unused,
    make_adding,
    make_mlp,
    make_tagger_and_judge,
    outputs_pair,
    regularized_pair,
    tags_and_scores,
    with_weights,
)
from keras_core_gaps import keras_3_only
from oracle import (
    TOLERANCE,
    Pair,
    concatenate,
    cuts_in_many_ways,
)

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras, ops, set_keras_mask

layers, losses = keras.layers, keras.losses

pytestmark = cuts_in_many_ways


# Several outputs.


@each_size()
@leaves_variables_unused
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_different_denominators_are_exact(rng, name, sizes):
    as_dict = "as_dict" in OUTPUTS[name]
    batches = tags_and_scores(rng, sizes, as_dict=as_dict)
    outputs_pair(name).assert_exact(batches)


class LeavingWordsOut(layers.Layer):
    """Has every second word masked, in training only."""

    def call(self, words, training=False):
        places = ops.arange(words.shape[1], dtype=words.dtype)
        return words * (1 - places % 2) if training else words


@functools.cache
def leaving_out_pair():
    return Pair(
        functools.partial(make_tagger_and_judge, prepare=LeavingWordsOut),
        **OUTPUTS["loss weights"],
    )


@each_size()
@leaves_variables_unused
@keras_3_only("masks what a layer of one's own makes otherwise")
def test_masks_that_differ_in_training_count_as_in_training(rng, sizes):
    leaving_out_pair().assert_exact(tags_and_scores(rng, sizes))


class LeavingAnyOut(layers.Layer):
    """Masks what is drawn anew for every micro-batch."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.seed = keras.random.SeedGenerator(5)

    def call(self, values, training=False):
        values = values * 1.0
        if training:
            drawn = keras.random.uniform(ops.shape(values)[:2], seed=self.seed)
            set_keras_mask(values, drawn > 0.4)
        return values


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@keras_3_only("masks what a layer of one's own makes otherwise")
def test_masks_are_drawn_once_for_denominators_and_gradients(
    rng, plan, use_plan
):
    use_plan(plan)
    x = rng.normal(size=[16, 7, 3]).astype("float32")
    y = rng.integers(0, CLASSES, [16, 7]), x[:, 0, :2]
    weights = []
    for count in (1, 2):
        keras.utils.set_random_seed(0)
        inputs = keras.Input([7, 3])
        masked = LeavingAnyOut()(layers.Dense(4)(inputs))
        tags = layers.Dense(CLASSES, activation="softmax")(masked)
        score = layers.Dense(2)(layers.Flatten()(inputs))
        trainer = Trainer(
            keras.Model(inputs, [tags, score][:count]),
            optimizer=keras.optimizers.SGD(1.0),
            loss=["sparse_categorical_crossentropy", "mse"][:count],
            accumulation=Accumulation(micro_batch_size=4),
            seed=0,
        )
        trainer.fit(x, list(y[:count]), batch_size=16, epochs=2, verbose=0)
        weights.append(ops.convert_to_numpy(trainer.model.layers[1].kernel))
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


@each_size(SOME_SIZES)
@pytest.mark.parametrize(
    "name",
    [
        "loss weights",
        "dict and loss weights",
        "means by weight",
        "mean and sum",
    ],
)
def test_outputs_with_weights_of_their_own_are_exact(rng, name, sizes):
    as_dict = "as_dict" in OUTPUTS[name]
    batches = tags_and_scores(rng, sizes, as_dict=as_dict, is_weighted=True)
    outputs_pair(name).assert_exact(batches)


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_weights_of_outputs_that_only_later_data_have_count(
    rng, use_plan, plan
):
    use_plan(plan)
    pair = Pair(
        make_two_headed,
        loss=[
            losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        ],
    )
    batches = [
        (x, (y, y), (w, w**2))
        for x, y, w in with_weights(rng, features_and_numbers(rng, (4, 4)), ())
    ]
    for count in (2, 3, 2):
        pair.assert_exact([batch[:count] for batch in batches])


def make_two_headed():
    x = keras.Input([FEATURES])
    return keras.Model(x, [layers.Dense(CLASSES)(x) for _ in range(2)])


@each_size(((2, 2), (3, 1)))
def test_outputs_under_xla_are_exact(rng, sizes):
    pair = outputs_pair("loss weights", jit_compile=True)
    pair.assert_exact(tags_and_scores(rng, sizes))


def test_output_of_zero_weight_in_one_micro_batch_is_exact(rng):
    batches = tags_and_scores(rng, (2, 3, 2), is_weighted=True)
    _, _, (tag_weights, _) = batches[1]
    tag_weights[:] = 0
    outputs_pair("means by weight").assert_exact(batches)


def test_output_of_zero_weight_in_the_whole_window_is_exact(rng):
    batches = tags_and_scores(rng, (2, 3), is_weighted=True)
    for _, _, (tag_weights, _) in batches:
        tag_weights[:] = 0
    outputs_pair("means by weight").assert_exact(batches)


def test_one_loss_serves_every_output(rng):
    def make_twins():
        keras.utils.set_random_seed(7)
        x = keras.Input([FEATURES])
        return keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)])

    pair = Pair(make_twins, loss="mse")
    batches = [
        (x, (y, 2 * y)) for x, y in features_and_numbers(rng, (3, 1), outputs=2)
    ]
    pair.assert_exact(batches)


@keras_3_only("logs only the sum, where we log each as Keras 3 does")
def test_logs_name_the_losses_of_several_outputs(rng):
    pair = outputs_pair("loss weights")
    batches = tags_and_scores(rng, (4, 1, 2))
    logs = pair.train(batches)
    batch = concatenate(batches)
    expected = pair.twin.test_on_batch(*batch[:2], return_dict=True)
    for name in ("loss", "tags_loss", "score_loss"):
        assert logs[name] == pytest.approx(expected[name], rel=TOLERANCE)


# What layers add to the loss.


@each_size()
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_regularizers_count_once_per_window(rng, reduction, sizes):
    pair = regularized_pair(reduction)
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size(((3,), (2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_of_zero_weights_is_still_regularized(rng, reduction, sizes):
    batches = with_weights(rng, features_and_numbers(rng, sizes))
    for _, _, weights in batches:
        weights[:] = 0
    regularized_pair(reduction).assert_exact(batches)


@functools.cache
def activity_pair(reduction):
    return Pair(
        functools.partial(
            make_mlp, activity_regularizer=L2, kernel_regularizer=L2
        ),
        loss=losses.MeanSquaredError(reduction=reduction),
    )


@each_size(SOME_SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_activity_regularizers_are_means_over_samples(rng, reduction, sizes):
    batches = with_weights(rng, features_and_numbers(rng, sizes))
    activity_pair(reduction).assert_exact(batches)


@functools.cache
def adding_pair(reduce=None, **options):
    return Pair(functools.partial(make_adding, reduce), **options)


@each_size()
@keras_3_only("cannot add a vector to the loss")
def test_vector_given_to_add_loss_is_summed(rng, sizes):
    pair = adding_pair(loss="mse")
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size()
def test_scalar_given_to_add_loss_is_weighed_as_stated(rng, sizes):
    pair = adding_pair(ops.mean, loss="mse", denominator="samples")
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size(SOME_SIZES)
@leaves_variables_unused
def test_model_may_have_added_losses_only(rng, sizes):
    pair = adding_pair(ops.mean, denominator="samples")
    batches = [(x,) for x, _ in features_and_numbers(rng, sizes)]
    pair.assert_exact(batches)


def test_scalar_given_to_add_loss_is_refused_without_denominator(rng):
    pair = Pair(functools.partial(make_adding, ops.mean), loss="mse")
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))

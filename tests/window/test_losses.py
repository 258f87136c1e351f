"""Claims about what a loss is worth, on numbers done by hand."""

import functools

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer.keras_api import (
    BACKEND,
    copy_mask,
    keras,
    keras_mask,
    noting_activity,
    ops,
)
from accumtrainer.window.added_losses import AddedLosses
from accumtrainer.window.compiled_losses import CompiledLoss
from accumtrainer.window.losses import (
    WeightedLoss,
    count_samples,
    logged,
    measure,
    minimized,
)

layers, losses = keras.layers, keras.losses

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")

# Squared errors per row: 1, 4, 9, 16.
TRUE = np.zeros([4, 1], "float32")
PRED = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
WEIGHTS = np.array([1.0, 0.5, 0.0, 2.0], "float32")

# Squared errors per token: 1, 4, 9 and 16, 25, 36.
TOKENS_TRUE = np.zeros([2, 3, 1], "float32")
TOKENS_PRED = np.arange(1.0, 7.0, dtype="float32").reshape([2, 3, 1])
TOKEN_MASK = np.array([[True, True, False], [True, False, False]])


def mse(reduction):
    return losses.MeanSquaredError(reduction=reduction)


def masked(pred=TOKENS_PRED, mask=TOKEN_MASK):
    """Return predictions with a mask, as a model's output carries one."""
    x = ops.convert_to_tensor(np.where(mask[..., None], pred, 0.0))
    output = layers.Masking()(x)
    assert keras_mask(output) is not None
    return output


def numbers(loss):
    """Read mean and denominator."""
    return float(loss.mean), float(loss.denominator)


# Reductions.


@pytest.mark.parametrize("reduction", MEANS)
def test_mean_of_samples_is_divided_by_their_number(reduction):
    loss = measure(mse(reduction), TRUE, PRED)
    assert numbers(loss) == pytest.approx((30 / 4, 4))


def test_sum_has_no_denominator():
    loss = measure(mse("sum"), TRUE, PRED)
    assert loss.is_sum
    assert float(loss.mean) == pytest.approx(30)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean"])
def test_sample_weights_do_not_change_what_a_plain_mean_is_divided_by(
    reduction,
):
    loss = measure(mse(reduction), TRUE, PRED, WEIGHTS)
    assert numbers(loss) == pytest.approx(((1 + 2 + 0 + 32) / 4, 4))


def test_mean_with_sample_weight_is_divided_by_their_sum():
    loss = measure(mse("mean_with_sample_weight"), TRUE, PRED, WEIGHTS)
    assert numbers(loss) == pytest.approx((35 / 3.5, 3.5))


def test_sum_is_weighted():
    loss = measure(mse("sum"), TRUE, PRED, WEIGHTS)
    assert float(loss.mean) == pytest.approx(35)


def test_zero_weights_are_a_mean_of_zero_over_nothing():
    zeros = np.zeros([4], "float32")
    loss = measure(mse("mean_with_sample_weight"), TRUE, PRED, zeros)
    assert numbers(loss) == (0, 0)


# Tokens and masks.


@pytest.mark.parametrize("reduction", MEANS)
def test_mean_of_tokens_is_divided_by_their_number(reduction):
    loss = measure(mse(reduction), TOKENS_TRUE, TOKENS_PRED)
    assert numbers(loss) == pytest.approx((91 / 6, 6))


@pytest.mark.parametrize("reduction", MEANS)
def test_mean_of_masked_tokens_is_divided_by_the_unmasked(reduction):
    loss = measure(mse(reduction), TOKENS_TRUE, masked())
    assert numbers(loss) == pytest.approx(((1 + 4 + 16) / 3, 3))


def test_sum_leaves_masked_tokens_out():
    loss = measure(mse("sum"), TOKENS_TRUE, masked())
    assert float(loss.mean) == pytest.approx(21)


@pytest.mark.parametrize("reduction", MEANS)
def test_padding_alone_is_a_mean_of_zero_over_nothing(reduction):
    nothing = np.zeros_like(TOKEN_MASK)
    loss = measure(mse(reduction), TOKENS_TRUE + 1, masked(mask=nothing))
    assert numbers(loss) == (0, 0)


def test_mask_and_token_weights_are_multiplied():
    weights = np.array([[2.0, 1.0, 5.0], [0.5, 5.0, 5.0]], "float32")
    loss = measure(
        mse("mean_with_sample_weight"), TOKENS_TRUE, masked(), weights
    )
    assert numbers(loss) == pytest.approx(((2 + 4 + 8) / 3.5, 3.5))


def test_plain_mean_of_masked_weighted_tokens_is_divided_by_the_unmasked():
    weights = np.array([[2.0, 1.0, 5.0], [0.5, 5.0, 5.0]], "float32")
    loss = measure(mse("mean"), TOKENS_TRUE, masked(), weights)
    assert numbers(loss) == pytest.approx((14 / 3, 3))


def test_sample_weights_count_once_per_token():
    # Keras divides by 2.5 here, the sum of the weights as they were given.
    # A window needs only the ratio of its micro-batches' denominators.
    weights = np.array([[2.0], [0.5]], "float32")
    loss = measure(
        mse("mean_with_sample_weight"), TOKENS_TRUE, TOKENS_PRED, weights
    )
    total = 2 * (1 + 4 + 9) + 0.5 * (16 + 25 + 36)
    assert numbers(loss) == pytest.approx((total / 2.5, 3 * 2.5))


def test_ignored_class_does_not_count():
    labels = np.array([0, 1, 2, 1])
    pred = np.full([4, 3], 1 / 3, "float32")
    loss = losses.SparseCategoricalCrossentropy(ignore_class=1)
    assert numbers(measure(loss, labels, pred)) == pytest.approx((np.log(3), 2))


def test_values_per_element_are_divided_by_the_elements():
    pred = np.ones([4, 3], "float32")
    compiled = CompiledLoss(lambda y, p: (y - p) ** 2)
    ((_, loss, _),) = compiled(np.zeros([4, 3], "float32"), pred)
    assert numbers(loss) == pytest.approx((1, 12))


# Whether equal shapes mean equal denominators.


@pytest.mark.parametrize("reduction", (*MEANS, "sum"))
def test_unmasked_unweighted_denominator_depends_on_shapes_alone(reduction):
    assert measure(mse(reduction), TRUE, PRED).is_uniform


@pytest.mark.parametrize("reduction", MEANS)
def test_masked_denominator_does_not_depend_on_shapes_alone(reduction):
    assert not measure(mse(reduction), TOKENS_TRUE, masked()).is_uniform


def test_ignored_classes_do_not_depend_on_shapes_alone():
    loss = losses.SparseCategoricalCrossentropy(ignore_class=1)
    pred = np.full([4, 3], 1 / 3, "float32")
    assert not measure(loss, np.array([0, 1, 2, 1]), pred).is_uniform


@pytest.mark.parametrize(
    "reduction, is_uniform",
    [("mean", True), ("mean_with_sample_weight", False)],
)
def test_sample_weights_matter_only_to_the_mean_by_weight(
    reduction, is_uniform
):
    loss = measure(mse(reduction), TRUE, PRED, WEIGHTS)
    assert loss.is_uniform is is_uniform


# Losses nobody can weigh.


class OfRows(losses.Loss):
    """Has a call of its own that leaves a number for each row."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.square(y_true - y_pred), axis=-1)


@pytest.mark.parametrize("loss", [mse("none"), mse(None), OfRows()])
def test_loss_without_reduction_is_a_sum_where_keras_takes_it(loss):
    if BACKEND == "tensorflow":
        measured = measure(loss, TRUE, PRED)
        assert measured.is_sum
        assert float(minimized(measured)) == 30
        assert [*map(float, logged(measured))] == [30 / 4, 4]
        return
    with pytest.raises(ValueError, match=r"a reduction.* of shape \(4,\)"):
        measure(loss, TRUE, PRED)


def test_loss_without_reduction_may_reduce_by_itself():
    class Reduced(losses.Loss):
        def call(self, y_true, y_pred):
            return ops.mean(ops.square(y_true - y_pred))

    loss = measure(Reduced(reduction="none"), TRUE, PRED)
    assert not isinstance(loss, WeightedLoss)
    assert float(loss.value) == pytest.approx(30 / 4)


def test_function_that_reduces_by_itself_gives_a_bare_scalar():
    compiled = CompiledLoss(lambda y, p: ops.mean((y - p) ** 2))
    ((_, loss, _),) = compiled(TRUE, PRED)
    assert not isinstance(loss, WeightedLoss)
    assert float(loss.value) == pytest.approx(30 / 4)


def test_loss_with_a_call_of_its_own_gives_a_bare_scalar():
    class Strange(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.sum(y_pred)

    assert not isinstance(measure(Strange(), TRUE, PRED), WeightedLoss)


def test_dice_gives_a_bare_scalar():
    pred = ops.convert_to_tensor(np.full([2, 3], 0.5, "float32"))
    assert not isinstance(measure(losses.Dice(), pred, pred), WeightedLoss)


# Compiled losses.


def test_weight_of_a_single_loss_is_its_coefficient():
    ((_, loss, coefficient),) = CompiledLoss("mse", 0.5)(TRUE, PRED)
    assert coefficient == 0.5
    assert numbers(loss) == pytest.approx((30 / 4, 4))


def test_losses_of_a_list_are_named_after_the_outputs():
    compiled = CompiledLoss(["mse", "mae"], [2.0, 3.0], ["a", "b"])
    measured = compiled([TRUE, TRUE], [PRED, PRED])
    assert [part.name for part in measured] == ["a_loss", "b_loss"]
    assert [part.coefficient for part in measured] == [2.0, 3.0]
    assert float(measured[1].loss.mean) == pytest.approx(10 / 4)


def test_losses_that_share_a_name_are_all_there():
    compiled = CompiledLoss(["mse", "mae"], [2.0, 3.0], ["a", "a"])
    measured = compiled([TRUE, TRUE], [PRED, PRED])
    assert [part.name for part in measured] == ["a_loss", "a_loss"]
    assert float(measured[0].loss.mean) == pytest.approx(30 / 4)
    assert float(measured[1].loss.mean) == pytest.approx(10 / 4)


def test_losses_of_a_dict_are_paired_by_name():
    compiled = CompiledLoss(
        {"b": "mae", "a": "mse"}, {"a": 2.0, "b": 3.0}, ["a", "b"]
    )
    measured = compiled({"a": TRUE, "b": TRUE}, {"a": PRED, "b": PRED})
    parts = {part.name: part for part in measured}
    assert float(parts["a_loss"].loss.mean) == pytest.approx(30 / 4)
    assert parts["a_loss"].coefficient == 2.0
    assert parts["b_loss"].coefficient == 3.0


def test_losses_left_out_of_loss_weights_count_once():
    compiled = CompiledLoss({"a": "mse", "b": "mae"}, {"a": 2.0}, ["a", "b"])
    measured = compiled({"a": TRUE, "b": TRUE}, {"a": PRED, "b": PRED})
    assert sorted(part.coefficient for part in measured) == [1.0, 2.0]


def test_output_without_loss_is_left_out():
    compiled = CompiledLoss([None, "mae"], None, ["a", "b"])
    ((_, loss, _),) = compiled([TRUE, TRUE], [PRED, PRED])
    assert float(loss.mean) == pytest.approx(10 / 4)


def test_every_output_has_sample_weights_of_its_own():
    loss = mse("mean_with_sample_weight")
    compiled = CompiledLoss([loss, loss], None, ["a", "b"])
    measured = compiled([TRUE, TRUE], [PRED, PRED], [WEIGHTS, 2 * WEIGHTS])
    denominators = [float(part.loss.denominator) for part in measured]
    assert denominators == pytest.approx([3.5, 7])


def test_second_evaluation_measures_its_own_batch():
    compiled = CompiledLoss("mse")
    compiled(TRUE, PRED)
    (part,) = compiled(TRUE[:2], PRED[:2])
    loss = part.loss
    assert numbers(loss) == pytest.approx((5 / 2, 2))


def test_unknown_name_in_loss_weights_is_refused():
    with pytest.raises(ValueError, match=r"loss_weights for \['c'\]"):
        CompiledLoss({"a": "mse", "b": "mse"}, {"c": 1.0}, ["a", "b"])


def test_more_loss_weights_than_losses_are_refused():
    with pytest.raises(ValueError, match="one entry per loss"):
        CompiledLoss(["mse", "mse"], [1.0, 2.0, 3.0], ["a", "b"])


@pytest.mark.parametrize(
    "labels, outputs, expected",
    [
        (np.array([0, 1]), 3, "sparse_categorical_crossentropy"),
        (np.array([[0], [1]]), 3, "sparse_categorical_crossentropy"),
        (np.eye(3)[:2].astype("float32"), 3, "categorical_crossentropy"),
        (np.array([[0.0], [1.0]], "float32"), 1, "binary_crossentropy"),
    ],
)
@pytest.mark.parametrize("name", ["crossentropy", "ce"])
def test_crossentropy_is_the_one_that_fits(name, labels, outputs, expected):
    pred = np.full([2, outputs], 0.3, "float32")
    ((_, loss, _),) = CompiledLoss(name)(labels, pred)
    ((_, other, _),) = CompiledLoss(expected)(labels, pred)
    assert float(loss.mean) == float(other.mean)


@pytest.mark.parametrize("true_shape", [(4,), (4, 1)])
@pytest.mark.parametrize("pred_shape", [(4,), (4, 1)])
def test_function_meets_targets_in_the_rank_of_predictions(
    true_shape, pred_shape
):
    compiled = CompiledLoss(lambda y, p: (y - p) ** 2)
    true = ops.convert_to_tensor(TRUE.reshape(true_shape))
    pred = ops.convert_to_tensor(PRED.reshape(pred_shape))
    ((_, loss, _),) = compiled(true, pred)
    assert numbers(loss) == pytest.approx((30 / 4, 4))


# What layers add.


class Adds(layers.Layer):
    def __init__(self, reduce):
        super().__init__()
        self._reduce = reduce

    def call(self, inputs):
        self.add_loss(self._reduce(inputs))
        return inputs


X = np.array([[1.0, 2.0], [3.0, 4.0]], "float32")


def called(*stack):
    model = keras.Sequential([keras.Input([2]), *stack])
    model(X)
    return model


def added_by(model):
    """Call a model, and collect what its layers add."""
    with noting_activity(model) as of_activity:
        model(X)
    return AddedLosses(model).collect(of_activity(), len(X))


class AddsAndIsRegularized(Adds):
    """A layer that adds a loss beside that of its activity regularizer."""

    def __init__(self, reduce):
        super().__init__(reduce)
        self.activity_regularizer = keras.regularizers.L1(0.5)


@keras_3_only("does not divide activity regularizers by the batch size")
@pytest.mark.parametrize(
    "reduce, expected",
    [
        (ops.mean, ["activity", "bare"]),
        (lambda x: ops.sum(x, axis=-1), ["activity", "sum"]),
    ],
)
@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_layer_adds_is_told_from_its_activity(reduce, expected, calls):
    layer = AddsAndIsRegularized(reduce)
    x = keras.Input([2])
    y = x
    for _ in range(calls):
        y = layer(y)
    model = keras.Model(x, y)
    regularizer = layer.activity_regularizer
    with noting_activity(model):
        assert layer.activity_regularizer.l1 == 0.5
    for _ in range(2):  # what the first call added is no more
        added, _ = added_by(model)
        assert sorted(kind for kind, _ in added) == sorted(expected * calls)
        activity = [v for kind, v in added if kind == "activity"]
        assert list(map(float, activity)) == [0.5 * 10 / 2] * calls
    assert layer.activity_regularizer is regularizer


def test_model_without_extras_adds_nothing():
    added, regularization = AddedLosses(called(layers.Dense(1))).collect()
    assert added == []
    assert regularization is None


def test_scalar_added_by_a_layer_says_nothing_of_its_denominator():
    ((kind, value),), _ = AddedLosses(called(Adds(ops.mean))).collect()
    assert (kind, float(value.value)) == ("bare", 2.5)


def test_activity_regularizer_is_a_mean_over_samples():
    regularizer = functools.partial(layers.ActivityRegularization, l1=0.5)
    ((kind, value),), _ = added_by(called(regularizer()))
    assert (kind, float(value)) == ("activity", 0.5 * 10 / 2)


def test_weight_regularizers_are_added_up_apart():
    ones = {"kernel_initializer": "ones", "use_bias": False}
    dense = [
        layers.Dense(2, kernel_regularizer=keras.regularizers.L1(0.1), **ones),
        layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5), **ones),
    ]
    added, regularization = AddedLosses(called(*dense)).collect()
    assert added == []
    number = ops.convert_to_numpy(regularization)
    assert number == pytest.approx(0.1 * 4 + 0.5 * 2)


def test_frozen_weights_are_not_regularized():
    dense = layers.Dense(2, kernel_regularizer="l2")
    dense.trainable = False
    _, regularization = AddedLosses(called(dense)).collect()
    assert regularization is None


def test_kinds_are_told_apart_in_one_model():
    model = called(
        layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2"),
        Adds(ops.mean),
        keras.Sequential([layers.ActivityRegularization(l2=0.1)]),
        Adds(lambda x: x[:, 0]),
    )
    added, regularization = added_by(model)
    kinds = [kind for kind, _ in added]
    assert sorted(kinds) == ["activity", "activity", "bare", "sum"]
    assert ops.convert_to_numpy(regularization) > 0


# Small things.


def test_samples_are_counted_along_the_first_axis():
    assert float(count_samples({"a": None, "b": np.zeros([5, 2])})) == 5


def test_mask_is_copied_only_where_there_is_one():
    source, target = masked(), ops.ones([2, 3])
    assert keras_mask(copy_mask(ops.ones([2, 3]), target)) is None
    copied = keras_mask(copy_mask(source, target))
    np.testing.assert_array_equal(ops.convert_to_numpy(copied), TOKEN_MASK)

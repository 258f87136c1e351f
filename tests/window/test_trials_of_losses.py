"""Claims about the numbers that a loss of the user's is tried with.

They have to reach what couples examples, as labels and pixels of data do, and
must not make a loss look coupled that has another value there by rounding, by
a lookup that fails, or not at all.
"""

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.steps import make_backend
from accumtrainer.window import reducing

pytestmark = pytest.mark.usefixtures("without_xla")


def of_unlabelled(y, p):
    """Divide by how many numbers are -1, which means that there are none."""
    is_unlabelled = ops.cast(y < 0, p.dtype)
    values = ops.mean(ops.square(y - p) * (1 - is_unlabelled), axis=-1)
    share = ops.maximum(ops.mean(is_unlabelled), 0.1)
    return values + ops.mean(ops.square(p) * is_unlabelled, axis=-1) / share


def by_share_of_label(label):
    def loss(y, p):
        is_label = ops.cast(ops.equal(y, label), p.dtype)
        errors = ops.mean(ops.abs(y - p) * (1 + is_label), axis=-1)
        return errors / ops.maximum(ops.mean(is_label), 0.1)

    return loss


def by_share_of_bright(y, p):
    is_bright = ops.cast(y > 127, p.dtype)
    errors = ops.mean(ops.square((y - p) / 255) * is_bright, axis=-1)
    return errors / ops.maximum(ops.mean(is_bright), 0.1)


def by_distance(y, p):
    distances = ops.log(p + ops.sqrt(p * p - 1.0))
    return ops.mean(ops.square(distances - y), axis=-1) / ops.mean(distances)


def of_logarithm_by_size(y, p):
    errors = ops.square(ops.log(p - 1.0) - y)
    return ops.mean(errors, axis=-1) / ops.shape(y)[0]


def of_rest_by_largest(y, p):
    rest = ops.sqrt(1.0 - ops.sum(y, axis=-1))
    return ops.mean(ops.square(p), axis=-1) * rest / ops.max(rest)


def by_size_beside_a_constant(y, p):
    return 1e4 + ops.mean(ops.square(y - p), axis=-1) / ops.shape(y)[0]


def of_one_class_by_share(y, p):
    """Weigh a class of labels that are looked up in outputs."""
    is_class = ops.cast(ops.equal(y, 2), p.dtype)
    weights = 1 + is_class / ops.maximum(ops.mean(is_class), 0.1)
    return weights * of_class(y, p)


def of_class(y, p):
    """Look up labels in outputs of all examples in a row."""
    rows = ops.arange(ops.shape(p)[0]) * ops.shape(p)[1]
    scores = ops.reshape(ops.log_softmax(p), [-1])
    return -ops.take(scores, rows + ops.cast(y, "int32"))


def of_class_by_share_of_known(mask):
    """Make a mean over labels that are not masked, as a mean in a batch."""

    def loss(y, p):
        is_known = ops.not_equal(y, mask)
        values = of_class(ops.where(is_known, y, 0), p)
        is_known = ops.cast(is_known, p.dtype)
        return values * is_known / ops.mean(is_known)

    return loss


def of_what_is_no_padding(y, p):
    is_known = ops.cast(ops.not_equal(y, 0), p.dtype)
    values = ops.sparse_categorical_crossentropy(
        ops.cast(y, "int32"), p, from_logits=True
    )
    return values * is_known / ops.maximum(ops.mean(is_known), 1e-3)


def of_positives_by_size(y, p):
    is_positive = ops.cast(ops.equal(y, 1), p.dtype)
    return ops.sum(-is_positive * ops.log(p), axis=-1) / ops.shape(p)[0]


def of_relative_errors(y, p):
    """Take from 1 what is all but 1 in long rows."""
    return ops.sum(ops.abs(y - p), axis=-1) / ops.sum(ops.abs(y), axis=-1) - 1


def of_noise(y, p):
    errors = ops.sum(ops.square(y - p), axis=-1)
    return -ops.log(ops.sum(y * y, axis=-1) / errors)


def of_action(y, p):
    """Look up an action in outputs of all examples; its return is beside it."""
    rows = ops.arange(ops.shape(p)[0]) * ops.shape(p)[1]
    places, values = rows + ops.cast(y[:, 0], "int32"), ops.reshape(p, [-1])
    # TensorFlow has no indices that are tensors.
    is_taken = BACKEND == "tensorflow"
    values = ops.take(values, places) if is_taken else values[places]
    return ops.square(values - y[:, 1])


def of_action_if_known(y, p):
    return ops.where(y[:, 0] < 0, 0.0, of_action(y, p))


def of_action_by_share_of_known(y, p):
    is_known = ops.cast(y[:, :1] >= 0, p.dtype)
    values = of_action(ops.maximum(y, 0), p) * is_known[:, 0]
    return values / ops.mean(is_known)


def of_places(y, p):
    """Look up places in rows of outputs, of which 255 is none."""
    is_known = y < 255
    rows = ops.arange(ops.shape(p)[0])[:, None] * ops.shape(p)[1]
    places = rows + ops.cast(ops.where(is_known, y, 0), "int32")
    values = ops.take(ops.reshape(p, [-1]), places)
    return ops.sum(ops.where(is_known, ops.square(values - 1), 0), axis=-1)


def of_unlabelled_by_mean(y, p):
    """Compare outputs of what is unlabelled with what they are on average."""
    squares = ops.square(p - ops.mean(p, axis=0))
    return ops.where(ops.equal(y, -1), ops.mean(squares, axis=-1), 0)


def by_iou(y, p):
    """Divide by what is all but zero with numbers of both signs."""
    shared, of_targets, of_outputs = (
        ops.sum(pixels, axis=(1, 2)) for pixels in (y * p, y, p)
    )
    return 1 - shared / (of_targets + of_outputs - shared)


def by_table(y, p):
    weights = ops.take(ops.array([1.0, 3.0]), ops.cast(y, "int32"))
    return ops.mean(weights * ops.square(y - p), axis=-1)


def of_labelled(y, p):
    is_labelled = ops.cast(ops.not_equal(y, -1), p.dtype)
    errors = ops.sum(ops.square(y - p) * is_labelled, axis=-1)
    return errors / ops.sum(is_labelled, axis=-1)


def of_counts(y, p):
    return ops.mean(p - y * ops.log(p), axis=-1)


def of_squares(y, p):
    """Compute a variance in a way that loses digits, beside a constant."""
    errors = y - p
    squares = ops.mean(errors * errors, axis=-1)
    return 1e4 + squares - ops.square(ops.mean(errors, axis=-1))


class Own(keras.losses.Loss):
    def __init__(self, function, **options):
        super().__init__(**options)
        self.call = function


ROWS = {"labels": (24,), "column": (24, 1), "columns": (24, 3)}
ROWS |= {f"row of {n}": (24, n) for n in (300, 1000, 1600, 2000)}
ROWS |= {"pairs": (24, 2), "classes": (24, 9000), "images": (24, 16, 16, 3)}


@pytest.mark.parametrize(
    ("loss", "of_targets", "of_outputs", "couples"),
    [
        (of_unlabelled, "columns", "columns", True),
        (by_share_of_label(2), "column", "column", True),
        (by_share_of_label(5), "column", "column", True),
        (by_share_of_bright, "columns", "columns", True),
        (by_distance, "columns", "columns", True),
        (of_logarithm_by_size, "columns", "columns", True),
        (of_rest_by_largest, "columns", "columns", True),
        (by_size_beside_a_constant, "columns", "columns", True),
        (of_one_class_by_share, "labels", "columns", True),
        (of_class, "labels", "columns", False),
        (of_class_by_share_of_known(-1), "labels", "columns", True),
        (of_class_by_share_of_known(-100), "labels", "columns", True),
        (of_class_by_share_of_known(255), "labels", "columns", True),
        (of_class_by_share_of_known(-1), "labels", "classes", True),
        (of_what_is_no_padding, "labels", "row of 1000", True),
        (of_what_is_no_padding, "labels", "row of 2000", True),
        (of_positives_by_size, "columns", "columns", True),
        (of_relative_errors, "row of 300", "row of 300", False),
        (of_relative_errors, "row of 1600", "row of 1600", False),
        (of_noise, "row of 1000", "row of 1000", False),
        (of_unlabelled_by_mean, "labels", "columns", True),
        (of_action, "pairs", "pairs", False),
        (of_action, "pairs", "columns", False),
        (of_action_if_known, "pairs", "pairs", False),
        (of_action_by_share_of_known, "pairs", "pairs", True),
        (of_places, "columns", "columns", False),
        (by_iou, "images", "images", False),
        (by_table, "column", "column", False),
        (of_labelled, "columns", "columns", False),
        (of_counts, "columns", "columns", False),
        (of_squares, "columns", "columns", False),
    ],
)
def test_trial_sees_what_couples_where_numbers_are_as_in_data(
    loss, of_targets, of_outputs, couples
):
    given = [np.zeros(ROWS[name]) for name in (of_targets, of_outputs)]
    loss, backend = Own(loss), make_backend(run_eagerly=False)
    assert reducing.fails_to_add_up(loss, *given, backend.on_its_own) is couples


@pytest.mark.parametrize(("numbers", "most"), [(3, 32), (3000, 4)])
def test_losses_of_large_targets_are_tried_on_few_examples(numbers, most):
    sizes = []

    def loss(y, p):
        sizes.append(len(p))
        return ops.mean(ops.square(y - p), axis=-1)

    given, backend = np.zeros([2, 24, numbers]), make_backend(run_eagerly=False)
    assert not reducing.fails_to_add_up(Own(loss), *given, backend.on_its_own)
    assert max(sizes) == most


# Elsewhere operations run without a compiler, in every call anew, and so does
# the loss: there is nothing to be compiled once.
@pytest.mark.skipif(
    BACKEND != "jax", reason="only JAX compiles a loop whenever it is called"
)
def test_a_trial_has_a_loss_compiled_once_for_each_number_of_examples():
    sizes = []

    def loss(y, p):
        sizes.append(len(p))
        return ops.mean(ops.square(y - p), axis=-1)

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    trainer = Trainer(model, optimizer="sgd", loss=loss, accumulation=2)
    trainer.fit(*np.ones([2, 8, 3]), batch_size=4, verbose=0)
    assert sizes.count(16) == sizes.count(32) == 1


class Counting(keras.losses.Loss):
    calls = 0

    def call(self, y, p):
        self.calls += 1
        return ops.mean(ops.square(y - p), axis=-1) * (1 + 1 / self.calls)


class Drawing(keras.losses.Loss):
    def call(self, y, p):
        noise = np.random.normal(size=p.shape)
        return ops.mean(ops.square(y - p + noise), axis=-1)


@pytest.mark.parametrize("loss", [Counting, Drawing])
def test_a_trial_lets_a_loss_count_and_draw_in_python(loss):
    given, backend = np.zeros([2, 24, 3]), make_backend(run_eagerly=False)
    assert not reducing.fails_to_add_up(loss(), *given, backend.on_its_own)


def test_a_trial_in_few_bits_takes_rounding_for_no_coupling():
    loss = Own(of_relative_errors, dtype="bfloat16")
    given, backend = np.zeros([2, 24, 1000]), make_backend(run_eagerly=False)
    assert not reducing.fails_to_add_up(loss, *given, backend.on_its_own)


def test_a_trial_lets_a_loss_draw_other_numbers_in_every_call():
    drawn = keras.random.SeedGenerator(1)

    def loss(y, p):
        noise = keras.random.normal(ops.shape(p), seed=drawn)
        return ops.mean(ops.square(y - p + noise), axis=-1)

    given, backend = np.zeros([2, 24, 3]), make_backend(run_eagerly=False)
    assert not reducing.fails_to_add_up(Own(loss), *given, backend.on_its_own)


@pytest.mark.parametrize("is_in_fit", [False, True])
def test_losses_divided_by_the_number_of_unlabelled_are_refused(is_in_fit):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), of_unlabelled)
    x = np.linspace(-1, 1, 24).reshape([8, 3]).astype("float32")
    y = np.where(x < 0, -1, x)
    with pytest.raises(ValueError, match="depends on the others"):
        if is_in_fit:
            callback = GradientAccumulation(steps=2)
            model.fit(x, y, 4, verbose=0, callbacks=[callback])
        else:
            trainer = Trainer(model, accumulation=2)
            trainer.fit(x, y, batch_size=4, verbose=0)

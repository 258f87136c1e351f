"""Claims about losses that do not say what they were averaged over.

Without a denominator they are refused, and with a wrong one there is a
warning; what is said of them is what a trial has shown.
"""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

layers = keras.layers
X = np.random.default_rng(0).normal(size=[24, 5]).astype("float32")
Y = X[:, :3] ** 2


def make_model(*middle):
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="tanh"),
            *middle,
            layers.Dense(3),
        ]
    )


def mean(y, p):
    return ops.mean(ops.square(y - p))


def added_up(y, p):
    return ops.sum(ops.square(y - p))


def of_some(y, p):
    counts = ops.cast(y > 0.3, "float32")
    return ops.sum(counts * ops.square(y - p)) / ops.sum(counts)


def of_few(y, p):
    """Be 0 / 0 where several examples together have none that counts."""
    return of_some(y[:, :1] - 0.15, p[:, :1])


def hardest(y, p):
    errors = ops.mean(ops.square(y - p), axis=-1)
    return ops.mean(ops.top_k(errors, 4)[0])


def weighted(y, p):
    return ops.sum(y * ops.square(y - p)) / ops.sum(y)


def contrastive(y, p):
    p = ops.normalize(p, axis=-1)
    scores = ops.log_softmax(ops.matmul(p, ops.transpose(p)) / 0.1, axis=-1)
    return -ops.mean(ops.diagonal(scores))


def dice(y, p):
    overlap = 2 * ops.sum(y * p)
    return 1 - overlap / (ops.sum(y * y) + ops.sum(p * p))


class Sampling(layers.Layer):
    """Draws from a normal distribution, and adds how far that is off."""

    def __init__(self, reduce=ops.mean, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(1)
        self.reduce = reduce

    def call(self, x):
        center, log_variance = x[:, :4], x[:, 4:]
        off = 1 + log_variance - center**2 - ops.exp(log_variance)
        self.add_loss(-0.5 * self.reduce(ops.sum(off, axis=-1)))
        noise = keras.random.normal(ops.shape(center), seed=self.seed)
        return center + ops.exp(log_variance / 2) * noise


class Variational(layers.Layer):
    """Adds how far its weights are from a normal distribution."""

    def build(self, shape):
        self.center = self.add_weight(shape=(8,), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(self.center)))
        return x * self.center


class Warming(layers.Layer):
    """Adds a mean that does not count yet."""

    def build(self, shape):
        self.coefficient = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        self.add_loss(self.coefficient * ops.mean(ops.square(x)))
        return x


class Router(layers.Layer):
    """Sends examples to experts, and adds how unevenly."""

    def __init__(self, **options):
        super().__init__(**options)
        # Weights so large that not all examples go to one expert.
        normal = keras.initializers.RandomNormal(stddev=3.0, seed=0)
        self.gate = layers.Dense(4, kernel_initializer=normal)

    def call(self, x):
        chances = ops.softmax(self.gate(x))
        sent = ops.one_hot(ops.argmax(chances, axis=-1), 4)
        self.add_loss(
            0.1 * ops.sum(ops.mean(sent, axis=0) * ops.mean(chances, axis=0))
        )
        return x


class Bank(layers.Layer):
    """Gives every example to each of so many experts, `[experts, n, 8]`."""

    def __init__(self, experts, **options):
        super().__init__(**options)
        self.experts = experts

    def call(self, x):
        return ops.stack([x * (i + 1) for i in range(self.experts)])


class Experts(Router):
    """Has as many experts, in a layer of their own, as it is made with."""

    def __init__(self, experts, **options):
        super().__init__(**options)
        self.bank = Bank(experts)

    def call(self, x):
        return super().call(ops.mean(self.bank(x), axis=0))


class OwnLoss(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.dense = layers.Dense(3)
        self.loss_fn = loss

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return self.loss_fn(y, y_pred)


def train(*arguments, **options):
    """Train for an update of batches of 6."""
    return train_on(Y, *arguments, **options)


def train_on(
    targets,
    model,
    loss="mse",
    *,
    by="Trainer",
    denominator=None,
    k=4,
):
    """Train for an update of batches of 6, on these targets."""
    if by == "Trainer":
        trainer = Trainer(
            model,
            optimizer="sgd",
            loss=None if isinstance(model, OwnLoss) else loss,
            denominator=denominator,
            accumulation=k,
            seed=0,
        )
        return trainer.fit(X, targets, batch_size=6, verbose=0)
    model.compile("sgd", loss)
    callback = GradientAccumulation(k, denominator=denominator)
    return model.fit(X, targets, batch_size=6, callbacks=[callback], verbose=0)


def refusal(*arguments, **options):
    with pytest.raises(ValueError, match="must say what it was") as caught:
        train(*arguments, **options)
    return str(caught.value)


by_both = pytest.mark.parametrize("by", ["Trainer", "GradientAccumulation"])
leaves_data_unended = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

ORIGINS = {
    "loss": (lambda: (make_model(), mean), "the loss 'mean'"),
    "loss object": (
        lambda: (make_model(), OwnReduction(name="mine")),
        "the loss 'mine'",
    ),
    "compute_loss": (lambda: (OwnLoss(mean), None), "OwnLoss.compute_loss"),
    "add_loss": (
        lambda: (make_model(Sampling(name="draw")), "mse"),
        "add_loss of draw (Sampling)",
    ),
    "add_loss beside activity": (
        lambda: (
            make_model(Sampling(name="draw", activity_regularizer="l2")),
            "mse",
        ),
        "add_loss of draw (Sampling)",
    ),
    "add_loss inside": (
        lambda: (make_model(keras.Sequential([Sampling(name="in")])), "mse"),
        "add_loss of in (Sampling)",
    ),
}


class OwnReduction(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return mean(y_true, y_pred)


@pytest.mark.parametrize("name", ORIGINS)
@leaves_data_unended
def test_mean_over_samples_is_named_and_samples_are_proposed(name):
    by = "Trainer" if name.startswith("loss") else "GradientAccumulation"
    make, origin = ORIGINS[name]
    message = refusal(*make(), by=by)
    assert f"Received: a bare scalar from {origin}." in message
    assert "shows that it is a mean over samples" in message
    assert f"Say {by}(denominator='samples')" in message
    assert "WindowLossTrainer" not in message
    if name != "compute_loss":
        assert "compute_loss" not in message


def test_penalty_on_weights_goes_with_what_is_said_of_other_losses():
    message = refusal(make_model(Variational()), of_some)
    assert "is a mean over something else, such as tokens" in message
    assert "Say Trainer(denominator=fn)" in message
    assert "denominator='samples'" not in message
    assert "compute_loss" not in message


def dice_of_empty_masks(y, p):
    """Compute what dice is where nothing is positive: 1 for any weights."""
    return dice(ops.zeros_like(y), p)


def test_loss_that_happens_to_be_the_same_is_no_penalty_on_weights():
    message = refusal(make_model(), dice_of_empty_masks)
    assert "whatever the data" not in message
    assert "if it couples examples" in message


COUPLING = {
    "contrastive": lambda: (make_model(), contrastive),
    "dice": lambda: (make_model(), dice),
    "own contrastive": lambda: (OwnLoss(contrastive), None),
    "router": lambda: (make_model(Router(name="router")), "mse"),
    # As many as the rows that are tried, two groups of three.
    "experts": lambda: (make_model(Experts(6, name="experts")), "mse"),
    "beside dropout": lambda: (make_model(layers.Dropout(0.3)), contrastive),
    "beside batch statistics": lambda: (
        make_model(layers.BatchNormalization()),
        contrastive,
    ),
}


@pytest.mark.parametrize("name", COUPLING)
@leaves_data_unended
def test_loss_that_couples_examples_is_not_said_to_be_a_mean(name):
    is_added = name in ("router", "experts")
    by = "GradientAccumulation" if is_added else "Trainer"
    message = refusal(*COUPLING[name](), by=by)
    assert "shows that it couples examples" in message
    # A loss over the window does not see what layers add.
    assert ("denominator=" in message) == is_added
    assert ("a coefficient of 0" in message) == is_added
    assert ("WindowLossTrainer" in message) == (not is_added)
    assert f"{'Accumulation' if by == 'Trainer' else by}(combine='mean')" in (
        message
    )


@by_both
@pytest.mark.parametrize("name", ["contrastive", "router"])
def test_wrong_denominator_is_warned_of_once(name, by):
    model, loss = COUPLING[name]()
    with pytest.warns(UserWarning, match="couples examples") as caught:
        train(model, loss, by=by, denominator="samples")
    messages = [str(warning.message) for warning in caught]
    (message,) = [m for m in messages if "denominator" in m]
    assert message.startswith("denominator='samples' must be")
    remedy = "leave it out" if name == "router" else "a WindowLossTrainer"
    assert remedy in message.replace("Leave", "leave")


RIGHT = {
    "mean": (lambda: (make_model(), mean), "samples"),
    "own": (lambda: (OwnLoss(mean), None), "samples"),
    "sampling": (lambda: (make_model(Sampling()), "mse"), "samples"),
    "dropout": (lambda: (make_model(layers.Dropout(0.3)), mean), "samples"),
    "penalty": (lambda: (make_model(Variational()), "mse"), "samples"),
    "warming": (lambda: (make_model(Warming()), "mse"), "samples"),
    "noise": (lambda: (make_model(layers.GaussianNoise(0.3)), mean), "samples"),
    "statistics": (
        lambda: (make_model(layers.BatchNormalization()), mean),
        "samples",
    ),
    "of some": (
        lambda: (make_model(), of_some),
        lambda batch: ops.sum(ops.cast(batch.y > 0.3, "float32")),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_denominator_is_not_warned_of(name):
    by = "GradientAccumulation" if name == "sampling" else "Trainer"
    make, denominator = RIGHT[name]
    train(*make(), by=by, denominator=denominator)  # warnings are errors


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: (make_model(), added_up), "reduction='sum'"),
        (lambda: (OwnLoss(added_up), None), "WeightedLoss(value, None)"),
        (
            lambda: (make_model(Sampling(ops.sum)), "mse"),
            "give add_loss one value per example",
        ),
    ],
    ids=["loss", "compute_loss", "add_loss"],
)
def test_sum_is_told_from_a_mean(make, remedy):
    message = refusal(*make())
    assert "adds up over samples" in message
    assert remedy.lower() in message.lower()
    assert "denominator=" not in message
    with pytest.warns(UserWarning, match="adds up over samples"):
        train(*make(), denominator="samples")


@pytest.mark.parametrize("loss", [of_some, of_few])
def test_mean_over_something_else_is_told_from_one_over_samples(loss):
    message = refusal(make_model(), loss)
    assert "is a mean over something else, such as tokens" in message
    assert "Say Trainer(denominator=fn)" in message
    assert "denominator='samples'" not in message
    with pytest.warns(UserWarning, match="is a mean over something else"):
        train(make_model(), loss, denominator="samples")


def test_several_bare_scalars_are_told_apart():
    model = make_model(Sampling(name="draw"), Router(name="router"))
    message = refusal(model)
    assert "from add_loss of draw (Sampling) and add_loss of router" in message
    assert "draw (Sampling) is a mean over samples" in message
    assert "router (Router) either couples examples or" in message
    assert "Trainer(denominator='samples')" not in message
    assert "return a WeightedLoss for each" in message


def test_output_whose_loss_couples_examples_is_named():
    x = keras.Input([5])
    heads = [layers.Dense(3, name=name)(x) for name in ("a", "b")]
    trainer = Trainer(
        keras.Model(x, heads),
        optimizer="sgd",
        loss=["mse", contrastive],
        accumulation=4,
    )
    with pytest.raises(ValueError, match="the loss 'contrastive'"):
        trainer.fit(X, [Y, Y], batch_size=6, verbose=0)


@keras_3_only("has no circle loss")
@by_both
@pytest.mark.parametrize(
    "reduction",
    # Values that nothing reduces are trained on TensorFlow alone.
    ["sum_over_batch_size", "sum", *["none"] * (BACKEND == "tensorflow")],
)
def test_loss_of_keras_with_values_made_of_all_examples_is_refused(
    reduction, by
):
    model, labels = make_model(), np.arange(24) % 2
    loss = keras.losses.Circle(reduction=reduction)
    with pytest.raises(ValueError, match="the loss 'circle'") as caught:
        train_on(labels, model, loss, by=by)
    assert "couples examples" in str(caught.value)
    assert "WindowLossTrainer" in str(caught.value)
    train_on(labels, make_model(), loss, by=by, k=1)


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (mean, "is a mean over samples"),
        (weighted, "is a mean over something else"),
        (contrastive, "couples examples"),
    ],
)
def test_few_samples_are_enough_to_tell(loss, shown, samples):
    trainer = Trainer(make_model(), optimizer="sgd", loss=loss, accumulation=2)
    with pytest.raises(ValueError, match="must say what") as caught:
        trainer.fit(X[:samples], Y[:samples], batch_size=samples, verbose=0)
    assert f"shows that it {shown}" in str(caught.value)


def test_examples_that_are_alike_do_not_make_a_mean_couple_them():
    alike, model = np.tile([0, 0, 0, 1], 2), make_model()
    model.compile("sgd", weighted)
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    options["callbacks"] = [GradientAccumulation(2)]
    with pytest.raises(ValueError, match="must say what") as caught:
        model.fit(X[alike], Y[alike], **options)
    assert "a mean over something else" in str(caught.value)


def test_trial_that_shows_nothing_leaves_all_remedies_open():
    trainer = Trainer(make_model(), optimizer="sgd", loss=mean, accumulation=2)
    with pytest.raises(ValueError, match="must say what") as caught:
        trainer.fit(X, np.full_like(Y, np.nan), batch_size=6, verbose=0)
    message = str(caught.value)
    assert "A trial" not in message
    assert message.count("Say Trainer(denominator=fn)") == 1  # the first of all
    assert "denominator='samples') if it is a mean over samples" in message
    assert "WindowLossTrainer" in message


@by_both
def test_samples_are_warned_of_where_a_loss_needs_many(by):
    with pytest.warns(UserWarning, match="must be what .* 'hardest', which"):
        train(make_model(), hardest, denominator="samples", by=by)


@by_both
def test_samples_that_no_trial_can_check_are_warned_of_once(by):
    options = {"loss": dice_of_empty_masks, "by": by}
    with pytest.warns(UserWarning, match="should be shown") as caught:
        train(make_model(), denominator="samples", **options)
    messages = [str(warning.message) for warning in caught]
    (message,) = [m for m in messages if "denominator" in m]
    assert "from the loss 'dice_of_empty_masks', of which" in message
    assert f"say {by}(denominator=fn)" in message
    options["denominator"] = lambda batch: ops.shape(batch.y)[0]
    train(make_model(), **options)  # warnings are errors


def test_one_micro_batch_per_update_needs_no_denominator():
    train(make_model(), contrastive, k=1)
    train(make_model(), contrastive, k=1, by="GradientAccumulation")


def test_growing_window_is_refused_when_it_has_grown():
    trainer = Trainer(
        make_model(),
        optimizer="sgd",
        loss=mean,
        accumulation=Accumulation(steps={0: 1, 1: 2}),
    )
    with pytest.raises(ValueError, match="is a mean over samples"):
        trainer.fit(X, Y, batch_size=6, epochs=2, verbose=0)


def test_trial_changes_nothing():
    class Same(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            loss = mean(batch.y, outputs)
            return WeightedLoss(loss, ops.shape(outputs)[0], outputs)

    def trained(trainer_type, **options):
        keras.utils.set_random_seed(0)
        model = make_model(layers.BatchNormalization(), layers.Dropout(0.3))
        trainer = trainer_type(
            model, optimizer="adam", seed=0, accumulation=4, **options
        )
        trainer.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        return model

    tried = trained(Trainer, loss=mean, denominator="samples")
    other = trained(Same)
    for one, two in zip(tried.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)

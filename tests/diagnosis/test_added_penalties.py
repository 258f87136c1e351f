"""Claims about penalties on weights that layers give to `add_loss`.

A bare scalar that is computed without the batch counts as it is, whatever it is
said to be averaged over. Its operations show that, whatever its value is today.
"""

import warnings

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

layers = keras.layers
BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=[22, 5]).astype("float32")
Y = X[:, :3] ** 2

by_both = pytest.mark.parametrize("by", ["Trainer", "GradientAccumulation"])


class Penalized(layers.Layer):
    """Adds something, by default a penalty on its kernel."""

    def __init__(self, begin="ones", of=None, **options):
        super().__init__(**options)
        self._begin = begin
        self._of = of or Penalized.penalty

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, 3), initializer=self._begin)
        self.coefficient = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def penalty(self, x):
        return 0.1 * ops.sum(ops.square(self.kernel))

    def call(self, x):
        self.add_loss(self._of(self, x))
        return ops.matmul(x, self.kernel)


class Coupling(Penalized):
    """Adds before that what couples examples."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(x, axis=0))))
        return super().call(x)


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.layer = layer

    def call(self, x):
        return self.layer(self.hidden(x))


class Adding(keras.Model):
    """Adds a penalty itself."""

    def __init__(self, layer):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.last = layers.Dense(3)

    def call(self, x):
        x = self.hidden(x)
        self.add_loss(0.1 * ops.sum(ops.square(self.hidden.kernel)))
        return self.last(x)


def functional(layer):
    x = keras.Input([5])
    return keras.Model(x, layer(layers.Dense(8)(x)))


def make_model(layer, make=Subclassed):
    keras.utils.set_random_seed(0)
    model = make(layer)
    model(X[:1])
    return model


def train(model, by, k=4, run_eagerly=False, **options):
    """Train for two epochs of one update each; of k = 4 the last part has 4."""
    sgd = keras.optimizers.SGD(0.1)
    # JAX compiles nothing without XLA.
    compiles = BACKEND == "jax" and not run_eagerly
    model.compile(sgd, "mse", run_eagerly=run_eagerly, jit_compile=compiles)
    batch_size = 6 if k == 4 else 22
    options = {"batch_size": batch_size, "epochs": 2} | options
    options |= {"shuffle": False, "verbose": 0}
    if by == "Trainer":
        trainer = Trainer(model, accumulation=k, run_eagerly=run_eagerly)
        trainer.fit(X, Y, **options)
    elif by == "GradientAccumulation":
        model.fit(X, Y, callbacks=[GradientAccumulation(k)], **options)
    else:
        model.fit(X, Y, **options)
    return model.get_weights()


def assert_same(weights, expected):
    for one, two in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def norm(layer):
    return ops.sqrt(ops.sum(ops.square(layer.kernel)))


PENALTIES = {
    "of ones": {},
    "of zeros": {"begin": "zeros"},
    "frozen": {"trainable": False},
    "not yet counting": {
        "of": lambda layer, x: layer.coefficient * norm(layer)
    },
    "inactive hinge": {"of": lambda layer, x: ops.relu(norm(layer) - 9.0)},
    "with a branch": {
        "of": lambda layer, x: ops.where(
            layer.coefficient > 0.0, norm(layer), ops.max(layer.kernel)
        )
    },
}


@by_both
@pytest.mark.parametrize("name", PENALTIES)
def test_penalty_counts_once_per_update(name, by):
    expected = train(make_model(Penalized(**PENALTIES[name])), "Keras", k=1)
    model = make_model(Penalized(**PENALTIES[name]))
    assert_same(train(model, by), expected)  # warnings are errors


@by_both
@pytest.mark.parametrize("make", [functional, Adding])
def test_penalty_may_be_of_any_model(make, by):
    expected = train(make_model(Penalized(), make), "Keras", k=1)
    assert_same(train(make_model(Penalized(), make), by), expected)


def test_penalty_counts_as_much_as_a_callback_has_it_count():
    class Annealing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[-1].coefficient.assign(0.5 * epoch)

    weights = []
    for by, k in (("Trainer", 4), ("Keras", 1)):
        model = make_model(Penalized(**PENALTIES["not yet counting"]))
        weights.append(train(model, by, k=k, callbacks=[Annealing()]))
    assert_same(*weights)


def masked(layer, x):
    """Count only what is larger than anything that there is."""
    return 0.1 * ops.sum(ops.where(x > 1e6, ops.square(x), 0.0))


def written(layer, x):
    """Read from a variable what the same call has written."""
    layer.coefficient.assign(0.0 * ops.mean(x))
    return layer.coefficient * norm(layer)


def shared(layer, x):
    """Divide what is not yet active by the number of examples."""
    return ops.relu(norm(layer) - 9.0) / x.shape[0]


def shared_by_tensor(layer, x):
    return ops.relu(norm(layer) - 9.0) / ops.cast(ops.shape(x)[0], "float32")


def shared_by_vector(layer, x):
    rows = np.full([8, 1], 1.0 / x.shape[0], "float32")
    return ops.sum(ops.convert_to_tensor(rows) * ops.square(layer.kernel))


def shared_by_host(layer, x):
    """Ask the host, which knows the number of examples."""
    if BACKEND != "jax":
        return shared_by_vector(layer, x)
    import jax

    n = x.shape[0]
    share = jax.pure_callback(
        lambda c: np.float32((c + 1.0) / n),
        jax.ShapeDtypeStruct((), "float32"),
        layer.coefficient.value,
    )
    return norm(layer) * share


def constant(layer, x):
    """Depend on weights and on data, which show in nothing."""
    return norm(layer) + masked(layer, x)


@by_both
@pytest.mark.parametrize(
    "of",
    [
        *(masked, written, shared, shared_by_tensor, constant),
        *(shared_by_vector, shared_by_host),
    ],
)
def test_what_the_batch_does_not_show_in_today_is_no_penalty(of, by):
    model = make_model(Penalized(of=of, name="layer"))
    with pytest.raises(ValueError, match="must say what it was") as caught:
        train(model, by)
    assert "from add_loss of layer (Penalized)." in str(caught.value)
    assert "whatever the data" not in str(caught.value)


def spread(layer, x):
    return ops.mean(ops.ones(ops.shape(x)) * norm(layer))


def spread_alike(layer, x):
    return norm(layer) * ops.mean(ops.ones_like(x))


def with_outputs(layer, x):
    """Compute the penalty in a branch that computes outputs, too."""
    kernel = ops.convert_to_tensor(layer.kernel)
    if BACKEND == "torch":  # which looks at what runs
        return spread(layer, x)
    return ops.cond(
        layer.coefficient < 1.0,
        lambda: (ops.matmul(x, kernel), ops.sum(ops.square(kernel))),
        lambda: (ops.matmul(x, -kernel), ops.sum(ops.abs(kernel))),
    )[1]


@ops.custom_gradient
def rounded(x):
    def grad(*args, upstream=None):
        return args[0] if upstream is None else upstream

    return ops.round(x), grad


def with_own_gradient(layer, x):
    if BACKEND == "torch":  # where gradients are not looked at
        return spread(layer, x)
    return ops.mean(rounded(layer.kernel * 3.0))


def read(layer, x):
    """Have Python read a number, which it can where nothing is compiled."""
    return norm(layer) * (1.0 + float(layer.coefficient.numpy()))


@by_both
@pytest.mark.parametrize(
    ("of", "run_eagerly"),
    [
        *((spread, False), (spread_alike, False), (with_outputs, False)),
        *((with_own_gradient, False), (read, True)),
    ],
)
def test_penalty_that_only_a_trial_shows_is_warned_of(of, run_eagerly, by):
    def make():
        return make_model(Penalized(of=of, name="layer"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "A loss should say")
        weights = train(make(), by, run_eagerly=run_eagerly)
    expected = train(make(), "Keras", k=1, run_eagerly=run_eagerly)
    assert_same(weights, expected)
    (message,) = [str(warning.message) for warning in caught]
    assert "from add_loss of layer (Penalized)." in message
    assert "it is the same whatever the data" in message
    assert f"Say {by}(denominator='samples') to state that" in message


@pytest.mark.filterwarnings("ignore:A loss should say")
def test_batches_of_one_example_show_what_is_a_penalty():
    models = [make_model(Penalized(of=with_outputs)) for _ in range(2)]
    accumulation = GradientAccumulation(22)
    found = train(models[0], "fit", callbacks=[accumulation], batch_size=1)
    assert_same(found, train(models[1], "Keras", k=1))


def test_penalty_does_not_hide_what_its_layer_adds_else():
    with pytest.raises(ValueError, match="must say what it was") as caught:
        train(make_model(Coupling(name="layer")), "Trainer")
    assert "from add_loss of layer (Coupling)." in str(caught.value)
    assert "couples examples" in str(caught.value)

"""Whatever structure `Model.compile` takes trains and logs as in Keras.

Models are drawn whose outputs are nests of lists, tuples and dicts, made by
layers of their own or by a shared one, with losses, weights and metrics in the
structures that Keras takes for them. What Keras itself refuses is drawn anew.
"""

import random

import numpy as np
import pytest
from quickest import JIT_COMPILE, RUN_EAGERLY

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops, tree
from accumtrainer.steps import CLOCKS

layers, losses, metrics = keras.layers, keras.losses, keras.metrics

OURS = (*CLOCKS, "learning_rate")
QUICKEST = {"jit_compile": JIT_COMPILE, "run_eagerly": RUN_EAGERLY}

ROWS = 6
CASES = 24

# Some outputs have no loss.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")


def like_mse(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1)


LOSSES = (
    lambda: "mse",
    lambda: "mae",
    losses.Huber,
    losses.MeanSquaredError,
    lambda: losses.MeanSquaredError(reduction="sum"),
    lambda: losses.MeanAbsoluteError(name="other"),
    lambda: losses.mean_squared_error,
    lambda: like_mse,
    lambda: lambda y, y_pred: ops.mean(ops.abs(y - y_pred) ** 1.5, axis=-1),
)
METRICS = (
    lambda: "mae",
    lambda: "mse",
    lambda: metrics.MeanSquaredError(name="error"),
    lambda: metrics.mean_absolute_error,
)


class Branches(keras.Model):
    """A subclassed model of several outputs, in some nest."""

    def __init__(self, structure, make_heads):
        super().__init__()
        self.structure = lambda: structure  # as it is, untracked
        self.trunk = layers.Dense(4, activation="tanh")
        self.heads = make_heads()

    def call(self, x):
        return branch(self.trunk(x), self.heads, self.structure())


def branch(features, heads, structure):
    """Make as many outputs as a nest of their numbers has."""
    outputs = [
        head(features * (1 + 0.3 * number)) for number, head in enumerate(heads)
    ]
    return tree.map_structure(lambda number: outputs[number], structure)


class Draw:
    """Everything about one model, drawn from a seed.

    Whatever cannot be used by two models, losses and metrics, is made anew
    by `arguments`.
    """

    def __init__(self, seed):
        self.seed = seed
        draw = random.Random(seed)
        self.structure = _number(_draw_nest(draw, 2))
        self.is_nested = tree.is_nested(self.structure)
        self.outputs = len(tree.flatten(self.structure))
        self.sharing = draw.choice(["none", "none", "layer", "model"])
        self.is_functional = draw.random() < 0.5
        self._arguments_seed = draw.random()
        # Keras keeps what targets and weights are for in many ways.
        self.flattens_targets = draw.random() < 0.2
        self.weights = draw.choice(["none", "none", "one", "each"])

    def heads(self):
        if self.sharing == "none":
            return [
                layers.Dense(
                    1 + number % 2, name=f"{'zyxw'[number % 4]}{number}"
                )
                for number in range(self.outputs)
            ]
        head = layers.Dense(2, name="head")
        if self.sharing == "model":
            head = keras.Sequential([keras.Input([4]), head], name="inner")
        return [head] * self.outputs

    def model(self):
        if not self.is_functional:
            model = Branches(self.structure, self.heads)
            model(X)
        else:
            x = keras.Input([3])
            features = layers.Dense(4, activation="tanh")(x)
            outputs = branch(features, self.heads(), self.structure)
            model = keras.Model(x, outputs)
        random_numbers = np.random.default_rng(self.seed)
        model.set_weights(
            [random_numbers.normal(size=w.shape) for w in model.get_weights()]
        )
        return model

    def arguments(self, model):
        """Draw what `compile` is given, again the same."""
        draw = random.Random(self._arguments_seed)
        names = model.output_names if self.is_functional else None

        def nest_of(make, may_be_none):
            return self._draw_nest_of(draw, names, make, may_be_none)

        def loss():
            return draw.choice(LOSSES)()

        def metric():
            several = draw.random() < 0.4
            return [draw.choice(METRICS)() for _ in range(1 + several)]

        def all_metrics():
            kind = draw.random()
            if kind < 0.35:
                return None
            if kind < 0.5:
                return draw.choice([[], {}, ()])
            return nest_of(metric, True) if self.is_nested else metric()

        one = loss()
        several = nest_of(loss, True)
        loss = one if draw.random() < 0.25 else several
        if all(leaf is None for leaf in tree.flatten(loss)):
            loss = one  # nothing to train is nothing to compare
        weights = None
        if draw.random() < 0.5:
            weights = _draw_weights(draw, loss)
        return {
            "loss": loss,
            "loss_weights": weights,
            "metrics": all_metrics(),
            "weighted_metrics": all_metrics(),
        }

    def _draw_nest_of(self, draw, names, make, may_be_none):
        """Draw one of the structures in which something is given by output."""

        def leaf(_=None):
            return None if may_be_none and draw.random() < 0.2 else make()

        if not self.is_nested:
            return draw.choice([leaf, lambda: [leaf()]])()
        kind = draw.random()
        if kind < 0.2:
            return [leaf() for _ in range(self.outputs)]
        if kind < 0.3:
            return tuple(leaf() for _ in range(self.outputs))
        if kind < 0.5 and names and len(set(names)) == len(names):
            return {name: leaf() for name in draw.sample(names, len(names))}
        if kind < 0.65 and isinstance(self.structure, dict):
            keys = draw.sample(
                list(self.structure), draw.randint(1, len(self.structure))
            )
            return {
                key: tree.map_structure(leaf, self.structure[key])
                for key in keys
            }
        return tree.map_structure(leaf, self.structure)

    def data(self, model):
        random_numbers = np.random.default_rng(self.seed)

        def target(output):
            return random_numbers.normal(size=output.shape).astype("float32")

        def weight(_=None):
            return random_numbers.uniform(size=ROWS).astype("float32")

        y = tree.map_structure(target, model(X))
        if self.is_functional and self.flattens_targets:
            y = tree.flatten(y)
        weights = None
        if self.weights == "one" or (self.weights == "each" and self.is_nested):
            weights = weight()
            if self.weights == "each":
                weights = tree.map_structure(weight, self.structure)
        return {"x": X, "y": y, "sample_weight": weights}


def _draw_nest(draw, depth):
    if depth == 0 or draw.random() < (0.15 if depth == 2 else 0.6):
        return 0
    # Keras hands a nest of one output inside another to its loss as it is.
    count = draw.randint(1 if depth == 2 else 2, 3)
    children = [_draw_nest(draw, depth - 1) for _ in range(count)]
    kind = draw.choice([list, tuple, dict])
    if kind is dict:
        # One name is that of losses which nobody sees.
        names = draw.sample(["b", "a", "z", "added_0", "c"], count)
        return dict(zip(names, children, strict=True))
    return kind(children)


def _number(nest):
    numbers = iter(range(100))
    return tree.map_structure(lambda _: next(numbers), nest)


def _draw_weights(draw, loss):
    def weight(_=None):
        return round(draw.uniform(0.2, 2.0), 2)

    if not tree.is_nested(loss):
        return weight()
    if draw.random() < 0.5:
        return tree.map_structure(weight, loss)
    return [weight() for _ in tree.flatten(loss)]


# The three ways of training, and Keras alone.


def by_keras(draw, model, data):
    model.compile(
        keras.optimizers.SGD(0.1),
        run_eagerly=RUN_EAGERLY,
        **draw.arguments(model),
    )
    return observe(model, model, data, batch_size=ROWS)


def by_trainer(draw, model, data):
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.1),
        accumulation=Accumulation(micro_batch_size=ROWS // 2),
        **QUICKEST,
        **draw.arguments(model),
    )
    return observe(trainer, model, data, batch_size=ROWS)


def by_trainer_of_compiled_model(draw, model, data):
    model.compile(keras.optimizers.SGD(0.1), **draw.arguments(model))
    trainer = Trainer(model, **QUICKEST)
    return observe(trainer, model, data, batch_size=ROWS)


def by_callback(draw, model, data):
    model.compile(
        keras.optimizers.SGD(0.1),
        run_eagerly=RUN_EAGERLY,
        **draw.arguments(model),
    )
    callbacks = [GradientAccumulation(2)]
    return observe(
        model, model, data, batch_size=ROWS // 2, callbacks=callbacks
    )


def observe(trainer, model, data, **options):
    """Train and evaluate; list all that can be seen of it."""
    history = trainer.fit(**data, shuffle=False, verbose=0, **options).history
    seen = {
        "history": {k: v for k, v in history.items() if k not in OURS},
        "weights": model.get_weights(),
        "evaluate": trainer.evaluate(**data, verbose=0),
        "train_on_batch": trainer.train_on_batch(**data),
        "evaluate as dict": trainer.evaluate(
            **data, verbose=0, return_dict=True
        ),
        "train_on_batch as dict": trainer.train_on_batch(
            **data, return_dict=True
        ),
    }
    return seen


WAYS = (by_trainer, by_trainer_of_compiled_model, by_callback)


def assert_same(actual, expected):
    for what, value in expected.items():
        if isinstance(value, dict):  # their order counts
            assert list(actual[what]) == list(value), what
        leaves = tree.flatten(actual[what]), tree.flatten(value)
        assert len(leaves[0]) == len(leaves[1]), what
        for ours, theirs in zip(*leaves, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=2e-5, atol=2e-6, err_msg=what
            )


def _cases():
    """Draw the seeds; which of them Keras refuses shows when they run."""
    return [
        pytest.param(
            seed, WAYS[seed % 3], id=f"{seed}-{WAYS[seed % 3].__name__}"
        )
        for seed in range(CASES)
    ]


@pytest.mark.parametrize("seed, train", _cases())
def test_drawn_structure_trains_and_logs_as_in_keras(seed, train):
    for again in range(100):
        draw = Draw(seed + 1000 * again)
        model = draw.model()
        data = draw.data(model)
        try:
            expected = by_keras(draw, model, data)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            continue  # no such thing in Keras
        break
    else:
        raise AssertionError("Keras refuses whatever is drawn.")
    assert_same(train(draw, draw.model(), data), expected)


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_as_many_samples_as_outputs_are_no_list_of_targets(
    is_dict, run_eagerly
):
    def make_model():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([3])
        hidden = layers.Dense(4)(inputs)
        outputs = {"a": layers.Dense(1, name="a")(hidden), "b": hidden}
        return keras.Model(
            inputs, outputs if is_dict else list(outputs.values())
        )

    y = X[:, :1]
    loss = {"a": "mse"} if is_dict else ["mse", None]
    how = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    plain, model = make_model(), make_model()
    plain.compile("sgd", loss)
    expected = plain.fit(X, y, **how).history["loss"]
    trainer = Trainer(
        model,
        "sgd",
        loss,
        accumulation=Accumulation(micro_batch_size=2),
        run_eagerly=run_eagerly,
    )
    found = trainer.fit(X, y, **how).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.evaluate(X, y, batch_size=2, verbose=0),
        plain.evaluate(X, y, verbose=0),
        rtol=1e-5,
    )

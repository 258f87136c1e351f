"""PyTorch: what layers draw, take or count on the host is new in every step."""

import collections
import copy
import itertools
import pickle
import random
import secrets
import types

import numpy as np
import pytest
from numpy.random import uniform

from accumtrainer import Trainer
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

from recorded import note_graphs
from samples import X, Y

from accumtrainer.steps.torch.iterators import iterators_put_back

HOW = {"batch_size": 2, "epochs": 3, "shuffle": False, "verbose": 0}


class Dropping(keras.layers.Layer):
    """Leaves a layer out at random, as a host says."""

    def __init__(self, source):
        super().__init__()
        self.dense = keras.layers.Dense(6)
        self.source = source

    def call(self, x, training=False):
        keeps = float(self.source() > 0.5) if training else 0.5
        return x + keeps * self.dense(x)


def kept_by(make, seed):
    """Give a source that keeps a generator of its own."""
    generator = make(seed)
    return lambda: generator.random()


def taken_from(iterator):
    """Give a source that takes from an iterator in its closure."""
    return lambda: next(iterator)


class Taking:
    """A source that keeps an iterator, and begins it anew at its end."""

    def __init__(self):
        self.numbers = iter(())

    def __call__(self):
        try:
            return next(self.numbers)
        except StopIteration:
            self.numbers = iter([0.2, 0.9, 0.7, 0.1])
            return next(self.numbers)


class Sending:
    """A source that sends numbers to a generator, which adds them up."""

    def __init__(self):
        self.sums = sums()
        next(self.sums)

    def __call__(self):
        return self.sums.send(0.3)


def sums():
    total = 0.0
    while True:
        total = (total + (yield total)) % 1


SOURCES = {
    "iterator": Taking,
    "sending": Sending,
    "cycle": lambda: taken_from(itertools.cycle([0.2, 0.9, 0.7])),
    "generator": lambda: taken_from(i % 3 / 3 for i in itertools.count()),
    "random": lambda: random.random,
    "numpy": lambda: lambda: np.random.rand(),
    "Cython": lambda: lambda: uniform(0, 1),
    "Random": lambda: kept_by(random.Random, 3),
    "Generator": lambda: kept_by(np.random.default_rng, 3),
    "RandomState": lambda: np.random.RandomState(3).rand,
}


def make_model(layer):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input(X.shape[1:]), layer, keras.layers.Dense(Y.shape[1])]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_layers_draw_on_the_host_as_in_keras(source, run_eagerly):
    def train(by):
        keras.utils.set_random_seed(5)
        layer = Dropping(lambda: 1.0)
        by = by(make_model(layer))
        by.train_on_batch(X, Y)  # Keras draws in vain as it builds
        random.seed(5)
        np.random.seed(5)
        layer.source = SOURCES[source]()
        return by.fit(X, Y, **HOW).history["loss"]

    found = train(lambda model: Trainer(model, run_eagerly=run_eagerly))
    np.testing.assert_allclose(found, train(lambda model: model), rtol=1e-5)


COPIES = {
    "copy": lambda kept: types.SimpleNamespace(own=copy.copy(kept.own)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda kept: pickle.loads(pickle.dumps(kept)),
}


@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_an_iterator_take_what_a_trial_has_taken(copied):
    kept = types.SimpleNamespace(own=itertools.count(1))
    with iterators_put_back([kept]):
        assert [next(kept.own), next(kept.own)] == [1, 2]
    other = COPIES[copied](kept)
    for one in (kept, other):
        assert [next(one.own) for _ in range(4)] == [1, 2, 3, 4]


def test_iterators_are_back_in_their_place_after_training():
    source = Taking()
    source.numbers = iterator = itertools.cycle([0.2, 0.9, 0.7])
    Trainer(make_model(Dropping(source))).fit(X, Y, **HOW)
    assert source.numbers is iterator


FRESH = {
    "default_rng": lambda: np.random.default_rng().random(),
    "RandomState": lambda: np.random.RandomState().rand(),
    "Random": lambda: random.Random().random(),
    "SystemRandom": random.SystemRandom().random,
    "secrets": lambda: secrets.randbelow(10**6) / 10**6,
}


@pytest.mark.parametrize("source", FRESH)
def test_what_no_seed_foretells_is_drawn_anew_in_every_step(source):
    layer = keras.layers.Lambda(lambda x: x * (1 + float(FRESH[source]())))
    trainer = Trainer(make_model(layer))
    trainer.optimizer.learning_rate = 0.0
    losses = [float(trainer.train_on_batch(X, Y)) for _ in range(4)]
    assert len(set(losses)) == len(losses)


class Counting(keras.layers.Layer):
    """Scales by how often it has been called."""

    def __init__(self, start, step):
        super().__init__()
        self.state, self.step = start, step

    def call(self, x):
        self.step(self)
        return x * self.scale()

    def scale(self):
        return 1 + 0.1 * (int(np.sum(self.flat(self.state))) % 7)

    def flat(self, state):
        if isinstance(state, dict):
            return self.flat(list(state.values()))
        if isinstance(state, list):
            return sum(map(self.flat, state))
        return len(state) if isinstance(state, str) else state


def count_deep(layer):
    layer.state["stats"]["calls"] += 1


def count_in_place(layer):
    layer.state[0] += 1


def grow(layer):
    layer.state.append("x")


def flip(layer):
    layer.state = not layer.state


def replace(layer):
    layer.state = layer.state + 1


def lengthen(layer):
    layer.state += "x"


COUNTS = {
    flip: lambda: False,
    replace: lambda: np.int64(0),
    lengthen: lambda: "",
    count_deep: lambda: {"stats": {"calls": 0}},
    count_in_place: lambda: np.zeros(1),
    grow: lambda: [],
}


@pytest.mark.parametrize("step", COUNTS)
def test_what_a_layer_counts_in_anything_counts_on_in_every_step(step):
    def losses(by):
        model = make_model(Counting(COUNTS[step](), step))
        model.optimizer.learning_rate = 0.0
        by = by(model)
        # It comes round again every seven calls, or two.
        return sorted(float(by.train_on_batch(X, Y)) for _ in range(14))

    expected = losses(lambda model: model)
    assert expected[0] < expected[-1]
    np.testing.assert_allclose(losses(Trainer), expected, rtol=1e-5)


def table_in_dict(kept, shape):
    if shape not in kept:
        kept[shape] = {"table": np.full(shape[1:], 2.0, "float32")}
    return float(kept[shape]["table"].ravel()[0])


def table_in_list(kept, shape):
    while len(kept) <= shape[0]:
        kept.append(np.full([1], float(len(kept))))
    return kept[shape[0]][0]


def number_in_dict(kept, shape):
    return kept.setdefault(shape, shape[-1] ** -0.5)


def name_in_set(kept, shape):
    kept.add(shape)
    return 2.0


CACHES = {
    "table in a dict": (dict, table_in_dict),
    "table in a list": (list, table_in_list),
    "number in a dict": (dict, number_in_dict),
    "name in a set": (set, name_in_set),
}


class Caching(keras.layers.Layer):
    """Keeps what it has made for a shape, and the longest table."""

    def __init__(self, make, look_up):
        super().__init__()
        self.made, self.look_up = make(), look_up
        self.longest = np.zeros(1)

    def call(self, x):
        if len(self.longest) < len(x):
            self.longest = np.ones(len(x), "float32")
        return x * self.look_up(self.made, tuple(x.shape)) * self.longest[0]


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_made_once_for_each_shape_is_recorded(kind, monkeypatch):
    trainer = Trainer(make_model(Caching(*CACHES[kind])))
    graphs = note_graphs(monkeypatch)
    trainer.train_on_batch(X[:3], Y[:3])
    one = len(graphs)
    trainer.train_on_batch(X[:4], Y[:4])
    assert 0 < one < len(graphs)


class AddingLoss(Caching):
    """Adds a loss too, which is tried on more examples."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(0.01 * self.scale**2)
        return super().call(x)


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_made_for_a_shape_beside_a_loss_is_recorded(kind, monkeypatch):
    model = make_model(AddingLoss(*CACHES[kind]))
    graphs = note_graphs(monkeypatch)
    Trainer(model, accumulation=2).train_on_batch(X[:8], Y[:8])
    assert graphs


def lengthen_list(kept):
    kept.own.append(np.ones(2))
    return len(kept.own)


def lengthen_array(kept):
    kept.own = np.append(kept.own, 1.0)
    return len(kept.own)


def count_by_name(kept):
    kept.own["calls"] = kept.own.get("calls", 0) + 1
    return kept.own["calls"]


def count_anew(kept):
    kept.calls = getattr(kept, "calls", 0) + 1
    return kept.calls


def add_names(kept):
    kept.own.add(f"call {len(kept.own)}")
    return len(kept.own)


def add_keys(kept):
    kept.own[f"call {len(kept.own)}"] = None
    return len(kept.own)


def turn(kept):
    first = next(iter(kept.own))
    kept.own.move_to_end(first)
    return kept.own[first]


GROWING = {
    "list": (list, lengthen_list),
    "deque": (lambda: collections.deque(maxlen=4), lengthen_list),
    "array": (lambda: np.zeros(0), lengthen_array),
    "dict": (dict, count_by_name),
    "Counter": (collections.Counter, count_by_name),
    "attribute": (dict, count_anew),
    "set": (set, add_names),
    "keys": (dict, add_keys),
    "order": (lambda: collections.OrderedDict(a=1, b=2, c=3), turn),
}


class Growing(keras.layers.Layer):
    """Scales by what it makes of what it keeps."""

    def __init__(self, grow):
        super().__init__()
        self.kept, self.grow = types.SimpleNamespace(), grow

    def call(self, x):
        return x * self.grow(self.kept)


class Logging(Trainer):
    """Logs in a hook, which a trial that is repeated runs twice."""

    def on_apply(self, gradients, info):
        self.log("one", 1.0)
        return gradients


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("kind", GROWING)
def test_what_grows_has_not_grown_before_the_first_step(kind, run_eagerly):
    make, grow = GROWING[kind]
    layer = Growing(lambda kept: 1.0)
    model = make_model(layer)
    model.optimizer.learning_rate = 0.0
    layer.grow, layer.kept.own = grow, make()
    trainer = Logging(model, run_eagerly=run_eagerly)
    zeros = np.zeros_like(Y)
    losses = [trainer.train_on_batch(X, zeros)[0] for _ in range(6)]
    kept = types.SimpleNamespace(own=make())
    scales = np.array([grow(kept) for _ in range(6)])
    np.testing.assert_allclose(
        np.sqrt(losses) / np.sqrt(losses[0]), scales, rtol=1e-5
    )

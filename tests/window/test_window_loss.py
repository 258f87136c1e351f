"""Claims about losses that couple the examples of a window.

The reference is one gradient through everything: the micro-batches are
embedded one after the other, so that each layer draws what it draws in
training, and the loss of all of them is differentiated at once.
"""

import numpy as np
import pytest
from oracle import KeepGradients, differentiate

from accumtrainer import Accumulation, LossScale, WindowLossTrainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.window_losses import (
    batch_all_triplet_loss,
    batch_hard_triplet_loss,
    info_nce_loss,
    nt_xent_loss,
    supervised_contrastive_loss,
)

layers = keras.layers
SAMPLES = 12
PLANS = ["fused", "streamed"]


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[SAMPLES, 2, 5]).astype("float32")
    return x, np.repeat(np.arange(4), 3)


def make_model(*middle):
    """Make a model that embeds a pair of views alike: `[m, 2, 5]` in."""
    return keras.Sequential(
        [
            keras.Input([2, 5]),
            layers.Dense(8, activation="tanh"),
            *middle,
            layers.Dense(4),
        ]
    )


LOSSES = {
    "batch-hard": lambda e, y: batch_hard_triplet_loss(e[:, 0], y, margin=1.0),
    "batch-hard soft": lambda e, y: batch_hard_triplet_loss(
        e[:, 0], y, margin="soft"
    ),
    "batch-hard squared": lambda e, y: batch_hard_triplet_loss(
        e[:, 0], y, margin=1.0, squared=True
    ),
    "batch-all": lambda e, y: batch_all_triplet_loss(e[:, 0], y, margin=1.0),
    "batch-all soft": lambda e, y: batch_all_triplet_loss(
        e[:, 0], y, margin="soft"
    ),
    "InfoNCE": lambda e, y: info_nce_loss(e[:, 0], e[:, 1]),
    "InfoNCE symmetric": lambda e, y: info_nce_loss(
        e[:, 0], e[:, 1], temperature=0.2, symmetric=True
    ),
    "NT-Xent": lambda e, y: nt_xent_loss(e[:, 0], e[:, 1]),
    "supervised": lambda e, y: supervised_contrastive_loss(e[:, 0], y),
}


class LossTrainer(WindowLossTrainer):
    """Computes one of `LOSSES`."""

    def __init__(self, model, name, **options):
        self.name = name
        options = {"optimizer": KeepGradients(), "seed": 0} | options
        super().__init__(model, **options)

    def window_loss(self, embeddings, batch, info):
        return LOSSES[self.name](embeddings, batch.y)


def reference(model, name, sizes, x, y):
    """Differentiate through all micro-batches at once."""

    def objective():
        ends = np.cumsum(sizes)
        parts = [
            model(x[end - size : end], training=True)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return LOSSES[name](ops.concatenate(parts, axis=0), y)

    return differentiate(objective, model.trainable_variables)


def assert_alike(received, expected, tolerance=1e-5):
    received = [np.asarray(ops.convert_to_numpy(v)) for v in received]
    expected = [np.asarray(ops.convert_to_numpy(v)) for v in expected]
    largest = max(np.abs(v).max() for v in expected)
    assert largest > 1e-4
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * largest, rtol=0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (4, 4, 4)) for name in LOSSES),
        *((name, (5, 5, 2)) for name in LOSSES),
        ("batch-hard", (12,)),
        ("batch-hard", (1,) * 12),
    ],
)
def test_update_is_that_of_the_big_batch(name, sizes):
    x, y = make_data()
    model = make_model()
    trainer = LossTrainer(
        model, name, accumulation=Accumulation(micro_batch_size=sizes[0])
    )
    loss, gradients = reference(model, name, [SAMPLES], x, y)
    history = trainer.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    assert_alike(trainer.optimizer.kept, gradients)
    assert history.history["loss"][0] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOSSES)
def test_dropout_is_replayed(use_plan, name, plan):
    # Not by XLA on TensorFlow: the reference cannot draw in its way.
    use_plan(plan)
    x, y = make_data()
    model = make_model(layers.Dropout(0.5, seed=3))
    random_state = model.layers[1].seed_generator.state
    start = np.array(ops.convert_to_numpy(random_state))
    _, gradients = reference(model, name, [4, 4, 4], x, y)
    random_state.assign(start)
    trainer = LossTrainer(
        model, name, accumulation=Accumulation(micro_batch_size=4)
    )
    trainer.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    assert_alike(trainer.optimizer.kept, gradients)
    # There were twice as many passes, but each number was drawn for two.
    after = np.array(ops.convert_to_numpy(random_state))
    random_state.assign(start)
    for _ in range(3):
        model(x[:4], training=True)
    np.testing.assert_array_equal(after, ops.convert_to_numpy(random_state))


@pytest.mark.parametrize("plan", PLANS)
def test_both_passes_draw_the_same_numbers(use_plan, plan):
    use_plan(plan, jit_compile=True)
    x, y = make_data()

    class Noisy(LossTrainer):
        def on_micro_batch(self, batch, info):
            noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
            return batch._replace(x=batch.x + noise)

        def embed(self, batch, info):
            embeddings = super().embed(batch, info)
            self.log("second", ops.mean(ops.square(embeddings)))
            return {"views": embeddings}

        def window_loss(self, embeddings, batch, info):
            self.log("first", ops.mean(ops.square(embeddings["views"])))
            return LOSSES[self.name](embeddings["views"], batch.y)

    model = make_model(layers.Dropout(0.5))
    options = {"optimizer": keras.optimizers.SGD(0.0), "accumulation": 3}
    trainer = Noisy(model, "InfoNCE", **options)
    history = trainer.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    assert history["first"] == pytest.approx(history["second"])
    assert history["first"][0] != pytest.approx(history["first"][1])


@pytest.mark.parametrize("plan", PLANS)
def test_statistics_of_a_batch_are_kept_once(use_plan, plan):
    use_plan(plan)
    x, y = make_data()
    model = make_model(layers.BatchNormalization())
    _, gradients = reference(model, "batch-hard", [4, 4, 4], x, y)
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    trainer = LossTrainer(
        model,
        "batch-hard",
        optimizer=keras.optimizers.SGD(0.0),
        accumulation=3,
    )
    trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for begin in (0, 4, 8):
        plain(x[begin : begin + 4], training=True)
    for one, other in zip(
        model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


class LearnedTemperature(layers.Layer):
    def build(self, shape):
        self.log_temperature = self.add_weight(shape=[], initializer="zeros")

    def call(self, x):
        return x


@pytest.mark.parametrize("plan", PLANS)
def test_variable_that_only_the_loss_uses_gets_its_gradient(use_plan, plan):
    use_plan(plan)
    x, y = make_data()
    model = make_model(LearnedTemperature())

    def loss_of(embeddings):
        temperature = ops.exp(model.layers[1].log_temperature)
        return info_nce_loss(
            embeddings[:, 0], embeddings[:, 1], temperature=temperature
        )

    class Learning(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return loss_of(embeddings)

    _, gradients = differentiate(
        lambda: loss_of(model(x, training=True)), model.trainable_variables
    )
    trainer = Learning(model, optimizer=KeepGradients(), accumulation=3)
    trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert abs(float(gradients[2])) > 1e-4
    assert_alike(trainer.optimizer.kept, gradients)


@pytest.mark.parametrize("plan", PLANS)
def test_loss_scale_changes_no_gradient(use_plan, plan):
    use_plan(plan)
    x, y = make_data()
    model = make_model()
    _, gradients = reference(model, "batch-hard", [SAMPLES], x, y)
    trainer = LossTrainer(
        model, "batch-hard", accumulation=3, loss_scale=LossScale(initial=1024)
    )
    trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_alike(trainer.optimizer.kept, gradients)


@pytest.mark.parametrize("plan", PLANS)
def test_overflow_forgets_the_window(use_plan, plan):
    use_plan(plan)
    keras.config.set_dtype_policy("mixed_float16")
    x, y = make_data()
    model = make_model(layers.BatchNormalization())
    before = model.get_weights()
    trainer = LossTrainer(
        model,
        "batch-hard",
        accumulation=3,
        loss_scale=LossScale(initial=2.0**60, maximum=2.0**60),
    )
    history = trainer.fit(x, y, batch_size=4, verbose=0).history
    assert history["skipped_updates"] == [1]
    assert history["loss_scale"] == [2.0**60]
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_regularizers_count_once():
    x, y = make_data()
    model = make_model(layers.Dense(8, kernel_regularizer="l2"))

    def objective():
        loss = LOSSES["batch-hard"](model(x, training=True), y)
        return loss + 0.01 * ops.sum(ops.square(model.layers[1].kernel))

    loss, gradients = differentiate(objective, model.trainable_variables)
    trainer = LossTrainer(model, "batch-hard", accumulation=3)
    history = trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_alike(trainer.optimizer.kept, gradients)
    assert history.history["loss"][0] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 5, 2)])
def test_activity_regularizers_are_means_over_the_window(sizes):
    x, y = make_data()
    model = make_model(
        layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))
    )

    def objective():
        inner = ops.tanh(ops.matmul(x, model.layers[0].kernel))
        inner = ops.matmul(inner, model.layers[1].kernel)
        embeddings = ops.matmul(inner, model.layers[2].kernel)
        penalty = 0.1 * ops.sum(ops.square(inner)) / SAMPLES
        return LOSSES["batch-hard"](embeddings, y) + penalty

    _, gradients = differentiate(objective, model.trainable_variables)
    trainer = LossTrainer(
        model,
        "batch-hard",
        accumulation=Accumulation(micro_batch_size=sizes[0]),
    )
    trainer.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    used = [v for v in trainer.optimizer.kept if len(v.shape) == 2]
    expected = [g for g in gradients if g is not None and len(g.shape) == 2]
    assert_alike(used, expected)


def test_evaluation_compares_the_examples_of_a_batch():
    x, y = make_data()
    trainer = LossTrainer(
        make_model(),
        "batch-hard",
        accumulation=Accumulation(micro_batch_size=2),
    )
    loss = trainer.evaluate(x, y, batch_size=SAMPLES, verbose=0)
    outputs = ops.stop_gradient(trainer.model(x))
    expected = LOSSES["batch-hard"](outputs, y)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_metrics_are_given_the_embeddings():
    x = np.random.default_rng(0).normal(size=[8, 3]).astype("float32")

    class Pulling(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return ops.mean(ops.square(embeddings - batch.y))

    trainer = Pulling(
        keras.Sequential([keras.Input([3]), layers.Dense(3)]),
        optimizer=keras.optimizers.SGD(0.0),
        metrics=["mse"],
        accumulation=2,
    )
    history = trainer.fit(x, x, batch_size=4, verbose=0).history
    assert history["mse"] == pytest.approx(history["loss"], rel=1e-5)


def test_window_loss_is_required():
    with pytest.raises(TypeError, match="window_loss must be overridden"):
        WindowLossTrainer(make_model(), optimizer="sgd")


@pytest.mark.parametrize(
    ("name", "value"),
    [("loss", "mse"), ("loss_weights", [1.0]), ("denominator", "samples")],
)
def test_what_belongs_to_another_loss_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be left out"):
        LossTrainer(make_model(), "InfoNCE", **{name: value})


def test_plain_means_are_refused():
    with pytest.raises(ValueError, match="combine must be 'exact'"):
        LossTrainer(
            make_model(),
            "InfoNCE",
            accumulation=Accumulation(steps=2, combine="mean"),
        )


def test_metrics_of_embeddings_that_are_not_the_output_are_refused():
    class Half(LossTrainer):
        def embed(self, batch, info):
            return super().embed(batch, info)[:, 0]

    with pytest.raises(ValueError, match="metrics must be left out"):
        Half(make_model(), "InfoNCE", metrics=["mse"])


# The losses by themselves, against loops in NumPy.


def random_embeddings(seed=0):
    rng = np.random.default_rng(seed)
    embeddings = rng.normal(size=[9, 3]).astype("float32")
    return embeddings, np.array([0, 0, 0, 1, 1, 2, 2, 2, 3])


def triplets(embeddings, labels):
    """Yield distance to a friend and to a stranger, by anchor."""
    distances = np.linalg.norm(embeddings[:, None] - embeddings[None], axis=-1)
    for a in range(len(labels)):
        friends = [
            distances[a, p]
            for p in range(len(labels))
            if p != a and labels[p] == labels[a]
        ]
        strangers = distances[a, labels != labels[a]]
        if friends:
            yield np.array(friends), strangers


@pytest.mark.parametrize("margin", [0.7, "soft"])
def test_triplet_losses_equal_loops(margin):
    embeddings, labels = random_embeddings()

    def hinge(difference):
        if margin == "soft":
            return np.log1p(np.exp(difference))
        return np.maximum(difference + margin, 0)

    found = list(triplets(embeddings, labels))
    hard = [hinge(friends.max() - others.min()) for friends, others in found]
    received = batch_hard_triplet_loss(embeddings, labels, margin=margin)
    assert float(received) == pytest.approx(np.mean(hard), rel=1e-5)
    every = np.concatenate(
        [hinge(f[:, None] - s[None]).ravel() for f, s in found]
    )
    received = batch_all_triplet_loss(embeddings, labels, margin=margin)
    assert float(received) == pytest.approx(np.mean(every[every > 0]), rel=1e-5)


def cross_entropy(logits, own):
    shifted = np.exp(logits - logits.max())
    return -np.log(shifted[own] / shifted.sum())


def test_contrastive_losses_equal_loops():
    first, _ = random_embeddings(0)
    second, _ = random_embeddings(1)
    a = first / np.linalg.norm(first, axis=1, keepdims=True)
    b = second / np.linalg.norm(second, axis=1, keepdims=True)
    logits = a @ b.T / 0.3
    one_way = np.mean([cross_entropy(logits[i], i) for i in range(9)])
    other_way = np.mean([cross_entropy(logits.T[i], i) for i in range(9)])
    received = info_nce_loss(first, second, temperature=0.3)
    assert float(received) == pytest.approx(one_way, rel=1e-5)
    received = info_nce_loss(first, second, temperature=0.3, symmetric=True)
    assert float(received) == pytest.approx((one_way + other_way) / 2, rel=1e-5)
    views = np.concatenate([a, b])
    similar = views @ views.T / 0.3
    np.fill_diagonal(similar, -np.inf)
    expected = [cross_entropy(similar[i], (i + 9) % 18) for i in range(18)]
    received = nt_xent_loss(first, second, temperature=0.3)
    assert float(received) == pytest.approx(np.mean(expected), rel=1e-5)


def test_supervised_contrastive_loss_equals_loops():
    embeddings, labels = random_embeddings()
    points = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    similar = points @ points.T / 0.3
    np.fill_diagonal(similar, -np.inf)
    expected = []
    for anchor, label in enumerate(labels):
        friends = [p for p in np.flatnonzero(labels == label) if p != anchor]
        if friends:
            found = [cross_entropy(similar[anchor], p) for p in friends]
            expected.append(np.mean(found))
    assert len(expected) == 8  # one of the nine has no friend
    received = supervised_contrastive_loss(embeddings, labels, temperature=0.3)
    assert float(received) == pytest.approx(np.mean(expected), rel=1e-5)


def test_weights_of_anchors_weigh_their_losses():
    embeddings, labels = random_embeddings()
    weights = np.array([1, 0, 0, 0, 0, 0, 0, 0, 0], "float32")
    found = next(triplets(embeddings, labels))
    received = batch_hard_triplet_loss(
        embeddings, labels, margin=5.0, sample_weight=weights
    )
    expected = found[0].max() - found[1].min() + 5.0
    assert float(received) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]])
@pytest.mark.parametrize(
    "loss_fn", [batch_hard_triplet_loss, batch_all_triplet_loss]
)
def test_nothing_to_compare_with_is_no_loss(loss_fn, labels):
    for margin in (0.2, "soft"):
        value = loss_fn(
            np.eye(3, dtype="float32"), np.array(labels), margin=margin
        )
        assert float(value) == 0


def test_labels_that_are_all_different_are_no_supervised_loss():
    points = np.eye(3, dtype="float32")
    assert float(supervised_contrastive_loss(points, np.arange(3))) == 0


def test_equal_embeddings_have_a_finite_gradient():
    model = make_model()
    x = np.ones([SAMPLES, 2, 5], "float32")
    trainer = LossTrainer(model, "batch-hard", accumulation=3)
    trainer.fit(x, make_data()[1], batch_size=4, verbose=0)
    assert trainer.progress.updates == 1
    for gradient in trainer.optimizer.kept:
        assert np.isfinite(ops.convert_to_numpy(gradient)).all()

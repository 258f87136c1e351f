"""Claims about per-example gradients: as micro-batches of one, at once."""

import numpy as np
import pytest
from hooked import numbers
from quickest import JIT_COMPILE
from replicated import distributed

from accumtrainer import (
    Accumulation,
    LossScale,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
)
from accumtrainer.errors import DataError
from accumtrainer.keras_api import BACKEND, keras, ops

layers = keras.layers
ONE_BY_ONE = Accumulation(micro_batch_size=1)
AT_ONCE = Accumulation(micro_batch_size=4, per_example=True)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 7)).astype("float32")
Y = RNG.integers(0, 3, 22)
WEIGHTS = np.where(np.arange(22) % 3, RNG.random(22), 0).astype("float32")
IDS = np.pad(RNG.integers(0, 11, (22, 5)), ((0, 0), (1, 0)), constant_values=1)


class ClipsExamples(Trainer):
    """Changes gradients so that it matters of which example they are."""

    def on_accumulate(self, gradients, info):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        self.log("largest", norm, reduce="max")
        self.log("norm", norm)
        self.log("weights", info.weight, reduce="sum")
        factor = ops.minimum(1.0, 0.05 / norm) * (1 + info.loss)
        return [factor * g for g in gradients]


class Scaled(ClipsExamples):
    def on_micro_batch(self, batch, info):
        return batch._replace(x=1.5 * batch.x)


class OwnLoss(ClipsExamples):
    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        values = crossentropy(reduction=None)(batch.y, outputs)
        self.log("spread", ops.max(values), reduce="max")
        count = ops.cast(ops.shape(values)[0], "float32")
        return WeightedLoss(ops.mean(values), count, outputs)


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def mlp(**options):
    return keras.Sequential(
        [
            keras.Input([7]),
            layers.Dense(5, activation="tanh", **options),
            layers.Dense(3),
        ]
    )


def with_two_outputs():
    inputs = keras.Input([7])
    hidden = layers.Dense(4, activation="tanh")(inputs)
    outputs = [layers.Dense(3, name="a")(hidden), layers.Dense(1, name="b")]
    return keras.Model(inputs, [outputs[0], outputs[1](hidden)])


def of_ids(*rest):
    return keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            layers.Embedding(11, 4, mask_zero=True),
            *rest,
            layers.Dense(3),
        ]
    )


def convolutional():
    return keras.Sequential(
        [
            layers.Input([7]),
            layers.Reshape([7, 1]),
            layers.Conv1D(4, 3, activation="relu"),
            layers.GroupNormalization(2),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def train(accumulation, build=mlp, cls=ClipsExamples, **options):
    """Train two epochs of updates of 12 examples and of 10."""
    keras.utils.set_random_seed(0)
    data = {"x": X, "y": Y} | options.pop("data", {})
    options = {"loss": crossentropy(), "metrics": ["accuracy"]} | options
    trainer = cls(
        build(),
        optimizer=keras.optimizers.SGD(0.5),
        accumulation=accumulation,
        seed=0,
        **options,
    )
    history = trainer.fit(
        **data, batch_size=12, epochs=2, shuffle=False, verbose=0
    )
    return trainer, history.history


def train_one_by_one(**options):
    """Train with micro-batches of one, compiled where that is quicker.

    To compile them is no subject of these tests.
    """
    return train(ONE_BY_ONE, **{"jit_compile": JIT_COMPILE} | options)


def assert_same(one, other):
    (one, logs), (other, other_logs) = one, other
    for variable, expected in zip(
        other.model.weights, one.model.weights, strict=True
    ):
        np.testing.assert_allclose(
            numbers(variable), numbers(expected), rtol=1e-5, atol=1e-6
        )
    assert logs.keys() == other_logs.keys()
    for name in logs:
        np.testing.assert_allclose(
            other_logs[name], logs[name], rtol=1e-4, atol=1e-5, err_msg=name
        )


BY_WEIGHT = crossentropy(reduction="mean_with_sample_weight")
WEIGHTED = {"data": {"sample_weight": WEIGHTS}, "loss": BY_WEIGHT}
CASES = {
    "clipping": {},
    "no hook": {"cls": Trainer},
    "on_micro_batch": {"cls": Scaled},
    "a loss and a log of its own": {"cls": OwnLoss},
    "sample weights": WEIGHTED | {"weighted_metrics": ["accuracy"]},
    "a sum": {"loss": crossentropy(reduction="sum")},
    "a regularizer": {
        "build": lambda: mlp(kernel_regularizer="l2", activity_regularizer="l1")
    },
    "two outputs": {
        "build": with_two_outputs,
        "data": {
            "y": [Y, X[:, :1]],
            "sample_weight": [WEIGHTS, WEIGHTS[::-1].copy()],
        },
        "loss": [BY_WEIGHT, "mse"],
        "metrics": None,
    },
    "masked tokens": {
        "build": of_ids,
        "data": {"x": IDS, "y": IDS % 3},
        "metrics": None,
        "weighted_metrics": ["accuracy"],
    },
    "convolutions": {"build": convolutional},
    "a loss scale": {"loss_scale": LossScale(initial=1024)},
    "no XLA": {"jit_compile": False},
    "nothing compiled": {"run_eagerly": True},
}


@pytest.mark.parametrize("case", CASES)
def test_examples_at_once_make_the_update_of_micro_batches_of_one(case):
    one_by_one = train_one_by_one(**CASES[case])
    assert_same(one_by_one, train(AT_ONCE, **CASES[case]))


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_examples_are_combined_as_micro_batches_of_one(combine):
    one = Accumulation(micro_batch_size=1, combine=combine)
    many = Accumulation(micro_batch_size=4, per_example=True, combine=combine)
    assert_same(train(one, **WEIGHTED), train(many, **WEIGHTED))


def test_several_loader_batches_are_run_per_example_too():
    steps = Accumulation(steps=1, per_example=True)
    assert_same(train_one_by_one(), train(steps))


def test_recurrent_layer_is_run_per_example():
    options = {"build": lambda: of_ids(layers.GRU(5)), "data": {"x": IDS}}
    one_by_one = train_one_by_one(**options)
    if BACKEND == "tensorflow":
        with pytest.warns(UserWarning, match="one after the other"):
            at_once = train(AT_ONCE, **options)
    else:
        at_once = train(AT_ONCE, **options)
    assert_same(one_by_one, at_once)


class KeepsLosses(Trainer):
    """Logs how much the losses of alike examples differ; learns nothing."""

    def on_accumulate(self, gradients, info):
        self.log("largest", info.loss, reduce="max")
        self.log("smallest", info.loss, reduce="min")
        return [0.0 * g for g in gradients]


def test_each_example_drops_out_by_itself_and_anew_in_each_update():
    def build():
        return keras.Sequential(
            [keras.Input([64]), layers.Dropout(0.5), layers.Dense(1)]
        )

    _, logs = train(
        Accumulation(micro_batch_size=11, per_example=True),
        build,
        KeepsLosses,
        data={"x": np.ones([11, 64]), "y": np.zeros([11, 1])},
        loss="mse",
        metrics=None,
        jit_compile=False,
    )
    assert logs["largest"][0] > 1.1 * logs["smallest"][0]
    assert logs["smallest"][0] != logs["smallest"][1]


def test_hooks_draw_for_each_example():
    class Draws(Trainer):
        def on_micro_batch(self, batch, info):
            drawn = keras.random.uniform([], seed=self.rng)
            self.log("largest", drawn, reduce="max")
            self.log("smallest", drawn, reduce="min")
            return batch

    _, logs = train(AT_ONCE, cls=Draws, jit_compile=False)
    assert logs["largest"][0] > 0.8
    assert logs["smallest"][0] < 0.2


def test_nan_in_an_example_skips_the_update():
    x = X.copy()
    x[3, 2] = np.nan
    trainer, _ = train(AT_ONCE, data={"x": x})
    assert trainer.progress.skipped_updates == 2
    assert trainer.progress.updates == 2


def test_callbacks_are_told_of_all_examples_of_a_micro_batch_together():
    ordinary = Accumulation(micro_batch_size=4)
    options = {"cls": Trainer, **WEIGHTED}
    expected, _ = train(ordinary, **options)
    trainer, _ = train(AT_ONCE, **options)
    for name in ("loss", "weight"):
        np.testing.assert_allclose(
            trainer.micro_batch_logs[name],
            expected.micro_batch_logs[name],
            rtol=1e-5,
        )


def test_window_of_padding_alone_makes_an_update_of_no_gradient():
    class Seen(ClipsExamples):
        def on_apply(self, gradients, info):
            self.log("total", info.total_weight)
            return [g + 1.0 for g in gradients]

    data = {"sample_weight": np.zeros(22, "float32")}
    trainer, logs = train(AT_ONCE, cls=Seen, data=data, loss=BY_WEIGHT)
    assert logs["total"] == [0.0, 0.0]
    assert logs["gradient_norm"] == [0.0, 0.0]
    keras.utils.set_random_seed(0)
    for before, after in zip(mlp().weights, trainer.model.weights, strict=True):
        np.testing.assert_allclose(
            numbers(after), numbers(before) - 4 * 0.5, rtol=1e-5
        )


def test_label_of_no_class_is_refused_on_tensorflow():
    if BACKEND != "tensorflow":
        pytest.skip("JAX refuses no index")
    with pytest.raises(DataError, match="0 to 2"):
        train(AT_ONCE, data={"y": Y + 1}, jit_compile=True)


@pytest.mark.parametrize("case", ["clipping", "two outputs"])
def test_replicas_share_the_examples_out(case):
    accumulation = Accumulation(micro_batch_size=2, per_example=True)
    alone = train(accumulation, **CASES[case])
    with distributed(2):
        shared = train(accumulation, **CASES[case])
    assert_same(alone, shared)


def test_layer_that_keeps_statistics_is_refused_by_name():
    def build():
        return keras.Sequential(
            [
                keras.Input([7]),
                layers.BatchNormalization(name="norm"),
                layers.Dense(3),
            ]
        )

    with pytest.raises(ValueError, match="norm/moving_mean"):
        train(AT_ONCE, build)


def test_loss_over_a_window_is_refused():
    class Whole(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return ops.mean(embeddings)

    with pytest.raises(ValueError, match="per_example=True must come with"):
        Whole(mlp(), optimizer="sgd", accumulation=AT_ONCE)


def test_per_example_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="per_example must be True or False"):
        Accumulation(micro_batch_size=2, per_example=1)


def test_equivalence_and_memory_are_told_per_example():
    trainer, _ = train(AT_ONCE)
    assert trainer.check_equivalence((X[:8], Y[:8])).is_exact
    rows = trainer.memory_plan((X[:8], Y[:8])).rows
    assert len(rows) > 1

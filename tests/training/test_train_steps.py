"""Claims about how a model with a `train_step` of its own is refused."""

import textwrap

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND == "tensorflow":
    import tensorflow as tf

X = np.random.default_rng(0).normal(size=[12, 4]).astype("float32")


class Net(keras.Model):
    """Reconstructs its inputs, with any `train_step`."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.dense = keras.layers.Dense(4)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x, training=False):
        return self.dense(self.hidden(x))


class Descends(Net):
    def train_step(self, data):
        """Descend a loss, and nothing else."""
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = ops.mean(ops.square(found - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class AsInKerasExamples(Net):
    """Asks for the kind of data, and has a tracker and a penalty."""

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        with tf.GradientTape() as tape:
            errors = ops.square(self(data, training=True) - data)
            total_loss = ops.mean(ops.sum(errors, axis=-1))
            total_loss += sum(self.losses)
        weights = self.trainable_weights
        grads = tape.gradient(total_loss, weights)
        self.optimizer.apply_gradients(zip(grads, weights))  # noqa: B905
        self.loss_tracker.update_state(total_loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        return {}


class DescendsAVector(Net):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, found)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": ops.mean(loss)}


class DescendsANumberOfKeras(Net):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.dice(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ByTheCompiledLoss(Net):
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class AddsToTheCompiledLoss(Net):
    """Adds losses of its own, which Keras's loss has in it."""

    def call(self, x, training=False):
        self.add_loss(0.1 * ops.mean(ops.square(x), axis=-1))
        return super().call(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            extra = ops.mean(ops.abs(y_pred))
            loss = 0.5 * self.compute_loss(x, y, y_pred) + extra
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class TakesWeightsOrNone(Net):
    """Takes data apart by their length, as Keras's guide does."""

    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(
                y=y, y_pred=y_pred, sample_weight=sample_weight
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


class ByALossOfTwoParts(Net):
    """Has a `compute_loss` that takes other arguments than Keras's."""

    def compute_loss(self, one, other):
        return ops.mean(ops.square(one - other))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(self(x, training=True), y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class KeepsAMetric(Net):
    """As in Keras's guide: a metric of its own, and those of `compile`."""

    def __init__(self):
        super().__init__()
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.loss_tracker = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [*super().metrics, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = ops.mean(ops.square(found - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}


class LoopsOverMetrics(KeepsAMetric):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = ops.mean(ops.square(found - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {m.name: m.result() for m in self.metrics}


class HandsOn(Net):
    """As detectors of a library: a loss, and a form of data, of its own."""

    def train_step(self, *args):
        data = args[-1]
        if isinstance(data, dict):
            data = data["images"], data["labels"]
        return super().train_step(*args[:-1], data)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return ops.mean(ops.square(y_pred - y))


class Counts(Net):
    def train_step(self, *args):
        self.seen = 1
        return super().train_step(*args)


class HandsOnAtTimes(Net):
    def train_step(self, *args):
        if self.built:
            return {}
        return super().train_step(*args)


class HandsOnToAnother(Counts):
    def train_step(self, *args):
        return super().train_step(*args)


class Clips(Net):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(data))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [ops.clip(g, -1.0, 1.0) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class TrainsAPart(Net):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(data))
        gradients = tape.gradient(loss, self.dense.trainable_variables)
        self.optimizer.apply(gradients, self.dense.trainable_variables)
        return {}


class KeepsAnAverage(Net):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(data))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.average.assign(0.9 * self.average)
        return {}


class Branches(Net):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(data))
            if self.is_sparse:
                loss = loss + 1.0
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class AddsPenalties(Net):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(data)) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class TakesAnyArguments(Net):
    def train_step(self, *data):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(*data))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class TakesFirstOfData(Net):
    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            loss = ops.mean(self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class TakesFourParts(Net):
    def train_step(self, data):
        x, y, z, w = data
        with tf.GradientTape() as tape:
            loss = ops.mean(self(x) + y + z + w)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class TakesTwoSteps(Net):
    def train_step(self, data):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = ops.mean(self(data))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        return {}


class OfJax(Net):
    def train_step(self, state, data):
        return {}, state


class SomeDistance(Net):
    train_step = eval("lambda self, data: {}")  # without a source


def message_for(cls, model=None, remedy="Remove it"):
    with pytest.raises(ValueError) as caught:
        Trainer(model or cls(), optimizer="sgd")
    message = str(caught.value)
    assert message.startswith("model must not override train_step")
    assert f"Received: {cls.__name__}.train_step. {remedy}" in message
    assert "docs/train_step.md" in message
    return message


def shown_trainer(message):
    """Run the class that a message shows."""
    code = message[message.index("    class ") : message.index("\n\nwhere")]
    names = {"Trainer": Trainer, "WeightedLoss": WeightedLoss}
    names |= {"keras": keras, "ops": ops}
    exec(textwrap.dedent(code), names)
    return next(v for k, v in names.items() if k.endswith("Trainer") and k[7:])


def trained(cls, model, y, **options):
    trainer = cls(
        model,
        optimizer=keras.optimizers.SGD(0.1),
        accumulation=Accumulation(micro_batch_size=3),
        **options,
    )
    trainer.fit(X, y, batch_size=6, shuffle=False, verbose=0)
    return trainer.model.get_weights()


def network(cls=Net):
    keras.utils.set_random_seed(0)
    model = cls()
    model(X)
    return model


def test_hook_is_made_of_the_lines_of_a_train_step():
    assert """
    class DescendsTrainer(Trainer):
        def compute_loss(self, batch, info):
            x, y = batch.x, batch.y
            found = self.model(x, training=info.training)
            loss = ops.mean(ops.square(found - y))
            return WeightedLoss(loss, ops.shape(x)[0])
""" in message_for(Descends)


def test_hook_leaves_out_what_a_trainer_does_by_itself():
    message = message_for(AsInKerasExamples)
    assert (
        """
            data = batch.x
            errors = ops.square(self.model(data, training=info.training) - data)
            total_loss = ops.mean(ops.sum(errors, axis=-1))
            return WeightedLoss(total_loss, ops.shape(batch.x)[0])
"""
        in message
    )
    assert "Its test_step may go too" in message
    assert "is for a WindowLossTrainer" in message


def test_hook_sums_a_loss_of_keras_that_has_a_value_per_example():
    message = message_for(DescendsAVector)
    assert "return WeightedLoss(loss, None)" in message
    assert "a tape takes the gradient of their sum" in message
    message = message_for(DescendsANumberOfKeras)
    assert "return WeightedLoss(loss, ops.shape(x)[0])" in message


@pytest.mark.parametrize(
    "cls",
    [Descends, DescendsAVector, AsInKerasExamples, AddsToTheCompiledLoss],
)
def test_shown_hook_makes_the_updates_of_the_train_step(cls):
    if BACKEND != "tensorflow":
        reason = "these train_steps are TensorFlow's"
        print(f"Not run on {BACKEND}: {reason}.")
        pytest.skip(reason)
    model = network(cls)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    y = None if cls is AsInKerasExamples else X
    model.fit(X, y, batch_size=6, shuffle=False, verbose=0)
    shown = shown_trainer(message_for(cls))
    own = type("LeftOut", (cls,), {"train_step": keras.Model.train_step})
    received = trained(shown, network(own), y, loss="mse")
    for one, other in zip(received, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cls", [KeepsAMetric, LoopsOverMetrics])
def test_shown_hook_updates_the_metrics_of_the_train_step(cls):
    shown = shown_trainer(message_for(cls))
    steps = {"train_step": keras.Model.train_step}
    model = network(type("LeftOut", (cls,), steps))
    trainer = shown(
        model,
        optimizer=keras.optimizers.SGD(0.0),
        loss="mse",
        metrics=["mse"],
        accumulation=Accumulation(micro_batch_size=4),
    )
    history = trainer.fit(X, X, batch_size=12, verbose=0).history
    error = ops.convert_to_numpy(model(X)) - X
    np.testing.assert_allclose(history["error"], [np.mean(np.abs(error))], 1e-5)
    name = "total" if cls is KeepsAMetric else "mse"
    np.testing.assert_allclose(history[name], [np.mean(error**2)], 1e-5)


def test_loss_of_other_arguments_needs_a_hook():
    assert "self.model.compute_loss(self.model(" in message_for(
        ByALossOfTwoParts
    )


@pytest.mark.parametrize("cls", [ByTheCompiledLoss, TakesWeightsOrNone])
def test_compiled_loss_needs_no_hook(cls):
    message = message_for(cls)
    assert "Remove it, and nothing else" in message
    assert "class" not in message


def test_step_that_hands_data_on_to_that_of_keras_can_be_left_out():
    message = message_for(HandsOn, remedy="Leave it out, as it only hands")
    assert "(Trainer)" not in message
    told = "train_step = keras.Model.train_step"
    assert told in message
    names = {"keras": keras, "HandsOn": HandsOn}
    exec(f"class LeftOut(HandsOn):\n    {told}", names)
    original, model = network(HandsOn), network(names["LeftOut"])
    original.compile(keras.optimizers.SGD(0.1))
    original.fit(X, X, batch_size=6, shuffle=False, verbose=0)
    received = trained(Trainer, model, X, denominator="samples")
    for one, other in zip(received, original.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("cls", "is_told"),
    [
        (Descends, True),
        (Clips, True),
        (AsInKerasExamples, False),
        (AddsPenalties, False),
        (ByTheCompiledLoss, False),
    ],
)
def test_penalties_that_a_train_step_leaves_out_are_told(cls, is_told):
    model = network(cls)
    told = "leaves out what regularizers and add_loss give"
    assert told not in message_for(cls, model)
    model.dense.kernel.regularizer = keras.regularizers.L2(0.1)
    assert (told in message_for(cls, model)) is is_told


@pytest.mark.parametrize(
    "cls",
    [
        AddsPenalties,
        Branches,
        Clips,
        Counts,
        HandsOnAtTimes,
        HandsOnToAnother,
        KeepsAnAverage,
        OfJax,
        SomeDistance,
        TakesAnyArguments,
        TakesFirstOfData,
        TakesFourParts,
        TakesTwoSteps,
        TrainsAPart,
    ],
)
def test_general_shape_is_shown_where_a_train_step_does_more(cls):
    message = message_for(cls)
    for hook in ("compute_loss", "on_apply", "after_apply"):
        assert f"def {hook}(self, " in message
    assert f"class {cls.__name__}Trainer(Trainer):" in message

"""Claims about what is not recorded, as PyTorch sees no operation in it.

A layer or loss does something with tensors that is none, or does something else
each time. What cannot be recorded runs operation by operation.
"""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch

from accumtrainer.steps.torch.programs import Program

layers = keras.layers
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


leaves_variables_unused = pytest.mark.filterwarnings(
    "ignore:Gradients do not exist"
)


class Own(layers.Layer):
    """Computes a function of itself and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4))

    def call(self, inputs):
        return self.function(self, inputs)


def make_model(*more):
    return keras.Sequential([keras.Input([4]), *more, layers.Dense(3)])


IN_TWOS = Accumulation(micro_batch_size=2)


def train(make, *, x=X, accumulation=IN_TWOS, **options):
    keras.utils.set_random_seed(3)
    trainer = Trainer(
        make(),
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        accumulation=accumulation,
        **options,
    )
    trainer.fit(x, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return trainer.model


def train_plainly(make, x=X):
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return model


def assert_as_by_keras(make, x=X, **options):
    expected = train_plainly(make, x).get_weights()
    for run_eagerly in (False, True):
        model = train(make, x=x, run_eagerly=run_eagerly, **options)
        ours = model.get_weights()
        for one, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def turned(layer, inputs):
    values = (inputs @ layer.kernel).reshape(-1, 2, 2)
    aside = values.detach()
    aside.transpose_(1, 2)
    return torch.matmul(values, aside).reshape(-1, 4)


def doubled(layer, inputs):
    values = inputs @ layer.kernel
    values.data = values.data * 2
    return torch.tanh(values)


def unit(layer, inputs):
    norm = torch.linalg.vector_norm(layer.kernel.value.data)
    layer.kernel.value.data = layer.kernel.value.data / norm
    return inputs @ layer.kernel


def largest_in_given_memory(layer, inputs):
    with torch.no_grad():
        values = torch.empty(len(inputs))
        places = torch.empty(len(inputs), dtype=torch.long)
        torch.max(inputs, 1, out=(values, places))
    return inputs @ layer.kernel * values[:, None] + places[:, None]


@pytest.mark.parametrize(
    "function", [turned, doubled, unit, largest_in_given_memory]
)
def test_tensors_that_are_given_other_memory_or_shapes(function):
    assert_as_by_keras(lambda: make_model(Own(function)))


class Recurrent(torch.nn.Module):
    """Keeps for its derivatives what it makes only where there are some."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None])[0][:, -1]


def test_operations_that_make_less_without_gradients():
    assert_as_by_keras(
        lambda: make_model(layers.TorchModuleWrapper(Recurrent()))
    )


class Positions(layers.Layer):
    """Keeps a table that it makes as long as is needed."""

    table = None

    def compute_output_shape(self, shape):
        return shape

    def call(self, inputs):
        if self.table is None or len(self.table) < inputs.shape[1]:
            self.table = torch.cos(torch.arange(inputs.shape[1]) * 0.1)
        return inputs * self.table[: inputs.shape[1], None]


def test_tables_that_a_layer_keeps():
    def make():
        pooling = layers.GlobalAveragePooling1D()
        inputs = keras.Input([None, 4])
        outputs = layers.Dense(3)(pooling(Positions()(inputs)))
        return keras.Model(inputs, outputs)

    def batches():
        for length in (3, 5, 4):
            yield np.repeat(X[:6, None], length, axis=1), Y[:6]

    expected, trained = make(), make()
    trained.set_weights(expected.get_weights())
    expected.compile(keras.optimizers.SGD(0.1), "mse")
    expected.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0)
    trainer = Trainer(
        trained,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=2),
    )
    trainer.fit(batches(), steps_per_epoch=3, shuffle=False, verbose=0)
    weights = trained.get_weights(), expected.get_weights()
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_what_a_layer_shows_others_has_numbers():
    class Showing(layers.Layer):
        def __init__(self):
            super().__init__()
            self.shown, self.last = None, [None]

        def call(self, inputs):
            self.shown = inputs.detach()
            self.last[0] = self.shown
            return inputs

    (layer, _) = train(lambda: make_model(Showing())).layers
    np.testing.assert_array_equal(layer.shown.numpy(), X[-2:])
    np.testing.assert_array_equal(layer.last[0].numpy(), X[-2:])


class Scaling(layers.Layer):
    """Multiplies by a tensor of its own that changes whenever it trains."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.scale = torch.ones(4)
        self.others = {"scale": torch.ones(4)}

    def call(self, inputs, training=False):
        if training:
            self.change(self)
        return inputs * self.scale * self.others["scale"]


def multiply(layer):
    layer.scale.mul_(0.9)


def multiply_in_dict(layer):
    layer.others["scale"].mul_(0.9)


def set_item(layer):
    layer.scale[0] = layer.scale[1] + 0.5


def replace(layer):
    layer.scale = layer.scale * 0.9


@pytest.mark.parametrize(
    "change", [multiply, multiply_in_dict, set_item, replace]
)
def test_tensors_that_a_layer_keeps_change_when_it_trains(change):
    assert_as_by_keras(lambda: make_model(Scaling(change)), accumulation=1)


class Scale(torch.nn.Module):
    """Multiplies by the number of times it has been run."""

    def __init__(self):
        super().__init__()
        self.runs = torch.zeros(())

    def forward(self, inputs):
        if inputs.device.type != "meta":  # or else Keras asks for shapes
            self.runs += 1
        return inputs * self.runs


def test_tensors_that_a_module_keeps_change_when_it_runs():
    def make():
        return make_model(layers.TorchModuleWrapper(Scale()))

    assert_as_by_keras(make, accumulation=1)


class Rematerialized(layers.Layer):
    """Drops out, and does so again for its gradients."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.dense = layers.Dense(4)
        self.dropout = layers.Dropout(0.5, seed=3)
        self.use_reentrant = use_reentrant

    def call(self, inputs, training=False):
        def run(inputs):
            return self.dense(self.dropout(inputs, training=training))

        if self.use_reentrant is None:
            return run(inputs)
        return torch.utils.checkpoint.checkpoint(
            run, inputs, use_reentrant=self.use_reentrant
        )


# As it says where nobody asks for gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_rematerialized_is_as_if_it_were_not(
    use_reentrant, run_eagerly
):
    ours, expected = (
        train(
            lambda kind=kind: make_model(layers.Dense(4), Rematerialized(kind)),
            run_eagerly=run_eagerly,
        ).get_weights()
        for kind in (use_reentrant, None)
    )
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Mixed(layers.Layer):
    """Keeps layers and what they compute in one dict and in one list."""

    def __init__(self):
        super().__init__()
        self.parts = {"dense": layers.Dense(4), "last": None}
        self.more = [layers.Dense(4), None]

    def build(self, shape):
        self.parts["dense"].build(shape)
        self.more[0].build(shape)

    def call(self, inputs):
        self.parts["last"] = self.parts["dense"](inputs)
        self.more[1] = self.more[0](self.parts["last"])
        return self.more[1]


class Delaying(layers.Layer):
    """Adds what it was given before, with which nothing can be recorded."""

    before = None

    def call(self, inputs):
        if inputs.device.type == "meta":
            return inputs * 1.0
        before, self.before = self.before, inputs.detach()
        return inputs if before is None else inputs + before.mean()


@pytest.mark.parametrize("layer", [Mixed, Delaying])
def test_layers_have_what_they_had_where_they_cannot_be_recorded(layer):
    def train_inside_fit():
        keras.utils.set_random_seed(3)
        model = make_model(layer())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(
            X,
            Y,
            batch_size=2,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[GradientAccumulation(3)],
        )
        return model

    expected = train(lambda: make_model(layer()), run_eagerly=True)
    for ours in (train(lambda: make_model(layer())), train_inside_fit()):
        weights = ours.get_weights(), expected.get_weights()
        for one, other in zip(*weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class SelfAttention(layers.Layer):
    """Gives attention what is repeated by the derivative of a mean."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)

    def call(self, inputs):
        return self.attention(inputs, inputs, use_causal_mask=True)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dense(4, activity_regularizer="l2"),
        # It keeps a tensor of one number.
        lambda: layers.Dense(4, kernel_regularizer="orthogonal_regularizer"),
        lambda: layers.Dropout(0.5, seed=1),
        layers.BatchNormalization,
        lambda: keras.Sequential([layers.Reshape([2, 2]), layers.GRU(4)]),
        lambda: keras.Sequential(
            [
                layers.Reshape([2, 2]),
                SelfAttention(),
                layers.GlobalAveragePooling1D(),
            ]
        ),
    ],
    ids="activity kernel dropout normalization recurrent attention".split(),
)
def test_layers_of_keras_are_recorded(monkeypatch, layer):
    recorded = []
    record = Program._record

    def note(program, *arguments):
        recorded.append(record(program, *arguments))
        return recorded[-1]

    monkeypatch.setattr(Program, "_record", note)
    train(lambda: make_model(layer()))
    assert recorded and None not in recorded


def frozen_module():
    module = torch.nn.Linear(4, 4)
    wrapper = layers.TorchModuleWrapper(module)
    model = make_model(wrapper)
    module.requires_grad_(False)
    return model


def frozen_kernel():
    model = make_model(layers.Dense(4))
    model.layers[0].kernel.value.requires_grad_(False)
    return model


def masked_gradient():
    model = make_model(layers.Dense(4))
    mask = torch.tensor([0.0, 1.0, 1.0, 2.0])
    model.layers[0].kernel.value.register_hook(lambda grad: grad * mask)
    return model


@leaves_variables_unused
@pytest.mark.parametrize("make", [frozen_module, frozen_kernel])
def test_parameters_that_pytorch_has_frozen_stay(make):
    assert_as_by_keras(make)
    keras.utils.set_random_seed(3)
    before = make().get_weights()
    np.testing.assert_array_equal(train(make).get_weights()[0], before[0])


@leaves_variables_unused
def test_what_a_hook_of_a_gradient_reads_is_read_anew():
    factors = {"factor": 1.0}
    model = make_model(layers.Dense(4))
    model.layers[0].kernel.value.register_hook(lambda g: g * factors["factor"])
    trainer = Trainer(model, "sgd", "mse")
    trainer.train_on_batch(X, Y)
    before = model.get_weights()[0]
    factors["factor"] = 0.0
    trainer.train_on_batch(X, Y)
    np.testing.assert_array_equal(model.get_weights()[0], before)


def test_gradients_are_changed_by_what_is_hooked_to_a_parameter():
    assert_as_by_keras(masked_gradient)
    expected = train_plainly(masked_gradient).get_weights()
    accumulation = Accumulation(micro_batch_size=2, per_example=True)
    ours = train(masked_gradient, accumulation=accumulation).get_weights()
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@leaves_variables_unused
def test_parameters_may_be_frozen_between_epochs():
    class Freezing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel = self.model.layers[0].kernel
            kernel.value.requires_grad_(False)
            self.frozen = ops.convert_to_numpy(kernel).copy()

    keras.utils.set_random_seed(3)
    model, freezing = make_model(layers.Dense(4)), Freezing()
    trainer = Trainer(
        model, optimizer="sgd", loss="mse", accumulation=Accumulation(steps=2)
    )
    before = model.get_weights()[0]
    trainer.fit(X, Y, batch_size=3, callbacks=[freezing], verbose=0)
    assert np.abs(freezing.frozen - before).max() > 1e-4
    trainer.fit(X, Y, batch_size=3, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], freezing.frozen)


class Reading(layers.Layer):
    """Multiplies by a number in a tensor of its own."""

    def __init__(self, read):
        super().__init__()
        self.read = read
        self.scale = torch.full((4,), 2.0)

    def call(self, inputs):
        return inputs * self.read(self.scale)


@pytest.mark.parametrize(
    "read",
    [
        lambda scale: scale.tolist()[0],
        lambda scale: scale[0].tolist(),
        lambda scale: scale.data.tolist()[0],
        lambda scale: scale.view(2, 2).tolist()[0][0],
        lambda scale: scale[0].item(),
        lambda scale: float(scale[0]),
        lambda scale: int(scale[0]),
        lambda scale: 2.0 if scale[0] > 1 else 0.0,
        lambda scale: float(scale.numpy()[0]),
        lambda scale: float(np.asarray(scale)[0]),
        lambda scale: float(np.from_dlpack(scale)[0]),
        lambda scale: scale.untyped_storage().tolist()[-1] / 32,
        lambda scale: scale.storage()[0],
        lambda scale: float(f"{scale[0]:.3f}"),
        lambda scale: float(str(scale.max())[7:9]),
        lambda scale: float(torch.equal(scale, torch.full((4,), 2.0))) * 2,
    ],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_numbers_that_a_layer_reads_in_its_own_tensor_are_read_again(read):
    layer = Reading(read)
    trainer = Trainer(make_model(layer), optimizer="sgd", loss="mse")
    before = trainer.predict(X, verbose=0)
    layer.scale.mul_(0.0)
    after = trainer.predict(X, verbose=0)
    assert np.abs(before).max() > 0.1
    np.testing.assert_array_equal(after, np.zeros_like(after))

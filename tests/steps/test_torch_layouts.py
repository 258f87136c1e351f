"""Kernels that lie in memory as PyTorch's convolutions read them."""

import os

import keras
import numpy as np
import pytest
from keras import layers

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It is PyTorch that has an order.", allow_module_level=True)

import torch
from torch.utils import _python_dispatch

from accumtrainer import Accumulation, Trainer

aten = torch.ops.aten


class SeesConvolutions(_python_dispatch.TorchDispatchMode):
    """Notes which kernels are copied, or would have to be.

    Args:
        size: of a kernel, which nothing else has.
    """

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.count = 0
        self.copied = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is aten.clone.default and result.numel() == self.size:
            # To be joined with others they are copied as Keras has them.
            is_moved = result.stride() != args[0].stride()
            if is_moved and not result.is_contiguous():
                self.copied.append("before a convolution")
        if function is aten.convolution.default:
            image, kernel = args[:2]
            layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
                image.dim(), torch.contiguous_format
            )
            if not image.is_contiguous(memory_format=layout):
                layout = torch.contiguous_format
            if not kernel.is_contiguous(memory_format=layout):
                self.copied.append("in a convolution")
            self.count += 1
        return result


LAYERS = {
    "Conv1D": (1, lambda: layers.Conv1D(7, 3)),
    "Conv2D": (2, lambda: layers.Conv2D(7, 3)),
    "Conv2D of 1x1": (2, lambda: layers.Conv2D(7, 1)),
    "Conv2D, channels first": (
        2,
        lambda: layers.Conv2D(7, 3, data_format="channels_first"),
    ),
    "grouped": (2, lambda: layers.Conv2D(10, 3, groups=5)),
    "Conv3D": (3, lambda: layers.Conv3D(7, 2)),
    "Conv2DTranspose": (2, lambda: layers.Conv2DTranspose(7, 3)),
    "DepthwiseConv2D": (2, lambda: layers.DepthwiseConv2D(3)),
    "bfloat16": (2, lambda: layers.Conv2D(7, 3, dtype="mixed_bfloat16")),
}
CHANNELS = 5


def make_model(axes, make_layer):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([*([6, 8, 7][:axes]), CHANNELS]),
            make_layer(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def make_data(axes, samples=16):
    rng = np.random.default_rng(0)
    shape = [samples, *([6, 8, 7][:axes]), CHANNELS]
    return (
        rng.standard_normal(shape, dtype="float32"),
        rng.standard_normal([samples, 1], dtype="float32"),
    )


def make_trainer(model, **options):
    return Trainer(
        model,
        optimizer=keras.optimizers.Adam(0.01),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=4),
        seed=0,
        **options,
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_kernel_lies_as_its_convolution_reads_it(name, jit_compile):
    axes, make_layer = LAYERS[name]
    x, y = make_data(axes)
    model = make_model(axes, make_layer)
    trainer = make_trainer(model, jit_compile=jit_compile)
    trainer.fit(x, y, batch_size=8, verbose=0)
    with SeesConvolutions(model.weights[0].value.numel()) as seen:
        trainer.fit(x, y, batch_size=8, verbose=0)
    assert (seen.count, seen.copied) == (4, [])

    by_keras = make_model(axes, make_layer)
    by_keras.compile(keras.optimizers.Adam(0.01), "mse")
    by_keras.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    in_order = make_model(axes, make_layer)
    make_trainer(in_order).fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
    )
    tolerance = 3e-2 if name == "bfloat16" else 1e-5
    for ours, theirs in zip(
        in_order.get_weights(), by_keras.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def test_everything_of_a_kernels_shape_lies_as_it_does():
    model = make_model(2, lambda: layers.Conv2D(7, 3))
    trainer = make_trainer(model)
    x, y = make_data(2)
    trainer.fit(x, y, batch_size=8, verbose=0)
    kernel = model.weights[0].value
    assert not kernel.is_contiguous()
    slots = [
        v.value for v in trainer.optimizer.variables if v.shape == kernel.shape
    ]
    assert [slot.stride() for slot in slots] == 2 * [kernel.stride()]


def test_next_trainer_of_a_model_lays_out_what_is_new():
    x, y = make_data(2)
    model = make_model(2, lambda: layers.Conv2D(7, 3))
    alone = make_model(2, lambda: layers.Conv2D(7, 3))
    for _ in range(2):
        trainer = make_trainer(model)
        trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        alone.compile(keras.optimizers.Adam(0.01), "mse")
        alone.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    kernel = model.weights[0].value
    slots = [
        v.value for v in trainer.optimizer.variables if v.shape == kernel.shape
    ]
    assert [slot.stride() for slot in slots] == 2 * [kernel.stride()]
    for ours, theirs in zip(
        model.get_weights(), alone.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_kernel_is_saved_and_read_like_any_other(tmp_path):
    x, y = make_data(2)
    model = make_model(2, lambda: layers.Conv2D(7, 3))
    trainer = make_trainer(model)
    trainer.fit(x, y, batch_size=8, verbose=0)
    trainer.save(tmp_path / "checkpoint")
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model(2, lambda: layers.Conv2D(7, 3))
    other.load_weights(tmp_path / "model.weights.h5")
    restored = make_trainer(make_model(2, lambda: layers.Conv2D(7, 3)))
    restored.restore(tmp_path / "checkpoint")
    for weights in (other.get_weights(), restored.model.get_weights()):
        np.testing.assert_array_equal(weights[0], model.get_weights()[0])


def test_variable_of_a_kernels_shape_that_is_none_trains_alike():
    class Scales(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=[3, 3, 5, 7], name="scale")

        def call(self, x):
            return x * keras.ops.sum(self.scale)

    def make_layer():
        return keras.Sequential([layers.Conv2D(7, 3), Scales()])

    x, y = make_data(2)
    model = make_model(2, make_layer)
    make_trainer(model).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    by_keras = make_model(2, make_layer)
    by_keras.compile(keras.optimizers.Adam(0.01), "mse")
    by_keras.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for ours, theirs in zip(
        model.get_weights(), by_keras.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


class Counting(torch.nn.Module):
    """A convolution with a buffer in the shape of its kernel."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(5, 7, 3)
        self.register_buffer("calls", torch.zeros(7, 5, 3, 3))

    def forward(self, x):
        if self.training:
            self.calls.add_(1.0)
        return self.convolution(x)


def test_buffer_of_a_kernels_shape_is_where_its_module_finds_it():
    module = Counting()
    model = keras.Sequential(
        [
            keras.Input([6, 7, 5]),
            layers.Permute([3, 1, 2]),
            layers.TorchModuleWrapper(module),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    x, y = np.ones([16, 6, 7, 5], "float32"), np.ones([16, 1], "float32")
    trainer = Trainer(model, optimizer="sgd", loss="mse")
    for calls in (2, 4, 6):
        trainer.fit(x, y, batch_size=8, verbose=0)
        assert float(module.calls[0, 0, 0, 0]) == calls


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_kernel_that_is_viewed_by_a_shape_lies_as_it_did(run_eagerly):
    def penalty(kernel):
        return 0.1 * keras.ops.convert_to_tensor(kernel).view(-1).square().sum()

    def make_layer():
        return layers.Conv2D(7, 3, kernel_regularizer=penalty)

    x, y = make_data(2)
    model, by_keras = make_model(2, make_layer), make_model(2, make_layer)
    trainer = make_trainer(model, run_eagerly=run_eagerly)
    trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    by_keras.compile(keras.optimizers.Adam(0.01), "mse")
    by_keras.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for ours, theirs in zip(
        model.get_weights(), by_keras.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)

"""Claims about what is peculiar to PyTorch: what is recorded, and draws."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer, record_trace
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs

from accumtrainer.keras_api import torch_draws
from accumtrainer.steps.torch import graphs, programs, source
from accumtrainer.steps.torch.backend import TorchBackend

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = np.random.default_rng(1).integers(3, size=24)


def make_model(make_more=None):
    keras.utils.set_random_seed(3)
    more = [] if make_more is None else [make_more()]
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            *more,
            layers.Dense(3),
        ]
    )


def train(model, *, x=X, trainer_type=Trainer, epochs=2, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {
        "optimizer": keras.optimizers.Adam(0.01, clipnorm=0.5),
        "loss": loss,
        "metrics": ["accuracy"],
        "accumulation": Accumulation(micro_batch_size=4),
        "seed": 0,
    } | options
    trainer = trainer_type(model, **options)
    trainer.fit(x, Y, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
    return trainer


def everything(trainer):
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return [ops.convert_to_numpy(variable) for variable in variables]


def assert_same(trainer, other):
    for one, two in zip(everything(trainer), everything(other), strict=True):
        np.testing.assert_array_equal(one, two)


def assert_close(trainer, other):
    for one, two in zip(everything(trainer), everything(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.fixture
def recorded(monkeypatch):
    """List the programs that are recorded."""
    return note_graphs(monkeypatch)


# Recorded programs compute what the operations do, but for the last digits.


@pytest.fixture(params=["streamed", "fused"])
def plan(request, use_plan):
    """Have windows run by either plan, recorded or not."""
    use_plan(request.param)
    return request.param


@pytest.mark.parametrize(
    "make_more",
    [None, lambda: layers.Dropout(0.3), lambda: layers.GaussianNoise(0.1)],
    ids=["plain", "dropout", "noise"],
)
def test_recorded_programs_compute_what_operations_do(
    recorded, plan, make_more
):
    one = train(make_model(make_more))
    count = {"streamed": 2, "fused": 1}[plan]
    assert len(recorded) == count
    assert_close(one, train(make_model(make_more), run_eagerly=True))
    assert len(recorded) == count


def test_equal_windows_are_recorded_once(recorded):
    trainer = train(make_model())
    assert len(recorded) == 1
    trainer.fit(X, Y, batch_size=12, verbose=0)
    trainer.train_on_batch(X[:12], Y[:12])
    assert len(recorded) == 1
    trainer.fit(X[:15], Y[:15], batch_size=12, verbose=0)
    assert len(recorded) > 1


def test_window_that_is_skipped_takes_the_other_way(plan):
    x = X.copy()
    x[0] = np.inf
    one = train(make_model(), x=x)
    assert one.progress.skipped_updates == 2
    assert_close(one, train(make_model(), x=x, run_eagerly=True))


class LooksAtNumbers(layers.Layer):
    def call(self, inputs):
        return inputs * 2.0 if inputs.sum() > 0 else inputs


@pytest.mark.usefixtures("plan")
def test_what_looks_at_numbers_runs_operation_by_operation(recorded):
    one = train(make_model(LooksAtNumbers))
    assert_close(one, train(make_model(LooksAtNumbers), run_eagerly=True))
    assert len(recorded) == 1  # to apply


def test_compiling_what_cannot_be_recorded_says_why():
    with pytest.warns(UserWarning, match="run without it.*data-dependent"):
        train(make_model(LooksAtNumbers), jit_compile=True)


def test_compiled_programs_make_the_updates_of_recorded_ones(monkeypatch):
    monkeypatch.setattr(source, "COMPILER", "inductor")
    one = train(make_model(), jit_compile=True)
    for a, b in zip(
        everything(one), everything(train(make_model())), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_programs_that_the_compiler_refuses_run_without_it(monkeypatch):
    def refuse(module, inputs):
        raise RuntimeError("no such code")

    monkeypatch.setattr(source, "COMPILER", refuse)
    with pytest.warns(UserWarning, match="no such code"):
        one = train(make_model(), jit_compile=True)
    pairs = zip(everything(one), everything(train(make_model())), strict=True)
    for refused, other in pairs:  # that has PyTorch's own Adam
        np.testing.assert_allclose(refused, other, rtol=1e-5, atol=1e-7)


def test_operations_are_called_by_what_pytorch_generates_for_them():
    aten = torch.ops.aten
    assert source.quickest(aten.addmm.default) is torch.addmm
    assert source.quickest(aten.view.default) is torch.Tensor.view
    # Written in Python, or there as an operation alone; or PyTorch's own takes
    # no `None` among tensors, and reduces a loss otherwise unless it is told.
    for operation in (
        aten.norm.Scalar,
        aten.nll_loss_forward.default,
        aten.index_put.default,
        aten.binary_cross_entropy_with_logits.default,
    ):
        assert source.quickest(operation) is operation


# On a device that runs ahead, nothing waits for it: both ways are computed.


@pytest.mark.parametrize("is_bad", [False, True])
def test_ways_are_selected_where_the_host_must_not_wait(monkeypatch, is_bad):
    x = X.copy()
    x[0] = np.inf if is_bad else x[0]
    expected = train(make_model(), x=x)
    monkeypatch.setattr(TorchBackend, "has_accelerator", lambda self: True)
    monkeypatch.setattr(torch.Tensor, "__bool__", None)
    assert_same(train(make_model(), x=x), expected)


# Draws.


def test_layers_without_a_seed_draw_from_states_of_their_own():
    def run():
        torch.manual_seed(0)
        return train(make_model(lambda: layers.Dropout(0.3)))

    first = run()
    torch.rand(7)
    assert_same(first, run())
    model = make_model(lambda: layers.Dropout(0.3))
    before = torch.get_rng_state()
    train(model)
    assert torch.equal(before, torch.get_rng_state())


def test_keras_makes_generators_and_knows_of_seeds_as_it_did():
    generator = keras.random.SeedGenerator()
    assert torch_draws.lacks_seed(generator)
    torch_draws.give_seed(generator, 3)
    assert not torch_draws.lacks_seed(generator)
    asked = []

    def make(seed):
        asked.append(int(torch_draws.draw_seed(seed)))
        return torch.Generator().manual_seed(asked[-1])

    five = keras.random.SeedGenerator(5)
    expected = keras.random.uniform([3], seed=keras.random.SeedGenerator(5))
    with torch_draws.making_generators(make):
        drawn = keras.random.uniform([3], seed=five)
    assert asked == [5]
    assert torch.equal(drawn, expected)


# Optimizers.


def test_what_an_optimizer_keeps_is_not_written_to():
    # Within an update ScheduleFreeAdamW uses the momentum before it; the
    # formula is that of Keras, for one weight whose gradient is -2.
    model = keras.Sequential([keras.Input([1]), layers.Dense(1)])
    model.set_weights([np.ones([1, 1], "float32"), np.zeros(1, "float32")])
    model.layers[0].bias.trainable = False
    beta, rate, y, z, v = 0.9, 0.1, 1.0, 1.0, 0.0

    def loss(y_true, y_pred):
        return -2.0 * y_pred

    optimizer = keras.optimizers.ScheduleFreeAdamW(rate, weight_decay=None)
    trainer = Trainer(model, optimizer=optimizer, loss=loss)
    for step in range(1, 5):
        trainer.train_on_batch(np.ones([2, 1]), np.ones([2, 1]))
        x = (y - (1 - beta) * z) / beta
        v += 0.001 * (4.0 - v)
        z += rate * 2.0 / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        x = (1 - 1 / step) * x + z / step
        y = (1 - beta) * z + beta * x
        assert float(model.get_weights()[0][0, 0]) == pytest.approx(y, 1e-5)


def test_recordings_that_lack_variables_are_not_tidied_up(monkeypatch):
    begun, tidied = [], []
    record, tidy = programs._Recorder.__call__, graphs._tidy
    monkeypatch.setattr(
        programs._Recorder,
        "__call__",
        lambda *given: begun.append(1) or record(*given),
    )
    monkeypatch.setattr(
        graphs, "_tidy", lambda module: tidied.append(1) or tidy(module)
    )
    # What a function tells takes the place of a variable, which is missing.
    train(make_model(), optimizer=keras.optimizers.SGD(lambda: 0.1), epochs=1)
    assert len(begun) == 2 * len(tidied) > 0


# What belongs to others.


def test_weights_of_samples_are_left_as_they_are():
    weights = np.linspace(0.5, 1.5, 24).astype("float32")
    tokens = np.random.default_rng(2).integers(0, 4, size=(24, 5))
    model = keras.Sequential(
        [
            keras.Input([5], dtype="int32"),
            layers.Embedding(4, 3, mask_zero=True),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.MeanSquaredError()
    trainer = Trainer(model, optimizer="sgd", loss=loss, accumulation=2)
    before = weights.copy()
    y = np.zeros([24, 5, 2], "float32")
    trainer.fit(tokens, y, sample_weight=weights, batch_size=4, verbose=0)
    np.testing.assert_array_equal(weights, before)


def test_profiler_of_the_user_is_not_disturbed(tmp_path):
    with torch.profiler.profile():
        with pytest.raises(RuntimeError, match="running already"):
            with record_trace(tmp_path):
                pass


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_last_window_of_unknown_data_is_applied_inside_fit():
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    callback = GradientAccumulation(4)
    batches = ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4))
    model.fit(batches, callbacks=[callback], shuffle=False, verbose=0)
    assert callback.progress.updates == 2

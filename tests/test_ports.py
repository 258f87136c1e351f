"""Claims about docs/train_step.md: its ports are the `train_step`s they port.

Every original is trained by plain Keras, its port by windows of the same
batches, from the same weights and with the same numbers drawn.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import originals
import pytest
from ports import (
    BATCH_SIZE,
    PORTS,
    SAMPLES,
    autoencoder_of,
    denoiser_of,
    fed,
    mlp,
    normal,
    sgd,
    uniform,
    vae_of,
)
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras

X, CODES, NOISE, TIMES = uniform(5), normal(2), normal(5), uniform(1)
PATCHES, HIDDEN = uniform(3, 2), (uniform(3) < 0.6).astype("float32")
TURNS, SHARES, LAST = normal(2, 4), uniform(2, 1), normal(4)
VIEWS = X + 0.1 * NOISE, X - 0.1 * NOISE
LABELS = np.random.default_rng(1).integers(0, 3, SAMPLES)


class Trained(NamedTuple):
    """What has been trained, or is to be.

    Args:
        train: runs the training.
        models: list of models, alike in a port and its original.
        trainers: of a port.
    """

    train: Callable[[], object]
    models: list[keras.Model]
    trainers: Sequence[Trainer] = ()

    def weights(self):
        return [w for model in self.models for w in model.get_weights()]


def original(cls, *parts, x, y):
    """Make an original, to be trained once through the data."""
    model = cls(*parts)
    model.compile(optimizer=sgd(), run_eagerly=True)
    return Trained(lambda: model.train_through(x, y, BATCH_SIZE), list(parts))


def fitted(trainer, *models, x, y):
    """Let a port be trained once through the data."""
    return Trained(
        lambda: trainer.fit(
            x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0
        ),
        [*models],
        [trainer],
    )


def vae(options, feed=None):
    encoder, decoder = mlp(5, 4), mlp(2, 5, seed=2)
    x = X, CODES
    if options is None:
        return original(originals.VAE, encoder, decoder, x=x, y=X)
    trainer = PORTS.VAETrainer(vae_of(encoder, decoder), **options)
    return fitted(trainer, encoder, decoder, x=x, y=X)


def distillation(options, feed=None):
    student, teacher = mlp(5, 3), mlp(5, 3, seed=2)
    if options is None:
        return original(originals.Distiller, student, teacher, x=X, y=LABELS)
    trainer = PORTS.Distillation(student, teacher, **options)
    return fitted(trainer, student, teacher, x=X, y=LABELS)


def diffusion(options, feed=fed):
    network, average = mlp(6, 5), mlp(6, 5)
    y = NOISE, TIMES
    if options is None:
        return original(originals.DiffusionModel, network, average, x=X, y=y)
    trainer = feed(PORTS.Diffusion)(denoiser_of(network), decay=0.9, **options)
    return fitted(trainer, network, trainer.average, x=X, y=y)


def masked(options, feed=fed):
    network, x = mlp(6, 6), PATCHES
    if options is None:
        return original(originals.MaskedAutoencoder, network, x=x, y=HIDDEN)
    port = feed(PORTS.MaskedAutoencoder)
    trainer = port(autoencoder_of(network), **options)
    return fitted(trainer, network, x=x, y=HIDDEN)


def wgan(options, feed=fed):
    critic, generator = mlp(5, 1), mlp(4, 5, seed=2)
    if options is None:
        model = originals.WGAN(critic, generator)
        model.compile(sgd(0.01), sgd(0.01), run_eagerly=True)
        y = TURNS, SHARES, LAST
        return Trained(
            lambda: model.train_through(X, y, BATCH_SIZE), [critic, generator]
        )
    first, second = (options | {"optimizer": sgd(0.01)} for _ in range(2))
    trainers = (
        feed(PORTS.CriticTrainer)(critic, generator, **first),
        PORTS.GeneratorTrainer(generator, critic, **second),
    )
    return Trained(lambda: play(*trainers), [critic, generator], trainers)


def play(critic, generator):
    for first in range(0, SAMPLES, BATCH_SIZE):
        rows = slice(first, first + BATCH_SIZE)
        for turn in range(2):
            drawn = TURNS[rows, turn], SHARES[rows, turn]
            critic.train_on_batch(X[rows], drawn)
        generator.train_on_batch(LAST[rows])


def simclr(options, feed=fed):
    network = mlp(5, 4)
    if options is None:
        cls = originals.ContrastiveModel
        return original(cls, network, x=X, y=VIEWS)
    trainer = feed(PORTS.SimCLR)(network, **options)
    return fitted(trainer, network, x=X, y=VIEWS)


def supervised_contrastive(options, feed=None):
    network = mlp(5, 4)
    if options is None:
        cls = originals.SupervisedContrastive
        return original(cls, network, x=X, y=LABELS)
    trainer = PORTS.SupervisedContrastive(network, **options)
    return fitted(trainer, network, x=X, y=LABELS)


def adversarial(options, feed=None):
    network = mlp(5, 3)
    if options is None:
        cls = originals.AdversarialModel
        return original(cls, network, x=X, y=LABELS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = PORTS.AdversarialTraining(network, loss=loss, **options)
    return fitted(trainer, network, x=X, y=LABELS)


def sharpness_aware(options, feed=None):
    network = mlp(5, 3)
    if options is None:
        cls = originals.SharpnessAwareModel
        return original(cls, network, x=X, y=LABELS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = PORTS.SAM(network, radius=0.5, loss=loss, **options)
    return fitted(trainer, network, x=X, y=LABELS)


CASES = {
    case.__name__: case
    for case in (
        vae,
        distillation,
        diffusion,
        masked,
        wgan,
        simclr,
        supervised_contrastive,
        adversarial,
        sharpness_aware,
    )
}

# Micro-batches of how many samples, and by which plan.
RUNS = {
    "whole": (BATCH_SIZE, "fused"),
    "fused": (3, "fused"),
    "streamed": (3, "streamed"),
    "uneven": (5, "streamed"),
}


def made(name, *, micro_batch_size, feed=fed):
    """Make a port, to be trained once through the data."""
    return CASES[name](
        {
            "optimizer": sgd(),
            "accumulation": Accumulation(micro_batch_size=micro_batch_size),
            "jit_compile": JIT_COMPILE,
            "seed": 0,
        },
        feed=feed,
    )


@functools.cache
def by_keras(name):
    """Return the weights before and after an original is trained."""
    trained = CASES[name](None)
    before = trained.weights()
    trained.train()
    return before, trained.weights()


def assert_alike(received, expected, tolerance=1e-5):
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CASES)
def test_port_makes_the_updates_of_its_train_step(name, run, use_plan):
    size, plan = RUNS[run]
    use_plan(plan)
    port = made(name, micro_batch_size=size)
    before, after = by_keras(name)
    assert_alike(port.weights(), before, tolerance=0)
    port.train()
    moved = [np.abs(a - b).max() for a, b in zip(after, before, strict=True)]
    assert max(moved) > 0.01
    assert_alike(port.weights(), after)


@contextlib.contextmanager
def bad_data():
    """Have a NaN in every batch of the data."""
    arrays = X, PATCHES, LAST, VIEWS[0]
    kept = [array.copy() for array in arrays]
    for array in arrays:
        array[4::BATCH_SIZE] = np.nan
    yield
    for array, values in zip(arrays, kept, strict=True):
        array[:] = values


@pytest.mark.parametrize("name", CASES)
def test_bad_batches_leave_no_trace_in_a_port(name):
    port = made(name, micro_batch_size=3)
    before = port.weights()
    with bad_data():
        port.train()
    assert_alike(port.weights(), before, tolerance=0)
    for trainer in port.trainers:
        assert trainer.progress.skipped_updates >= 3
    port.train()
    assert_alike(port.weights(), by_keras(name)[1])


@pytest.mark.parametrize("name", CASES)
def test_port_that_draws_for_itself_goes_on_where_it_was_saved(name, tmp_path):
    def new():
        return made(name, micro_batch_size=3, feed=lambda cls: cls)

    straight = new()
    straight.train()
    for number, trainer in enumerate(straight.trainers):
        trainer.save(tmp_path / str(number))
    straight.train()

    resumed = new()
    for number, trainer in enumerate(resumed.trainers):
        trainer.restore(tmp_path / str(number))
    resumed.train()
    assert_alike(resumed.weights(), straight.weights(), tolerance=0)


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("vae", {"reconstruction", "kl"}),
        ("distillation", {"student", "distillation"}),
        ("diffusion", {"image_error"}),
        ("masked", {"hidden"}),
        ("wgan", {"critic", "penalty"}),
        ("sharpness_aware", {"loss_before"}),
    ],
)
def test_port_logs_what_its_train_step_would(name, logged):
    port = made(name, micro_batch_size=3)
    port.train()
    assert logged | {"loss"} <= set(port.trainers[0].window_logs)


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("name", ["wgan", "sharpness_aware"])
def test_further_gradients_are_those_of_the_original_under_xla(
    name, plan, use_plan
):
    use_plan(plan, jit_compile=True)
    port = made(name, micro_batch_size=3)
    port.train()
    assert_alike(port.weights(), by_keras(name)[1])

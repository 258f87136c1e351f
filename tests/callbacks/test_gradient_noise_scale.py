"""Claims about GradientNoiseScale, and the norms it asks for."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Callback, Every, LossScale, Trainer
from accumtrainer.callbacks import Checkpoint, GradientNoiseScale
from accumtrainer.callbacks.gradient_noise_scale import measure_noise
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]

X = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(48, 1)).astype("float32")


def make_trainer(cls=Trainer, *, rate=0.0, k=4, **options):
    """Make a Trainer of a linear model that begins with zeros."""
    model = keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    options = {"loss": "mse", "accumulation": k, "seed": 0} | options
    return cls(model, optimizer=keras.optimizers.SGD(rate), **options)


def fit(trainer, *callbacks, x=X, y=Y, **options):
    options = {"batch_size": 3, "shuffle": False, "verbose": 0} | options
    return trainer.fit(x, y, callbacks=list(callbacks), **options).history


def gradient(x, y):
    """Differentiate the mean square of a model of zeros."""
    return -2 * (x.T @ y)[:, 0] / len(x)


class MicroBatches(Callback):
    """Keeps the logs of every micro-batch and of every window."""

    needs_gradient_norms = True

    def __init__(self):
        super().__init__()
        self.micro_batches, self.windows = [], []

    def on_accumulate(self, index, logs=None):
        self.micro_batches.append(dict(logs))

    def on_apply(self, update, logs=None):
        self.windows.append(dict(logs))

    def column(self, name):
        return [logs[name] for logs in self.micro_batches]


class Quiet(Callback):
    """Keeps the logs of micro-batches and asks for nothing."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def on_accumulate(self, index, logs=None):
        self.names |= set(logs)


# The norms of the micro-batches' gradients.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_eagerly": True},
        {"loss_scale": LossScale(initial=2.0**10)},
        {"accumulation": Accumulation(steps=4, combine="mean")},
    ],
    ids=["fused", "eager", "scaled", "mean"],
)
def test_callback_is_told_the_norm_of_each_gradient(options):
    seen = MicroBatches()
    fit(make_trainer(**options), seen, x=X[:24], y=Y[:24])
    expected = [
        np.linalg.norm(gradient(X[i : i + 3], Y[i : i + 3]))
        for i in range(0, 24, 3)
    ]
    np.testing.assert_allclose(
        seen.column("gradient_norm"), expected, rtol=1e-5
    )


def test_norms_of_unequal_micro_batches_come_with_their_weights():
    seen = MicroBatches()
    fit(make_trainer(), seen, x=X[:11], y=Y[:11])
    cuts = [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 11)]
    np.testing.assert_allclose(
        seen.column("gradient_norm"),
        [np.linalg.norm(gradient(X[cut], Y[cut])) for cut in cuts],
        rtol=1e-5,
    )
    assert seen.column("gradient_weight") == [3, 3, 3, 2]


def test_norms_are_taken_after_on_accumulate():
    class Double(Trainer):
        def on_accumulate(self, gradients, info):
            return [2 * g for g in gradients]

    seen = MicroBatches()
    fit(make_trainer(Double), seen, x=X[:12], y=Y[:12])
    expected = 2 * np.linalg.norm(gradient(X[:3], Y[:3]))
    assert seen.column("gradient_norm")[0] == pytest.approx(expected, rel=1e-5)


def make_fork():
    x = keras.Input([5])
    return keras.Model(
        x, [keras.layers.Dense(1, name=name)(x) for name in ("a", "b")]
    )


@pytest.mark.parametrize("combine", ["exact", "mean", "sum"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_norms_by_their_weights_add_up_where_all_samples_are_alike(
    combine, reduction, outputs
):
    sizes = (4, 1, 3)
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
    seen = MicroBatches()
    trainer = Trainer(
        make_fork() if outputs == 2 else model,
        optimizer="sgd",
        loss=keras.losses.MeanSquaredError(reduction=reduction),
        accumulation=Accumulation(steps=3, combine=combine),
        jit_compile=JIT_COMPILE,
    )
    x, y = np.ones([8, 5], "float32"), np.ones([8, 1], "float32")
    batches = [
        (x[:size], (y[:size],) * 2 if outputs == 2 else y[:size])
        for size in sizes
    ]
    trainer.fit(batches, verbose=0, callbacks=[seen])
    weights = np.array(seen.column("gradient_weight"))
    sum_of_parts = np.sum(weights * seen.column("gradient_norm"))
    divisor = 1 if combine == "sum" else weights.sum()
    assert seen.windows[0]["gradient_norm"] == pytest.approx(
        sum_of_parts / divisor, rel=1e-5
    )


def test_nothing_is_measured_unless_somebody_asks():
    quiet, seen = Quiet(), MicroBatches()
    trainer = make_trainer()
    fit(trainer, quiet)
    assert quiet.names == {"loss", "weight"}
    fit(trainer, seen)
    assert "gradient_norm" in seen.micro_batches[0]
    quiet = Quiet()
    fit(trainer, quiet)
    assert quiet.names == {"loss", "weight"}


def test_measuring_changes_no_update():
    weights = []
    for callbacks in ([], [MicroBatches()]):
        trainer = make_trainer(rate=0.1)
        fit(trainer, *callbacks)
        weights.append(trainer.model.get_weights()[0])
    np.testing.assert_allclose(*weights, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_measuring_leaves_unused_variables_to_keras():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(1)
            self.unused = keras.layers.Dense(1)

        def build(self, shape):
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, x):
            return self.used(x)

    ends = []
    for callbacks in ([], [MicroBatches()]):
        keras.utils.set_random_seed(0)
        model = Half()
        model.build([None, 5])
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
        trainer = Trainer(
            model, optimizer=optimizer, loss="mse", accumulation=2
        )
        fit(trainer, *callbacks, x=X[:6], y=Y[:6])
        ends.append(model.unused.get_weights()[0])
    np.testing.assert_array_equal(*ends)


def test_logs_of_the_micro_batches_can_be_read_later():
    class Keep(Callback):
        needs_gradient_norms = True
        kept = ()

        def on_train_batch_end(self, batch, logs=None):
            self.kept = (*self.kept, self.trainer.micro_batch_logs)

    keep, seen = Keep(), MicroBatches()
    fit(make_trainer(), keep, seen)
    for name in ("loss", "weight", "gradient_norm", "gradient_weight"):
        np.testing.assert_array_equal(
            np.concatenate([logs[name] for logs in keep.kept]),
            seen.column(name),
        )


# The noise scale.


def noisy_line(samples, noise):
    """Draw data whose noise scale is known in closed form.

    With x standard normal in d dimensions, y = x w + noise and a model of
    zeros, a sample's gradient of the squared error is -2 x y. So G = -2 w,
    and tr(S) = 4 (d (|w|^2 + noise^2) + |w|^2), as E[y^2 x x'] =
    (|w|^2 + noise^2) I + 2 w w'.

    Returns:
        x, y, and the noise scale.
    """
    rng = np.random.default_rng(3)
    x = rng.normal(size=(samples, 5))
    w = rng.normal(size=(5, 1))
    y = x @ w + noise * rng.normal(size=(samples, 1))
    square = np.sum(w**2)
    scale = (5 * (square + noise**2) + square) / square
    return x.astype("float32"), y.astype("float32"), scale


@pytest.mark.parametrize("noise", [0.5, 6.0])
def test_estimate_is_near_the_noise_scale_in_closed_form(noise):
    x, y, expected = noisy_line(49152, noise)
    measured = GradientNoiseScale(decay=0.9999)
    history = fit(make_trainer(), measured, x=x, y=y, batch_size=8)
    assert history["gradient_noise_scale"] == [pytest.approx(expected, rel=0.1)]
    rounded = float(measured.summary.split()[2].replace(",", ""))
    assert rounded == pytest.approx(expected, rel=0.15)


def test_estimates_are_unbiased_for_unequal_micro_batches():
    rng = np.random.default_rng(0)
    sizes = np.array([1, 2, 5, 8])
    true = np.array([1.0, -2.0, 0.5])
    estimates = []
    for _ in range(20000):
        gradients = [
            true + rng.normal(size=3) * 2 / np.sqrt(size) for size in sizes
        ]
        whole = np.average(gradients, axis=0, weights=sizes)
        logs = {
            "weight": sizes,
            "gradient_norm": np.linalg.norm(gradients, axis=1),
            "gradient_weight": sizes,
        }
        estimates.append(measure_noise(sizes, np.linalg.norm(whole), logs))
    square, noise, *_ = np.mean(estimates, axis=0)
    assert square == pytest.approx(np.sum(true**2), rel=0.02)
    assert noise == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize("combine", ["exact", "mean", "sum"])
def test_cosine_is_the_mean_over_all_pairs_by_their_norms(combine):
    accumulation = Accumulation(steps=4, combine=combine)
    sizes = (3, 3, 3, 2)
    starts = np.cumsum((0, *sizes[:-1]))
    batches = [
        (X[start : start + size], Y[start : start + size])
        for start, size in zip(starts, sizes, strict=True)
    ]
    trainer = make_trainer(accumulation=accumulation)
    history = trainer.fit(
        batches, callbacks=[GradientNoiseScale()], verbose=0
    ).history
    shares = np.array(sizes if combine == "exact" else (1, 1, 1, 1))
    parts = [s * gradient(*b) for s, b in zip(shares, batches, strict=True)]
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    products = sum(parts[a] @ parts[b] for a, b in pairs)
    norms = np.linalg.norm(parts, axis=1)
    expected = products / sum(norms[a] * norms[b] for a, b in pairs)
    assert history["gradient_cosine"] == [pytest.approx(expected, rel=1e-4)]


def test_averages_are_taken_before_the_ratio():
    """As a plain loop over the windows would, with its bias corrected."""
    seen = MicroBatches()
    measured = GradientNoiseScale(decay=0.5)
    history = fit(make_trainer(), seen, measured)
    totals, weight = np.zeros(2), 0.0
    for index, window in enumerate(seen.windows):
        rows = seen.micro_batches[4 * index : 4 * index + 4]
        small = np.mean([row["gradient_norm"] ** 2 for row in rows])
        big = window["gradient_norm"] ** 2
        new = (12 * big - 3 * small) / 9, (small - big) / (1 / 3 - 1 / 12)
        totals = 0.5 * totals + 0.5 * np.array(new)
        weight = 0.5 * weight + 0.5
    square, noise = totals / weight
    expected = noise / square if square > 0 else np.inf
    assert history["gradient_noise_scale"] == [
        pytest.approx(expected, rel=1e-4)
    ]


def test_all_noise_is_an_infinite_scale():
    x = np.concatenate([X[:3], X[:3]])
    y = np.concatenate([Y[:3], -Y[:3]])
    measured = GradientNoiseScale()
    history = fit(make_trainer(k=2), measured, x=x, y=y)
    assert history["gradient_noise_scale"] == [np.inf]
    assert history["gradient_cosine"] == [pytest.approx(-1, rel=1e-5)]
    assert measured.summary.startswith("More accumulation pays")


def test_skipped_windows_are_left_out():
    x = X.copy()
    x[13] = np.nan
    skipped = fit(make_trainer(), GradientNoiseScale(), x=x)
    kept = np.r_[0:12, 24:48]
    without = fit(make_trainer(), GradientNoiseScale(), x=X[kept], y=Y[kept])
    for name in ("gradient_noise_scale", "gradient_cosine"):
        assert skipped[name] == pytest.approx(without[name], rel=1e-6)


def test_micro_batches_of_no_weight_are_left_out():
    logs = {
        "weight": [2, 0, 2],
        "gradient_norm": [1.0, np.float32(7), 2.0],
        "gradient_weight": [2, 1e-25, 2],
    }
    others = {name: values[::2] for name, values in logs.items()}
    assert measure_noise([2, 2, 2], 1.2, logs) == pytest.approx(
        measure_noise([2, 2], 1.2, others)
    )


def test_numbers_are_in_the_logs_from_the_first_point_on():
    class Keep(Callback):
        is_logger = True
        kept = ()

        def on_train_batch_end(self, batch, logs=None):
            self.kept = (*self.kept, logs.get("gradient_noise_scale"))

    keep = Keep()
    fit(make_trainer(), GradientNoiseScale(every=Every(2, "updates")), keep)
    assert keep.kept[0] is None
    assert keep.kept[1] == keep.kept[2] != keep.kept[3]


def test_single_micro_batches_are_said_to_tell_nothing():
    measured = GradientNoiseScale()
    with pytest.warns(RuntimeWarning, match="at least two micro-batches"):
        history = fit(make_trainer(k=1), measured)
    assert "gradient_noise_scale" not in history
    assert measured.summary == ""


def test_sentence_is_printed_unless_fit_is_silent(capsys):
    measured = GradientNoiseScale()
    fit(make_trainer(), measured)
    assert capsys.readouterr().out == ""
    fit(make_trainer(), measured, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert measured.summary in lines
    assert measured.summary.endswith("the last updates had 12 samples.")


def test_trial_tells_nothing(capsys):
    measured = GradientNoiseScale()
    fit(make_trainer(k=1), measured, verbose=2, fast_dev_run=True)
    assert "accumulation" not in capsys.readouterr().out
    assert measured.summary == ""


def test_averages_go_on_after_a_resume(tmp_path):
    def train(folder, **options):
        measured = GradientNoiseScale(every=Every(3, "updates"))
        return fit(
            make_trainer(rate=0.1),
            measured,
            Checkpoint(tmp_path / folder, every=Every(1, "updates")),
            resume_from="auto",
            epochs=2,
            **options,
        )

    whole = train("whole")
    train("parts", max_updates=2)
    parts = train("parts")
    for name in ("gradient_noise_scale", "gradient_cosine"):
        assert parts[name] == whole[name]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 10}, TypeError),
        ({"decay": 1.0}, ValueError),
        ({"decay": -0.1}, ValueError),
    ],
)
def test_wrong_options_are_refused(options, error):
    with pytest.raises(error, match=f"{next(iter(options))} must be"):
        GradientNoiseScale(**options)


class TrainsAside(keras.callbacks.Callback):
    """Makes an update of its own amid a fit."""

    trainer = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.trainer.train_on_batch(X[:12], Y[:12])


def test_update_that_a_callback_makes_amid_a_fit_is_no_hindrance():
    trainer, aside = make_trainer(), TrainsAside()
    aside.trainer = trainer
    history = fit(trainer, aside, GradientNoiseScale())
    assert np.isfinite(history["gradient_noise_scale"]).all()
    assert trainer.progress.updates == 5


class FitsAside(keras.callbacks.Callback):
    """Fits the same Trainer amid a fit of it."""

    trainer = None
    has_begun = False

    def on_train_batch_end(self, batch, logs=None):
        if not self.has_begun:
            self.has_begun = True
            fit(self.trainer, x=X[:12], y=Y[:12])


class NotesPlaces(Callback):
    def __init__(self):
        super().__init__()
        self.places = []

    def on_safe_point(self, reason, logs=None):
        self.places.append(self.trainer.snapshot().position)


def test_fit_within_a_fit_leaves_it_its_place_in_the_data():
    trainer, aside, notes = make_trainer(), FitsAside(), NotesPlaces()
    aside.trainer = trainer
    fit(trainer, aside, notes)
    assert len(notes.places) > 4
    assert None not in notes.places

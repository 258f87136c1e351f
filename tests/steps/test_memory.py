"""Claims about memory: micro-batches that fit, and what stays behind."""

import gc

import environments
import forked
import numpy as np
import pytest
from shortages import out_of_memory

from accumtrainer import Accumulation, Callback, Trainer, peak_memory_bytes
from accumtrainer.callbacks import Checkpoint, RunLog
from accumtrainer.data.batches import Batch, window_of_rows
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.steps import Plan
from accumtrainer.steps.memory import largest_that_fits, sizes_of, smaller_size
from accumtrainer.steps.step import Step
from accumtrainer.training import sizing

UNLIMITED = 2**40


def make_trainer(accumulation, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([32, 32]),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(1),
        ]
    )
    return Trainer(
        model,
        optimizer=keras.optimizers.Adam(0.01),
        loss="mse",
        metrics=["mae"],
        accumulation=accumulation,
        seed=0,
        **options,
    )


if BACKEND == "tensorflow":
    import tensorflow as tf

    def count_what_is_kept():
        """Count the graphs there are; one holds all that was traced."""
        return sum(issubclass(type(o), tf.Graph) for o in gc.get_objects())

elif BACKEND == "torch":
    from accumtrainer.steps.torch.graphs import Graph

    def count_what_is_kept():
        """Count the programs there are."""
        return sum(issubclass(type(o), Graph) for o in gc.get_objects())

elif BACKEND == "jax":
    import jax

    def count_what_is_kept():
        """Count the arrays there are."""
        return len(jax.live_arrays())


def auto(limit):
    return Accumulation(micro_batch_size="auto", memory_limit_bytes=limit)


@pytest.fixture
def data(rng):
    return (
        rng.normal(size=[48, 32, 32]).astype("float32"),
        rng.normal(size=[48, 1]).astype("float32"),
    )


def everything(trainer):
    return [
        keras.ops.convert_to_numpy(variable)
        for variable in [
            *trainer.model.variables,
            *trainer.optimizer.variables,
            *trainer.model.metrics_variables,
        ]
    ]


def assert_same(trainer, other):
    for one, two in zip(everything(trainer), everything(other), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


# --- The search. ---


@pytest.mark.parametrize("limit", range(100, 1000, 45))
@pytest.mark.parametrize("peak", [lambda m: 90 + 7 * m, lambda m: 90 + m**1.4])
def test_largest_size_below_the_limit_is_found(limit, peak):
    sizes = sizes_of(96)
    size, found = largest_that_fits(sizes, limit, peak)
    assert size == max(s for s in sizes if peak(s) <= limit)
    assert found == peak(size)


def test_sizes_far_beyond_the_limit_are_not_compiled():
    seen = []

    def peak(size):
        seen.append(size)
        return 100 + 10 * size

    assert largest_that_fits(sizes_of(256), 200, peak) == (8, 180)
    assert max(seen) <= 16


@pytest.mark.parametrize("samples", [1, 2, 22, 96, 300, 1000, 1009])
def test_sizes_shrink_by_about_half_and_divide_where_they_can(samples):
    sizes = sizes_of(samples)
    assert (sizes[0], sizes[-1]) == (samples, 1)
    for size, smaller in zip(sizes, sizes[1:], strict=False):
        assert size / 4 < smaller < size
        near = [m for m in range(size // 4 + 1, size) if samples % m == 0]
        assert samples % smaller == 0 or not near


def test_prime_number_of_samples_is_halved():
    assert sizes_of(1009)[:6] == [1009, 505, 253, 127, 64, 32]
    assert smaller_size(253, 1009) == 127


def test_nothing_fits():
    with pytest.raises(MemoryError, match="micro-batches of 1, which take"):
        largest_that_fits([4, 2, 1], 10 * 2**20, lambda size: 2**30 * size)


def test_window_is_cut_anew():
    rows = np.arange(7)
    window = window_of_rows(Batch(rows), (4, 3)).recut(3)
    assert window.sizes == (3, 3, 1)
    assert np.concatenate([b.x for b in window.split()]).tolist() == [*range(7)]
    assert window.recut(3) is window


# --- In a Trainer. ---


def test_table_grows_with_the_size_and_changes_nothing(data):
    trainer = make_trainer(1)
    before = [v.copy() for v in everything(trainer)[:6]]
    for _ in range(2):  # what the first has freed counts in the second again
        plan = trainer.memory_plan((data[0][:32], data[1][:32]))
        assert [r.micro_batch_size for r in plan.rows] == [1, 2, 4, 8, 16, 32]
        assert [r.micro_batches for r in plan.rows] == [32, 16, 8, 4, 2, 1]
        peaks = [row.peak_bytes for row in plan.rows]
        assert min(np.diff(peaks)) > -(2**20)  # of what else a process does
        assert peaks[-1] - peaks[0] > 31 * 32 * 256 * 4  # of one layer
    assert len(str(plan).splitlines()) == 7
    (row,) = trainer.memory_plan((data[0][:32], data[1][:32]), [8]).rows
    assert (row.micro_batch_size, row.micro_batches) == (8, 4)
    for one, other in zip(everything(trainer), before, strict=False):
        np.testing.assert_array_equal(one, other)


def test_table_shows_what_rematerialization_saves():
    def peak(mode):
        with keras.RematScope(mode):
            layers = [
                layer
                for _ in range(6)
                for layer in (
                    keras.layers.Dense(512, activation="gelu"),
                    keras.layers.Dense(32),
                )
            ]
        model = keras.Sequential([keras.Input([32]), *layers])
        trainer = Trainer(model, optimizer="sgd", loss="mse")
        x = np.ones([1024, 32], "float32")
        (row,) = trainer.memory_plan((x, x), [1024]).rows
        return row.peak_bytes

    kept = 6 * 1024 * 512 * 4  # one array for each wide layer
    # On PyTorch Keras keeps what an activation is given, and saves nothing.
    mode = "full" if BACKEND == "torch" else "activations"
    assert peak(None) - peak(mode) > 0.8 * kept


def test_whole_batch_is_one_micro_batch_where_it_fits(data, capsys):
    trainer = make_trainer(auto(UNLIMITED))
    trainer.fit(*data, batch_size=24, verbose=2)
    assert trainer.plan.micro_batch_size == 24
    assert trainer.progress.micro_batches == 2
    assert "24 samples per update = 1 micro-batch" in capsys.readouterr().out


@pytest.mark.parametrize("convolves", [False, True], ids=["fused", "streamed"])
def test_memory_does_not_grow_with_the_number_of_micro_batches(rng, convolves):
    layers = [keras.layers.Dense(8), keras.layers.Flatten()]
    if convolves:
        layers.insert(0, keras.layers.Conv2D(16, 3, activation="relu"))
    model = keras.Sequential([keras.Input([12, 12, 3]), *layers])
    trainer = Trainer(
        model, optimizer="adam", loss=lambda y, outputs: outputs**2
    )

    def peak(micro_batches):
        """Predict the memory of all but the samples that wait."""
        x = rng.normal(size=[4 * micro_batches, 12, 12, 3]).astype("float32")
        (row,) = trainer.memory_plan((x, x[:, 0, 0]), [4]).rows
        all_wait = BACKEND == "jax" and not convolves  # in one call
        waiting = x.nbytes + x[:, 0, 0].nbytes if all_wait else 0
        return row.peak_bytes - waiting

    # Of each micro-batch are reported loss and weight; of the process, pages.
    assert 0 < peak(128) < 1.05 * peak(4) + 2**17


def test_chosen_size_makes_the_updates_of_the_same_size_given(
    data, tmp_path, monkeypatch
):
    if BACKEND != "jax":
        # What so little takes is lost in what the process takes meanwhile.
        monkeypatch.setattr(Step, "peak_bytes", lambda _, w: w.sizes[0])
    plan = make_trainer(1).memory_plan((data[0][:24], data[1][:24]))
    peaks = {row.micro_batch_size: row.peak_bytes for row in plan.rows}
    trainer = make_trainer(auto(peaks[6]))
    given = make_trainer(Accumulation(micro_batch_size=6))
    log = RunLog(tmp_path / "run.jsonl")
    for one in (trainer, given):
        one.fit(*data, batch_size=24, epochs=2, verbose=0, callbacks=[log])
    assert trainer.plan.micro_batch_size == 6
    assert trainer.plan.peak_bytes <= trainer.plan.limit_bytes
    assert "predicted" in str(trainer.plan)
    assert_same(trainer, given)
    assert trainer.progress.micro_batches == given.progress.micro_batches == 16


class Shortage:
    """Has windows run out of memory, after they have eaten their inputs.

    Args:
        most: the largest micro-batches that fit.
        measure: function from a window to how large they are.
    """

    error = staticmethod(out_of_memory)

    def __init__(self, monkeypatch, most, measure=lambda w: max(w.sizes)):
        self.failures = 0
        run = Step.run

        def run_short_of_memory(step, window):
            report = run(step, window)
            if measure(window) > most:
                report.section("counters")
                self.failures += 1
                raise self.error()
            return report

        monkeypatch.setattr(Step, "run", run_short_of_memory)


def test_window_that_does_not_fit_runs_again_in_smaller_pieces(
    data, monkeypatch
):
    given = make_trainer(Accumulation(micro_batch_size=6))
    given.fit(*data, batch_size=24, epochs=2, verbose=0)
    trainer = make_trainer(auto(UNLIMITED))
    shortage = Shortage(monkeypatch, most=6)
    with pytest.warns(UserWarning, match="from here on they are of"):
        trainer.fit(*data, batch_size=24, epochs=2, verbose=0)
    assert shortage.failures == 2
    assert trainer.plan.micro_batch_size == 6
    assert trainer.progress.updates == given.progress.updates == 4
    assert trainer.progress.micro_batches == given.progress.micro_batches
    # The first window drew its dropout again from where it had begun.
    assert_same(trainer, given)


def test_window_of_longer_rows_runs_again_where_shorter_ones_have_fitted(
    rng, monkeypatch
):
    def values_at_a_time(window):
        return window.split()[0].x.size

    def train(accumulation):
        keras.utils.set_random_seed(0)
        pool = keras.layers.GlobalAveragePooling1D()
        layers = [keras.Input([None, 2]), keras.layers.Dense(3), pool]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        trainer = Trainer(
            model, optimizer="adam", loss="mse", accumulation=accumulation
        )
        trainer.fit(batches, verbose=0)
        return trainer

    batches = [
        (rng.normal(size=[4, length, 2]), rng.normal(size=[4, 1]))
        for length in (8, 64)
    ]
    given = train(Accumulation(micro_batch_size=4))
    shortage = Shortage(monkeypatch, 2 * 64 * 2, values_at_a_time)
    with pytest.warns(UserWarning, match="from here on they are of 2"):
        trainer = train(auto(UNLIMITED))
    assert shortage.failures == 1
    assert trainer.progress.updates == 2
    assert_same(trainer, given)


def take_by_size(monkeypatch):
    """Have micro-batches of m samples predicted to take m bytes."""
    monkeypatch.setattr(Step, "peak_bytes", lambda _, window: window.sizes[0])


def test_chosen_size_divides_the_batch(data, monkeypatch):
    """Halves of 20 would be 10, 5 and 3, which leaves 2 over."""
    take_by_size(monkeypatch)
    trainer = make_trainer(auto(4))
    trainer.fit(data[0][:40], data[1][:40], batch_size=20, verbose=0)
    assert trainer.plan.micro_batch_size == 4
    assert trainer.last_window.sizes == (4,) * 5


def test_size_after_a_shortage_divides_the_batch(data, monkeypatch):
    take_by_size(monkeypatch)
    trainer = make_trainer(auto(10))
    shortage = Shortage(monkeypatch, most=4)
    with pytest.warns(UserWarning, match="from here on they are of"):
        trainer.fit(data[0][:40], data[1][:40], batch_size=20, verbose=0)
    assert shortage.failures == 2
    assert trainer.plan.micro_batch_size == 4
    assert trainer.last_window.sizes == (4,) * 5


def test_batch_of_a_prime_number_is_cut_unevenly(data, monkeypatch):
    take_by_size(monkeypatch)
    trainer = make_trainer(auto(5))
    trainer.fit(data[0][:17], data[1][:17], batch_size=17, verbose=0)
    assert trainer.last_window.sizes == (5, 5, 5, 2)


# --- What is told of it. ---


class KeepPlans(Callback):
    """Keeps the plans before the first update and after every one."""

    def on_train_begin(self, logs=None):
        self.plans = [self.trainer.plan]

    def on_train_batch_end(self, batch, logs=None):
        self.plans.append(self.trainer.plan)


def test_peak_is_measured_after_the_first_window_of_a_size(data):
    trainer, keep = make_trainer(auto(UNLIMITED)), KeepPlans()
    trainer.fit(*data, batch_size=24, verbose=0, callbacks=[keep])
    before, *after = keep.plans
    assert (before.measured_peak_bytes, before.measured_of) == (None, None)
    assert after == [trainer.plan, trainer.plan]
    assert 0 < trainer.plan.measured_peak_bytes <= peak_memory_bytes()


def test_peak_on_a_processor_is_that_of_the_process(data):
    trainer = make_trainer(auto(UNLIMITED))
    trainer.fit(*data, batch_size=24, verbose=0)
    assert trainer.plan.measured_of == "process"
    # Python and the libraries alone take more than this small model.
    assert trainer.plan.measured_peak_bytes > trainer.plan.peak_bytes
    assert "iB measured (process)" in str(trainer.plan)


def test_peak_is_measured_once_for_every_size(data, monkeypatch):
    peaks = iter([(5, "device"), (7, "device")])
    monkeypatch.setattr(sizing, "measure_peak_memory", lambda: next(peaks))
    trainer = make_trainer(auto(UNLIMITED))
    trainer.fit(data[0][:36], data[1][:36], batch_size=12, verbose=0)
    assert trainer.plan.micro_batch_size == 12
    assert trainer.plan.measured_peak_bytes == 5
    Shortage(monkeypatch, most=6)
    with pytest.warns(UserWarning, match="from here on they are of 6"):
        trainer.fit(*data, batch_size=24, verbose=0)
    assert trainer.plan.peak_bytes is None
    assert trainer.plan.measured_peak_bytes == 7


def test_plan_tells_what_was_predicted_and_what_was_measured():
    plan = Plan(
        name="fused",
        jit_compile=True,
        micro_batch_size=8,
        peak_bytes=2**29,
        limit_bytes=2**31,
        measured_peak_bytes=3 * 2**28,
        measured_of="device",
    )
    assert str(plan).endswith(
        ", 8 samples at a time, 512.00 MiB of 2.00 GiB predicted, "
        "768.00 MiB measured (device)"
    )


def test_measured_peak_is_printed_once(data, capsys):
    trainer = make_trainer(auto(UNLIMITED))
    trainer.fit(*data, batch_size=24, epochs=2, verbose=2)
    trainer.fit(*data, batch_size=24, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("after the first update")]
    assert told == [f"after the first update of this size: {trainer.plan}"]


def test_plan_of_another_run_says_nothing_of_this_memory(data, tmp_path):
    trainer = make_trainer(auto(UNLIMITED), callbacks=[Checkpoint(tmp_path)])
    trainer.fit(*data, batch_size=24, verbose=0)
    again = make_trainer(Accumulation(micro_batch_size=6))
    again.fit(*data, batch_size=24, epochs=2, verbose=0, resume_from=tmp_path)
    assert again.progress.updates == 4
    assert again.plan == Plan(
        name=trainer.plan.name, jit_compile=trainer.plan.jit_compile
    )


# --- What does not fit. ---


def test_other_errors_are_not_taken_for_a_shortage(data, monkeypatch):
    trainer = make_trainer(auto(UNLIMITED))
    shortage = Shortage(monkeypatch, most=0)
    shortage.error = lambda: OSError("other")
    with pytest.raises(OSError, match="other"):
        trainer.fit(*data, batch_size=24, verbose=0)
    assert shortage.failures == 1


def test_shortage_of_single_samples_is_an_error(data, monkeypatch):
    trainer = make_trainer(auto(UNLIMITED))
    shortage = Shortage(monkeypatch, most=0)
    with (
        pytest.warns(UserWarning, match="from here on"),
        pytest.raises(Exception, match="injected"),
    ):
        trainer.fit(*data, batch_size=4, verbose=0)
    assert shortage.failures == 3


def test_processor_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="memory_limit_bytes must be given"):
        make_trainer(Accumulation(micro_batch_size="auto"))
    with pytest.raises(ValueError, match="Leave run_eagerly out"):
        make_trainer(auto(UNLIMITED), run_eagerly=True)


def test_limit_below_the_model_is_an_error_before_training(data):
    trainer = make_trainer(auto(1000))
    before = everything(trainer)
    with pytest.raises(MemoryError, match="Raise memory_limit_bytes"):
        trainer.fit(*data, batch_size=24, verbose=0)
    for one, other in zip(everything(trainer), before, strict=False):
        np.testing.assert_array_equal(one, other)
    assert trainer.progress.updates == 0


def test_loss_that_cannot_be_weighed_is_refused_before_anything_is_cut(data):
    def bare(y, outputs):
        return keras.ops.mean(keras.ops.square(y - outputs))

    model = make_trainer(1).model
    options = {"optimizer": "sgd", "loss": bare}
    trainer = Trainer(model, accumulation=auto(UNLIMITED), **options)
    with pytest.raises(ValueError, match="denominator"):
        trainer.fit(*data, batch_size=24, verbose=0)


# --- Afterwards. ---


LEAVES_NOTHING = """
import gc
import numpy as np
from test_memory import count_what_is_kept, make_trainer
data = np.ones([48, 32, 32], "float32"), np.ones([48, 1], "float32")
kept = []
for _ in range(3):
    trainer = make_trainer(2)
    trainer.fit(*data, batch_size=8, verbose=0)
    alive = count_what_is_kept()
    del trainer
    gc.collect()
    kept.append(count_what_is_kept())
assert kept[2] <= kept[1] < alive, (kept, alive)
"""


def test_trainer_that_is_gone_leaves_nothing_behind():
    # In a process of its own, where there is less to look through.
    environment = environments.beside(__file__)
    done = forked.run(["-c", LEAVES_NOTHING], environment)
    assert done.returncode == 0, done.stderr

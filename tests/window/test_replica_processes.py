"""Claims about replicas that are processes of PyTorch.

The first test starts two that run the others, and files of claims that hold of
replicas wherever they are.
"""

import subprocess
import sys
from pathlib import Path

import joined
import numpy as np
import pytest
from calls import Calls
from replicated import PROCESSES, alone, make_mlp, targets

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras, ops

HERE = Path(__file__)
FILES = (
    HERE,
    *map(HERE.with_name, ["test_replicas.py", "test_replica_hooks.py"]),
)

needs_processes = pytest.mark.skipif(
    PROCESSES == 1, reason="runs in the processes that another test starts"
)


@pytest.mark.skipif(
    BACKEND != "torch" or PROCESSES > 1,
    reason="replicas are processes on PyTorch alone",
)
def test_claims_about_replicas_hold_of_two_processes(tmp_path):
    options = ("-q", "-p", "joined", "-p", "no:cacheprovider", "-p", "no:xdist")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *FILES],
            env=joined.of_process(index, 2, tmp_path / "store"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert " passed" in output


class Counting(keras.layers.Layer):
    """Counts how often Python runs it."""

    def build(self, shape):
        self.runs = Calls()

    def call(self, x):
        self.runs.note()
        return x


def make_model():
    """Make a network that draws, and keeps statistics."""
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, activation="tanh"),
            Counting(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )


def make_trainer(jit_compile="auto", model=None):
    return Trainer(
        model or make_model(),
        optimizer=keras.optimizers.AdamW(clipnorm=1.0),
        loss="mse",
        metrics=["mae"],
        accumulation=Accumulation(micro_batch_size=3),
        jit_compile=jit_compile,
    )


def of_all(variables):
    """List the numbers that every process has in variables."""
    import torch

    numbers = [ops.convert_to_numpy(v).astype("float64") for v in variables]
    flat = np.concatenate([array.ravel() for array in numbers])
    own = torch.from_numpy(flat)
    every = [torch.empty_like(own) for _ in range(PROCESSES)]
    torch.distributed.all_gather(every, own)
    return [tensor.numpy() for tensor in every]


def reductions_of(trainer, micro_batches):
    """List the dtypes that an update adds up over processes."""
    import torch

    reduced = []
    add_up = torch.distributed.all_reduce

    def note(tensor):
        reduced.append(tensor.dtype)
        add_up(tensor)

    x, y = targets(np.random.default_rng(0), PROCESSES * 3 * micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", note)
        trainer.train_on_batch(x, y)
    return reduced


@needs_processes
@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_processes_that_begin_with_other_weights_go_on_with_the_first_ones(
    jit_compile,
):
    import torch

    keras.utils.set_random_seed(torch.distributed.get_rank())
    trainer = make_trainer(jit_compile)
    model = trainer.model
    one, other = of_all(model.variables)
    assert (one != other).any()
    x, y = targets(np.random.default_rng(0), 51)
    trainer.fit(x, y, batch_size=17, epochs=2, verbose=0)
    assert trainer.progress.updates == 6
    one, other = of_all([*model.variables, *trainer.optimizer.variables])
    np.testing.assert_array_equal(one, other)


@needs_processes
def test_update_of_processes_reduces_once_whatever_its_micro_batches():
    trainer = make_trainer()
    two, eight = (reductions_of(trainer, count) for count in (2, 8))
    assert two == eight
    # Everything that is a float; and random states.
    assert sorted(map(str, two)) == ["torch.float32", "torch.int64"]


@needs_processes
def test_update_of_processes_is_recorded_once():
    trainer = make_trainer()
    (layer,) = (x for x in trainer.model.layers if isinstance(x, Counting))
    reductions_of(trainer, 2)
    runs = layer.runs.count
    reductions_of(trainer, 2)
    assert layer.runs.count == runs


@needs_processes
def test_wrapper_that_reduces_by_itself_is_refused_and_its_model_is_not():
    import torch

    model = make_mlp()
    wrapper = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(
        TypeError, match=r"DistributedDataParallel.*model\.module"
    ):
        make_trainer(model=wrapper)
    two = reductions_of(make_trainer(model=model), 2)
    assert two.count(torch.float32) == 1


@needs_processes
def test_processes_evaluate_and_predict_as_one(rng):
    x, y = targets(rng, 24)
    trainer = make_trainer()
    loss = trainer.evaluate(x, y, verbose=0)
    predictions = trainer.predict(x, verbose=0)
    with alone():
        trainer = make_trainer(model=trainer.model)
    alone_loss = trainer.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(alone_loss, loss, rtol=1e-6)
    np.testing.assert_array_equal(trainer.predict(x, verbose=0), predictions)

"""Claims about what several devices hold, reduce and save."""

import os
from pathlib import Path

import forked
import numpy as np
import pytest
from replicated import (
    assert_close,
    distributed,
    make_mlp,
    make_trainer,
    need_devices,
    targets,
    weights_of,
)

from accumtrainer import (
    Accumulation,
    Trainer,
    WindowLossTrainer,
)
from accumtrainer.callbacks import (
    Checkpoint,
    GradientAccumulation,
    GradientNoiseScale,
)
from accumtrainer.data.batches import Batch, window_of_rows
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.steps import Step
from accumtrainer.window.replicas import share_out


def copies_of(variable):
    """List the values that the devices hold of a variable."""
    if BACKEND == "jax":
        return [shard.data for shard in variable.value.addressable_shards]
    return variable.value.values


def test_every_device_holds_the_same_weights(rng):
    trainer = make_trainer(4, make_mlp)
    x, y = targets(rng, 51)
    trainer.fit(x, y, batch_size=17, verbose=0)
    for variable in trainer.model.trainable_variables:
        copies = [np.asarray(copy) for copy in copies_of(variable)]
        assert len(copies) == 4
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


def reductions(micro_batches):
    """List the kinds of numbers that an update reduces over its replicas."""
    need_devices()
    script = Path(__file__).with_name("reductions_run.py")
    done = forked.run([script, str(micro_batches)], os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_update_reduces_once_whatever_its_micro_batches():
    # Not in this process: TensorFlow's collectives know one group of devices.
    two, eight = map(reductions, (2, 8))
    assert two == eight
    # Everything that is a float; and random states.
    floats = [kind for kind in two if kind in ("f32", "float32")]
    assert len(floats) == 1
    assert len(two) <= 2


def test_weights_may_be_split_over_devices_too(rng):
    if BACKEND != "jax":
        reason = f"Keras has no ModelParallel on {BACKEND}"
        print(f"Not run: {reason}.")
        pytest.skip(reason)
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], [f"cpu:{index}" for index in range(4)]
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*/kernel"] = (None, "model")
    x, y = targets(rng, 85)
    trainers = [make_trainer(1, make_mlp)]
    distribution = keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )
    with distribution.scope():
        trainers.append(make_trainer(1, make_mlp))
    for trainer in trainers:
        trainer.fit(x, y, batch_size=17, epochs=2, verbose=0)
    assert_close(*map(weights_of, trainers))
    kernel = trainers[1].model.trainable_variables[0].value
    assert kernel.addressable_shards[0].data.shape == (6, 4)


# --- What goes on elsewhere. ---


@pytest.mark.parametrize("counts", [(2, 4), (4, 1), (1, 2)])
def test_checkpoint_of_some_goes_on_with_others(rng, tmp_path, counts):
    x, y = targets(rng, 48)
    options = {"batch_size": 12, "verbose": 0}
    whole = make_trainer(1, make_mlp, metrics=["mae"])
    whole.fit(x, y, epochs=3, **options)
    for epochs, count in zip((1, 3), counts, strict=True):
        trainer = make_trainer(
            count,
            make_mlp,
            metrics=["mae"],
            callbacks=[Checkpoint(tmp_path)],
        )
        trainer.fit(x, y, epochs=epochs, resume_from="auto", **options)
    assert trainer.progress.updates == whole.progress.updates == 12
    assert_close(*map(weights_of, (trainer, whole)))


def test_checkpoint_is_made_and_read_before_the_first_update(rng, tmp_path):
    saved, trainer = (make_trainer(2, make_mlp) for _ in range(2))
    for variable in saved.model.variables:
        variable.assign(variable + 1.0)
    saved.save(tmp_path)
    trainer.restore(tmp_path, weights_only=True)
    trainer.restore(tmp_path)
    assert_close(*map(weights_of, (trainer, saved)), tolerance=0.0)
    trainer.train_on_batch(*targets(rng, 6))
    assert trainer.progress.updates == 1


def test_size_that_fits_divides_the_rows_of_a_replica(rng, monkeypatch):
    """Of 20 rows each, 4 at a time fit; halves would come to 3."""
    monkeypatch.setattr(Step, "peak_bytes", lambda _, window: window.sizes[0])
    trainer = make_trainer(
        2,
        make_mlp,
        accumulation=Accumulation(
            micro_batch_size="auto", memory_limit_bytes=2 * 4
        ),
    )
    x, y = targets(rng, 40)
    trainer.fit(x, y, batch_size=40, verbose=0)
    assert trainer.plan.micro_batch_size == 4
    assert trainer.last_window.sizes == (8,) * 5


def test_start_line_tells_of_replicas(rng, capsys):
    trainer = make_trainer(2, make_mlp)
    x, y = targets(rng, 24)
    trainer.fit(x, y, batch_size=12, verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert "12 samples per update = 2 micro-batches x 6" in line
    assert "shared out among 2 replicas" in line


class Compared(WindowLossTrainer):
    def window_loss(self, embeddings, batch, info):
        return ops.mean(embeddings)


def test_what_keeps_to_one_device_is_refused(rng):
    with distributed(2):
        model = make_mlp()
        with pytest.raises(ValueError, match="a loss over the whole window"):
            Compared(model, optimizer="sgd")
        with pytest.raises(ValueError, match="2 replicas, with run_eagerly"):
            Trainer(model, optimizer="sgd", loss="mse", run_eagerly=True)
        if BACKEND == "tensorflow":
            layer = keras.layers.BatchNormalization(synchronized=True)
            model.add(layer)
            with pytest.raises(ValueError, match=f"True in {layer.name}"):
                Trainer(model, optimizer="sgd", loss="mse")
            model.pop()
        trainer = Trainer(model, optimizer="sgd", loss="mse")
        with pytest.raises(ValueError, match="must watch a Trainer of one"):
            trainer.fit(
                *targets(rng, 8), verbose=0, callbacks=[GradientNoiseScale()]
            )
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="GradientAccumulation"):
            model.fit(
                *targets(rng, 8),
                verbose=0,
                callbacks=[GradientAccumulation(steps=2)],
            )


# --- How windows are shared out. ---


@pytest.mark.parametrize(
    ("sizes", "replicas", "split", "copied"),
    [
        ((8, 8, 8), 2, [(3, 8)], []),
        ((8, 8, 3), 2, [(2, 8), (1, 2)], [(1, 1)]),
        ((8, 8, 7), 4, [(2, 8), (1, 4)], [(1, 2), (1, 1)]),
        ((3,), 4, [], [(3, 1)]),
        ((5, 5), 2, [(2, 4)], [(2, 1)]),
    ],
)
def test_rows_are_split_evenly_or_copied(sizes, replicas, split, copied):
    rows = np.arange(sum(sizes))
    shares, indices = share_out(window_of_rows(Batch(rows), sizes), replicas)
    assert [batch.x.shape for batch in shares.split] == split
    assert [batch.x.shape for batch in shares.copied] == copied
    found = [b.x.ravel() for b in (*shares.split, *shares.copied)]
    assert sorted(np.concatenate(found).tolist()) == rows.tolist()
    ends = np.cumsum(sizes)
    run = [row for b in (*shares.split, *shares.copied) for row in b.x]
    for index, row in zip(indices, run, strict=True):
        assert set(np.searchsorted(ends, row, side="right")) == {index}


def test_process_shares_out_its_share_among_its_own_replicas():
    window = window_of_rows(Batch(np.arange(10)), (4, 4, 2)).as_shard(3)
    shares, indices = share_out(window, 6)
    assert [batch.x.shape for batch in shares.split] == [(2, 4), (1, 2)]
    assert not shares.copied
    assert indices == [0, 1, 2]

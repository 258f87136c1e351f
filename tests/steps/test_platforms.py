"""Programs are for GPUs and TPUs as well, which JAX can tell without one."""

import numpy as np
import pytest

from accumtrainer import Accumulation, LossScale, Trainer
from accumtrainer.keras_api import BACKEND, keras

PLATFORMS = ("cuda", "rocm", "tpu")


@pytest.fixture
def programs(monkeypatch):
    """List whatever is compiled, a program with its arguments, as on a GPU."""
    if BACKEND != "jax":
        reason = "JAX alone writes programs for devices that are not there"
        print(f"Not run on {BACKEND}: {reason}.")
        pytest.skip(reason)
    from accumtrainer.steps.jax.backend import JaxBackend
    from accumtrainer.steps.jax.programs import Compiled

    found, trace = [], Compiled._trace

    def watch(self, leaves, *arguments):
        run, changed, kept = trace(self, leaves, *arguments)
        arrays = self._holder.arrays
        given = [
            [arrays[i] for i in positions] for positions in (changed, kept)
        ]
        found.append((run, [*given, leaves]))
        return run, changed, kept

    monkeypatch.setattr(Compiled, "_trace", watch)
    monkeypatch.setattr(JaxBackend, "has_accelerator", lambda self: True)
    return found


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_window_can_be_compiled_for_other_devices(plan, programs, use_plan):
    import jax

    use_plan(plan)
    tokens = keras.Input([6], dtype="int32")
    embedded = keras.layers.Embedding(8, 4)(tokens)
    attended = keras.layers.MultiHeadAttention(2, 2)(
        embedded, embedded, use_causal_mask=True
    )
    images = keras.layers.Reshape([6, 4, 1])(attended)
    images = keras.layers.Conv2D(3, 3)(images)
    images = keras.layers.BatchNormalization()(images)
    images = keras.layers.Dropout(0.5)(keras.layers.Flatten()(images))
    trainer = Trainer(
        keras.Model(tokens, keras.layers.Dense(2)(images)),
        optimizer=keras.optimizers.AdamW(clipnorm=1.0),
        loss="mse",
        metrics=["mae"],
        accumulation=Accumulation(micro_batch_size=2),
        loss_scale=LossScale(),
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(8, size=[6, 6]), rng.normal(size=[6, 2])
    trainer.train_on_batch(x.astype("int32"), y.astype("float32"))
    assert len(programs) == (1 if plan == "fused" else 2)
    for run, arguments in programs:
        specs = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments
        )
        for platform in PLATFORMS:
            lowered = run.trace(*specs).lower(lowering_platforms=(platform,))
            assert "func.func public @main" in lowered.as_text()

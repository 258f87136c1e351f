"""Claims about W&B's own callbacks for Keras: they run unmodified."""

import json
import os

import forked
import pytest
from wandb_file import written_runs

from accumtrainer.keras_api import BACKEND

WANDB_PROGRAM = """if True:
    import json, pathlib, sys
    import numpy as np
    import wandb
    from wandb.integration.keras import (
        WandbMetricsLogger,
        WandbModelCheckpoint,
    )
    from accumtrainer import Trainer
    from accumtrainer.callbacks import WandbLogger
    from accumtrainer.keras_api import keras

    run = wandb.init(
        mode="offline", dir=".", settings={"silent": True, "console": "off"}
    )
    trainer = Trainer(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss="mse",
        accumulation=4,
        callbacks=[
            WandbMetricsLogger(log_freq="batch"),
            WandbLogger(run=run),
            WandbModelCheckpoint("model-{epoch}.keras"),
        ],
    )
    x = np.random.default_rng(0).normal(size=[24, 3]).astype("float32")
    history = trainer.fit(
        x, x[:, :1], batch_size=2, epochs=2, validation_data=(x, x[:, :1]),
        verbose=0,
    )
    run.finish()
    pathlib.Path("history.json").write_text(json.dumps(history.history))
    """


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="W&B's own callbacks import TensorFlow"
)
def test_wandb_s_own_callbacks_log_updates_and_send_models(tmp_path):
    pytest.importorskip("wandb", reason="W&B is not installed")
    # In a process of its own, because importing them patches tf.keras. It
    # does not learn of the service that an earlier test started, whose
    # folder is another.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WANDB_")
    }
    done = forked.run(["-c", WANDB_PROGRAM], environment, tmp_path)
    assert done.returncode == 0, done.stderr
    history = json.loads((tmp_path / "history.json").read_text())
    (run,) = written_runs(tmp_path)
    batches = [row for row in run.history if "batch/loss" in row]
    # A batch is an update: three in each of two epochs.
    assert [row["batch/batch_step"] for row in batches] == [0, 1, 2, 3, 4, 5]
    # Beside WandbLogger they stand at the updates it counts.
    assert [row["updates"] for row in batches] == [1, 2, 3, 4, 5, 6]
    assert batches[2]["batch/loss"] == history["loss"][0]
    epochs = [row for row in run.history if "epoch/val_loss" in row]
    received = [row["epoch/val_loss"] for row in epochs]
    assert received == history["val_loss"]
    assert [row["updates"] for row in epochs] == [3, 6]
    models = [a for a in run.artifacts if a.type == "model"]
    assert len(models) == 2
    assert {path.name for path in tmp_path.glob("*.keras")} == {
        "model-1.keras",
        "model-2.keras",
    }

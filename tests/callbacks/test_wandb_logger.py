"""Claims about the runs of WandbLogger, with the real W&B, offline."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from quickest import JIT_COMPILE
from wandb_file import written_runs
from wandb_runs import (
    QUIET,
    Run,
    X,
    Y,
    fit,
    make_logger,
    make_trainer,
    positions,
)

from accumtrainer import Accumulation, Callback, Every
from accumtrainer.callbacks import (
    Checkpoint,
    KeepGradientNorms,
    KeepGradients,
    WandbLogger,
)
from accumtrainer.keras_api import BACKEND, keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Give the Trainer, the History and the runs of two trainings."""
    folder = tmp_path_factory.mktemp("written")
    trainer = make_trainer(KeepGradients)
    logger = make_logger(
        folder,
        every=Every(4, "updates"),
        watch="all",
        watch_every=Every(5, "updates"),
        tags=["first"],
        config={"backend": "mine", "answer": 42},
    )
    history = fit(trainer, logger, validation_data=(X, Y))
    fit(trainer, logger, validation_data=(X, Y))
    return trainer, history, written_runs(folder)


def test_points_lie_over_updates_which_never_go_back(written):
    _, _, (first, second) = written
    assert positions(first.history, "loss") == [4, 6]
    assert positions(second.history, "loss") == [8, 12]
    updates = [row["updates"] for row in first.history + second.history]
    assert updates == sorted(updates)
    metrics = {m.name or m.glob_name: m.step_metric for m in first.metrics}
    assert metrics == {"updates": "", "*": "updates"}


def test_point_holds_what_is_asked_of_a_logger(written):
    _, history, (first, _) = written
    names = {"loss", "mae", "learning_rate", "gradient_norm", "loss_scale"}
    names |= {"clipped_gradient_norm", "skipped_updates", "epoch"}
    names |= {"samples_per_second"}
    points = [row for row in first.history if "loss" in row]
    assert all(names <= set(row) for row in points)
    (validation,) = [row for row in first.history if "val_loss" in row]
    assert validation["updates"] == 6
    assert validation["val_loss"] == history.history["val_loss"][0]


def test_config_holds_every_option_and_what_the_user_set(written):
    trainer, _, (first, second) = written
    config = first.config
    assert config["answer"] == 42 and config["backend"] == "mine"
    assert config["accumulation"]["steps"] == 2
    assert config["loss_scale"] is None
    assert config["every"] == str(Every(4, "updates"))
    assert config["optimizer"]["class_name"] == "SGD"
    assert config["optimizer"]["clipnorm"] == 0.5
    assert config["schedule"]["class_name"] == "CosineDecay"
    assert config["schedule"]["decay_steps"] == 100
    assert config["model"]["parameters"] == 4
    assert "dense" in config["model"]["summary"]
    assert config["plan"] == str(trainer.plan)
    assert config["versions"]["keras"] == keras.__version__
    assert second.config["answer"] == 42
    assert second.config["backend"] == "mine"
    assert list(first.run.tags) == ["first"]


def test_config_holds_the_memory_measured_for_a_chosen_size(tmp_path):
    options = {"micro_batch_size": "auto", "memory_limit_bytes": 2**40}
    for mine in ({}, {"plan": "mine"}):
        trainer = make_trainer(accumulation=Accumulation(**options))
        fit(trainer, make_logger(tmp_path, config=mine))
        expected = mine.get("plan", str(trainer.plan))
        assert written_runs(tmp_path)[-1].config["plan"] == expected
    assert "iB measured" in str(trainer.plan)


def test_summary_holds_the_last_and_the_best(written):
    _, history, (first, second) = written
    assert first.summary["best_val_loss"] == history.history["val_loss"][0]
    assert first.summary["best_val_loss_updates"] == 6
    assert first.summary["best_val_mae"] == history.history["val_mae"][0]
    last = [row for row in second.history if "loss" in row][-1]
    assert second.summary["loss"] == last["loss"]
    assert second.summary["updates"] == 12


def test_histograms_are_of_weights_and_gradients(written):
    trainer, _, (first, second) = written
    path = trainer.model.trainable_variables[0].path
    for kind in ("weights", "gradients"):
        name = f"{kind}/{path}"
        assert positions(first.history, f"{name}.values") == [5]
        assert positions(second.history, f"{name}.values") == [10]
        row = next(r for r in first.history if f"{name}.values" in r)
        assert sum(row[f"{name}.values"]) == 3


def test_second_fit_continues_the_run_and_both_are_finished(written):
    _, _, (first, second) = written
    assert first.run.run_id == second.run.run_id
    assert first.run.project == "claims"
    assert (first.exit_code, second.exit_code) == (0, 0)


def test_run_that_is_continued_is_one_that_wandb_may_have(trainer, tmp_path):
    logger, asked = make_logger(tmp_path), []
    for _ in range(2):
        fit(trainer, logger)
        asked.append(logger.run.settings.resume)
    assert asked == [None, "allow"]


def test_fit_of_another_trainer_is_another_run(trainer, tmp_path):
    logger = make_logger(tmp_path)
    fit(trainer, logger)
    fit(make_trainer(), logger)
    first, second = written_runs(tmp_path)
    assert first.run.run_id != second.run.run_id


def test_another_trainer_that_is_further_is_another_run_too(trainer, tmp_path):
    logger = make_logger(tmp_path)
    further = make_trainer()
    fit(further, epochs=8)
    fit(make_trainer(), logger, validation_data=(X, Y))
    fit(further, logger, validation_data=(X, Y + 100))
    first, second = written_runs(tmp_path)
    assert first.run.run_id != second.run.run_id
    # It is worse than the first one's, and yet the best of its own.
    best = second.summary["best_val_loss"]
    assert best > first.summary["best_val_loss"]


class Fail(Callback):
    """Raises after some updates."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_apply(self, update, logs=None):
        if update == self.updates:
            raise RuntimeError("power failure")


def test_best_is_what_it_was_before_a_resume(tmp_path):
    for epochs, y in ((1, Y), (2, Y + 100)):
        fit(
            make_trainer(),
            Checkpoint(tmp_path / "saved"),
            make_logger(tmp_path),
            validation_data=(X, y),
            epochs=epochs,
            resume_from="auto",
        )
    first, second = written_runs(tmp_path)
    assert first.summary["best_val_loss_updates"] == 6
    assert positions(second.history, "val_loss") == [12]
    assert "best_val_loss" not in second.summary


def test_resume_continues_the_run_and_sends_no_point_twice(tmp_path):
    every = Every(1, "updates")

    crashed, states = make_logger(tmp_path, every=every), []

    class Save(Callback):
        is_logger = True

        def on_train_batch_end(self, batch, logs=None):
            states.append(json.dumps(crashed.get_state()))

    class Restore(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            resumed.set_state(json.loads(states[2]))

    with pytest.raises(RuntimeError, match="power failure"):
        fit(make_trainer(), crashed, Save(), Fail(6), shuffle=False)
    # The checkpoint was made after update 3; 4 and 5 were sent after it.
    resumed = make_logger(tmp_path, every=every)
    trainer = make_trainer()
    trainer.fit(X[:12], Y[:12], batch_size=2, verbose=0, shuffle=False)
    trainer.fit(
        X[12:],
        Y[12:],
        batch_size=2,
        verbose=0,
        shuffle=False,
        callbacks=[resumed, Restore()],
    )
    first, second = written_runs(tmp_path)
    assert first.exit_code == 1
    assert first.run.run_id == second.run.run_id
    assert positions(first.history, "loss") == [1, 2, 3, 4, 5]
    assert positions(second.history, "loss") == [6]


@pytest.mark.parametrize("mark", [None, "", '{"updates": 6'])
def test_resume_amid_an_epoch_continues_the_run(mark, tmp_path):
    def train(*others, **options):
        fit(
            make_trainer(),
            make_logger(tmp_path, every=Every(3, "updates")),
            *others,
            Checkpoint(tmp_path / "saved", every=Every(5, "updates")),
            epochs=2,
            **options,
        )

    with pytest.raises(RuntimeError, match="power failure"):
        train(Fail(9))
    if mark is not None:  # it was killed as it left word of what was sent
        (marker,) = tmp_path.rglob("accumtrainer.json")
        marker.write_text(mark)
    train(resume_from="auto")
    first, second = written_runs(tmp_path)
    assert first.run.run_id == second.run.run_id
    assert positions(first.history, "loss") == [3, 6, 8]
    again = [] if mark is None else [6]
    assert positions(second.history, "loss") == [*again, 9, 12]


def test_no_point_is_sent_twice_of_the_update_that_a_run_came_to(tmp_path):
    def train(*others):
        fit(
            make_trainer(),
            make_logger(tmp_path, every=Every(3, "updates")),
            *others,
            Checkpoint(tmp_path / "saved", every=Every(5, "updates")),
            epochs=2,
            validation_data=(X, Y),
            resume_from="auto",
        )

    with pytest.raises(RuntimeError, match="power failure"):
        train(Fail(7))
    train()
    first, second = written_runs(tmp_path)
    for name, later in {"loss": [9, 12], "val_loss": [12]}.items():
        assert positions(first.history, name)[-1] == 6
        assert positions(second.history, name) == later


def test_run_that_has_nothing_left_sends_no_point_twice(tmp_path):
    for _ in range(2):
        trainer = make_trainer()
        checkpoint = Checkpoint(tmp_path / "saved")
        fit(
            trainer,
            checkpoint,
            make_logger(tmp_path, every=Every(4, "updates")),
            epochs=1,
            resume_from="auto",
        )
    assert trainer.progress.updates == 6
    runs = written_runs(tmp_path)
    assert len({run.run.run_id for run in runs}) == 1
    sent = [u for run in runs for u in positions(run.history, "loss")]
    assert sent == [4, 6]


def test_run_that_is_not_the_checkpoint_s_is_refused(trainer, tmp_path):
    first = make_logger(tmp_path)
    fit(trainer, first)
    state = first.get_state()
    for other in (
        make_logger(tmp_path, id="other"),
        WandbLogger(run=Run(id="other")),
    ):
        with pytest.raises(ValueError, match="run must be the one.*'other'"):
            other.set_state(state)


def test_checkpoints_are_sent_as_artifacts(tmp_path):
    class Waits(Callback):
        """Has every second update wait for the checkpoint of the one before."""

        def on_train_batch_begin(self, batch, logs=None):
            while batch in (2, 4) and (
                checkpoint.last_saved is None
                or not checkpoint.last_saved.name.endswith(str(batch))
            ):
                time.sleep(0.01)

    # More often than points are.
    checkpoint = Checkpoint(
        tmp_path / "saved", every=Every(2, "updates"), keep=9
    )
    logger = make_logger(tmp_path / "runs", log_checkpoints=checkpoint)
    (tmp_path / "runs").mkdir()
    fit(make_trainer(), Waits(), checkpoint, logger)
    (only,) = written_runs(tmp_path)
    artifacts = [a for a in only.artifacts if a.type == "model"]
    assert {u for a in artifacts for u in a.aliases} == {
        *("latest", "u2", "u4", "u6")
    }
    for artifact in artifacts:
        updates = json.loads(artifact.metadata)["updates"]
        assert set(artifact.aliases) == {"latest", f"u{updates}"}
    assert {a.name for a in artifacts} == {f"checkpoint-{only.run.run_id}"}
    assert all(a.manifest.contents for a in artifacts)


def test_upload_without_a_training_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="upload must be called while"):
        make_logger(tmp_path).upload(tmp_path)


# --- What is refused ---


def test_unknown_option_is_refused_before_training(trainer, tmp_path):
    before = trainer.progress.updates
    with pytest.raises(TypeError, match="Received: projct.*project"):
        fit(trainer, make_logger(tmp_path, projct="a"))
    assert trainer.progress.updates == before
    assert not written_runs(tmp_path)


def test_what_wandb_refuses_is_refused_before_training(trainer, tmp_path):
    before = trainer.progress.updates
    with pytest.raises(Exception, match="mode"):
        fit(trainer, make_logger(tmp_path, mode="upside down"))
    assert trainer.progress.updates == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"run": Run(), "project": "a"}, ValueError, "run and project"),
        ({"run": Run(), "tags": ["a"]}, ValueError, "run and tags"),
        ({"watch": "all of it"}, ValueError, "watch must be one of"),
        ({"watch_every": 5}, TypeError, "watch_every must be an Every"),
        ({"best": {"val_bleu": "up"}}, ValueError, "'min' or 'max'"),
        ({"every": 10}, TypeError, "every must be an Every"),
        (
            {"log_checkpoints": keras.callbacks.ModelCheckpoint("a.keras")},
            TypeError,
            "a callback with last_saved.*ModelCheckpoint",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        WandbLogger(**options)


def test_gradients_of_a_trainer_that_keeps_none_are_refused(trainer, tmp_path):
    with pytest.raises(ValueError, match="KeepGradients"):
        fit(trainer, make_logger(tmp_path, watch="gradients"))


def test_gradients_of_a_model_that_is_not_built_are_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="model must be built"):
        KeepGradients(model, optimizer="sgd", loss="mse")


def test_kept_gradients_are_those_of_the_update():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = KeepGradients(
        model, optimizer=keras.optimizers.SGD(1.0), loss="mse", accumulation=2
    )
    before = model.get_weights()
    trainer.train_on_batch(X[:4], Y[:4])
    kept = trainer.kept_gradients
    assert list(kept) == [v.path for v in model.trainable_variables]
    for old, new, gradient in zip(
        before, model.get_weights(), kept.values(), strict=True
    ):
        received = keras.ops.convert_to_numpy(gradient)
        np.testing.assert_allclose(old - new, received, atol=1e-6)


@pytest.mark.parametrize("cls", [KeepGradients, KeepGradientNorms])
def test_what_is_kept_leaves_out_variables_made_later(cls, tmp_path):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = cls(model, optimizer="sgd", loss="mse", jit_compile=JIT_COMPILE)
    (layer,) = model.layers
    layer.enable_lora(2)
    fit(trainer, make_logger(tmp_path, watch="norms"))
    assert float(trainer.kept_norms()[layer.bias.path]) > 0
    lora = [v.path for v in model.trainable_variables if "lora" in v.path]
    assert len(lora) == 2 and not set(lora) & set(trainer.kept_norms())


def test_missing_wandb_is_refused_with_the_remedy(trainer, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"accumtrainer\[wandb\]"):
        fit(trainer, WandbLogger())


def test_direction_of_a_metric_is_guessed_only_where_its_name_says_it():
    run = Run()
    logger = WandbLogger(run=run, best={"val_bleu": "max"})
    row = {"val_bleu": 0.5, "val_accuracy": 0.5, "val_odd": 1, "loss": 2}
    best = logger._best.update({"updates": 3} | row)
    assert best == {
        "best_val_bleu": 0.5,
        "best_val_bleu_updates": 3,
        "best_val_accuracy": 0.5,
        "best_val_accuracy_updates": 3,
    }


def test_best_is_neither_worse_nor_no_number():
    logger = WandbLogger(run=Run())
    for updates, value in ((1, np.nan), (2, 0.5), (3, 0.25), (4, np.inf)):
        row = {"updates": updates, "val_accuracy": value}
        assert bool(logger._best.update(row)) == (updates == 2)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow is the backend")
def test_tensorflow_is_not_imported(tmp_path):
    code = f"""if True:
        import sys
        import numpy as np
        from accumtrainer import Trainer
        from accumtrainer.callbacks import WandbLogger
        from accumtrainer.keras_api import keras
        rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
        trainer = Trainer(
            keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
            optimizer=keras.optimizers.Adam(rate),
            loss="mse",
        )
        logger = WandbLogger(
            mode="offline", dir={str(tmp_path)!r}, settings={QUIET!r}
        )
        data = np.ones([4, 3]), np.ones([4, 1])
        trainer.fit(*data, verbose=0, callbacks=[logger])
        print("tensorflow" in sys.modules)
        """
    printed = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert printed.split()[-1] == "False"
    assert written_runs(tmp_path)[0].history

"""Claims about WandbLogger, with the real W&B: offline, or out of reach."""

import json
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from wandb_file import written_runs

from accumtrainer import Accumulation, Callback, Every, Trainer
from accumtrainer.callbacks import Checkpoint, KeepGradients, WandbLogger
from accumtrainer.callbacks.background import Background
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.logs import Logs

pytestmark = pytest.mark.usefixtures("without_xla")

wandb = pytest.importorskip("wandb", reason="W&B is not installed")

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

QUIET = {"silent": True, "console": "off"}


@pytest.fixture(autouse=True)
def away_from_home(monkeypatch, tmp_path):
    """Keep W&B from what is configured on this machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def make_trainer(cls=Trainer, **options):
    keras.utils.set_random_seed(0)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    options = {"accumulation": 2} | options
    return cls(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(schedule, clipnorm=0.5),
        loss="mse",
        metrics=["mae"],
        seed=0,
        **options,
    )


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


def make_logger(folder, **options):
    # Nothing here depends on how fast this machine is.
    options = {
        "mode": "offline",
        "settings": QUIET,
        "close_secs": 600,
    } | options
    return WandbLogger("claims", dir=folder, **options)


def fit(trainer, *callbacks, **options):
    """Train, six updates an epoch."""
    options = {"batch_size": 2, "verbose": 0} | options
    return trainer.fit(X, Y, callbacks=list(callbacks), **options)


def positions(history, name):
    return [row["updates"] for row in history if name in row]


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


def test_fit_of_another_trainer_is_another_run(trainer, tmp_path):
    logger = make_logger(tmp_path)
    fit(trainer, logger)
    fit(make_trainer(), logger)
    first, second = written_runs(tmp_path)
    assert first.run.run_id != second.run.run_id


class Fail(Callback):
    """Raises after some updates."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_apply(self, update, logs=None):
        if update == self.updates:
            raise RuntimeError("power failure")


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


def test_run_that_was_handed_in_is_left_running(trainer, tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)
    run.config["backend"] = "mine"
    logger = WandbLogger(run=run)
    fit(trainer, logger)
    assert logger.run is run
    run.log({"after": 1})
    run.finish()
    (only,) = written_runs(tmp_path)
    assert positions(only.history, "loss")
    assert only.history[-1]["after"] == 1
    assert only.config["backend"] == "mine"
    assert only.config["accumulation"]["steps"] == 2


def test_checkpoints_are_sent_as_artifacts(tmp_path):
    checkpoint = Checkpoint(tmp_path / "saved", every=Every(3, "updates"))
    logger = make_logger(
        tmp_path / "runs",
        every=Every(1, "updates"),
        log_checkpoints=checkpoint,
    )
    (tmp_path / "runs").mkdir()
    fit(make_trainer(), checkpoint, logger)
    (only,) = written_runs(tmp_path)
    artifacts = [a for a in only.artifacts if a.type == "model"]
    assert artifacts
    assert {a.name for a in artifacts} == {f"checkpoint-{only.run.run_id}"}
    assert all(a.manifest.contents for a in artifacts)


def test_upload_without_a_training_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="upload must be called while"):
        make_logger(tmp_path).upload(tmp_path)


# --- W&B out of reach, slow, or failing ---


def free_port():
    """Find a port of this machine where nothing listens."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_server_out_of_reach_is_one_warning_and_the_run_kept(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(sys.modules[WandbLogger.__module__], "START_SECS", 0.1)
    times = []

    class Watch(keras.callbacks.Callback):
        is_logger = True  # is called after the logger

        def on_epoch_begin(self, epoch, logs=None):
            times.append(time.monotonic())

        def on_epoch_end(self, epoch, logs=None):
            times.append(time.monotonic())

    logger = make_logger(
        tmp_path,
        mode="online",
        settings=QUIET | {"init_timeout": 1},
        every=Every(1, "updates"),
    )
    trainer = make_trainer()
    wandb.teardown()  # it has read the environment before
    with pytest.warns(RuntimeWarning) as caught:
        fit(trainer, logger, Watch())
    wandb.teardown()
    assert len(caught) == 1
    assert "W&B could not be reached" in str(caught[0].message)
    assert trainer.progress.updates == 6
    last = written_runs(tmp_path)[-1]
    assert positions(last.history, "loss") == [1, 2, 3, 4, 5, 6]
    assert str(last.path.parent) in str(caught[0].message)


class Run:
    """Stands for a run whose `log` does what a test wants."""

    def __init__(self, id="fake", log=lambda row: None):
        self.id = id
        self.log = log
        self.config = type("Config", (dict,), {"update": lambda *_, **__: 0})()
        self.summary = {}
        self.offline = self.disabled = False

    def define_metric(self, *names, **options):
        pass


def test_service_that_hangs_is_one_warning_and_stops_nothing(trainer):
    hanging = threading.Event()
    logger = WandbLogger(
        run=Run(log=lambda row: hanging.wait()),
        every=Every(1, "updates"),
        close_secs=0.1,
    )
    before = trainer.progress.updates
    with pytest.warns(RuntimeWarning, match="close_secs=0.1") as caught:
        fit(trainer, logger)
    hanging.set()
    assert len(caught) == 1
    assert trainer.progress.updates == before + 6


def test_points_that_come_too_fast_are_left_out_with_one_warning(trainer):
    rows, hanging = [], threading.Event()

    def log(row):
        hanging.wait()
        rows.append(row)

    module = sys.modules[WandbLogger.__module__]
    make = module.Background

    class LetGo(Callback):
        def on_train_end(self, logs=None):
            hanging.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Background", lambda name, **_: make(name, 2))
        logger = WandbLogger(run=Run(log=log), every=Every(1, "updates"))
        with pytest.warns(RuntimeWarning, match="more slowly") as caught:
            fit(trainer, LetGo(), logger)
    assert len(caught) == 1
    assert 2 <= len(rows) < 6


# --- Points are gathered, and read in the thread ---


class Pause(Callback):
    """Lets time pass between updates."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


def test_gathered_points_keep_the_moments_they_were_made_at(tmp_path):
    trainer = make_trainer()
    fit(trainer, Pause(), make_logger(tmp_path, every=Every(1, "updates")))
    (run,) = written_runs(tmp_path)
    assert positions(run.history, "loss") == [1, 2, 3, 4, 5, 6]
    # The last two are made when the epoch ends, one right after the other.
    assert min(np.diff(run.moments[:-1])) > 0.04


def test_points_wait_for_others_until_somebody_asks_for_them():
    said, background = [], Background("gathering", gather_secs=3600.0)
    for word in "abc":
        background.do(said.append, word)
    time.sleep(0.05)
    assert not said
    assert background.wait(600)
    assert said == ["a", "b", "c"]
    assert background.finish(600, said.append, "d")
    assert said == ["a", "b", "c", "d"]


def test_points_that_wait_too_long_are_read_where_they_are_made(
    trainer, monkeypatch
):
    module = sys.modules[WandbLogger.__module__]
    monkeypatch.setattr(module, "GATHER_SECS", 3600.0)
    monkeypatch.setattr(module, "MOST_UNREAD_POINTS", 3)
    handed_over = []
    send = WandbLogger._send

    def keep(self, function, updates, numbers, *others):
        handed_over.append(type(numbers))
        return send(self, function, updates, numbers, *others)

    logger = WandbLogger(run=Run(), every=Every(1, "updates"))
    with monkeypatch.context() as patch:
        patch.setattr(WandbLogger, "_send", keep)
        fit(trainer, logger)
    # The first three are in the thread's hands, or wait for it.
    assert handed_over[:3] == [Logs] * 3
    assert handed_over[4:] == [dict] * 2


def test_best_of_training_is_found_where_it_is_asked_for(trainer):
    rows, run = [], Run()
    run.log = rows.append
    logger = WandbLogger(
        run=run, every=Every(1, "updates"), best={"mae": "min"}
    )
    fit(trainer, logger)
    assert len(rows) == 6
    assert run.summary["best_mae"] == min(row["mae"] for row in rows)


def test_checkpoint_leaves_no_point_waiting(tmp_path, monkeypatch):
    module = sys.modules[WandbLogger.__module__]
    monkeypatch.setattr(module, "GATHER_SECS", 3600.0)
    has_come = threading.Event()

    class WaitsForThePoint(Callback):
        """Called before the logger, thus after a checkpoint's update."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                self.has_seen_it = has_come.wait(600)

    # The first points are not gathered, as the start of the run was awaited.
    run = Run(log=lambda row: row["updates"] == 4 and has_come.set())
    wait = WaitsForThePoint()
    fit(
        make_trainer(),
        wait,
        Checkpoint(tmp_path / "run", every=Every(4, "updates")),
        WandbLogger(run=run, every=Every(1, "updates")),
    )
    assert wait.has_seen_it


def test_run_that_fails_midway_is_one_warning(trainer, tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)

    class Finish(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                run.finish()
            time.sleep(0.05)

    logger = WandbLogger(run=run, every=Every(1, "updates"))
    before = trainer.progress.updates
    with pytest.warns(RuntimeWarning, match="did not take every") as caught:
        fit(trainer, logger, Finish())
    assert len(caught) == 1
    assert trainer.progress.updates == before + 6


def test_nothing_is_said_where_nothing_is_wrong(trainer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(trainer, make_logger(tmp_path))


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

"""Claims about MLflowLogger: one run for a training, whatever befalls it."""

import time

import pytest
from faulty import Fail
from logged_points import make_mlflow_logger, mlflow_runs, read_mlflow
from pointed import X, Y, fit, make_trainer

from accumtrainer import Accumulation, Every
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.any_backend

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")


def updates_of(folder, name):
    return [w.updates for w in read_mlflow(folder) if w.name == name]


def status_of(folder):
    _, (run,) = mlflow_runs(folder)
    return run.info.status


def test_run_says_what_was_configured(tmp_path):
    fit(make_mlflow_logger(tmp_path, run_name="first"))
    _, (run,) = mlflow_runs(tmp_path)
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["backend"] == BACKEND
    assert run.data.params["accumulation.steps"] == "2"
    assert mlflow.active_run() is None


def test_run_takes_more_parameters_than_a_server_takes_at_once(tmp_path):
    steps = {epoch: 1 + epoch % 2 for epoch in range(120)}
    trainer = make_trainer(accumulation=Accumulation(steps=steps))
    fit(make_mlflow_logger(tmp_path), trainer=trainer)
    _, (run,) = mlflow_runs(tmp_path)
    for epoch in (0, 119):
        received = run.data.params[f"accumulation.steps.{epoch}"]
        assert received == str(steps[epoch])


def test_points_have_the_moments_they_were_made_at(tmp_path):
    begun = time.time()
    fit(make_mlflow_logger(tmp_path))
    ended = time.time()
    client, (run,) = mlflow_runs(tmp_path)
    (metric,) = client.get_metric_history(run.info.run_id, "loss")
    assert begun - 1 < metric.timestamp / 1000 < ended + 1


def test_experiment_is_made_once_and_found_again(tmp_path):
    for _ in range(2):
        fit(make_mlflow_logger(tmp_path, experiment="digits"))
    client, runs = mlflow_runs(tmp_path)
    names = {client.get_experiment(run.info.experiment_id).name for run in runs}
    assert (len(runs), names) == (2, {"digits"})


def test_second_fit_continues_the_run(tmp_path):
    logger, trainer = make_mlflow_logger(tmp_path), make_trainer()
    fit(logger, trainer=trainer)
    fit(logger, trainer=trainer)
    assert updates_of(tmp_path, "loss") == [6, 10, 12]
    fit(logger)  # another training
    assert len(mlflow_runs(tmp_path)[1]) == 2


def test_active_run_gets_the_points_and_is_left_active(tmp_path):
    logger = make_mlflow_logger(tmp_path)
    with mlflow.start_run() as run:
        fit(logger)
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert updates_of(tmp_path, "loss") == [6]


def test_run_that_is_active_for_a_second_fit_says_what_was_configured(tmp_path):
    logger, trainer = make_mlflow_logger(tmp_path), make_trainer()
    fit(logger, trainer=trainer)
    with mlflow.start_run():
        fit(logger, trainer=trainer)
    for run in mlflow_runs(tmp_path)[1]:
        assert run.data.params["backend"] == BACKEND


def test_what_a_callback_logs_besides_goes_to_the_run(tmp_path):
    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            mlflow.log_metric("mine", 7.0, step=6)

    fit(make_mlflow_logger(tmp_path), Log())
    assert updates_of(tmp_path, "mine") == [6]


@pytest.mark.parametrize("saved_at", [2, 5])
def test_resume_continues_the_run_and_repeats_no_point(tmp_path, saved_at):
    def train(*others, **options):
        checkpoint = Checkpoint(
            tmp_path / "run", every=Every(saved_at, "updates")
        )
        fit(
            make_mlflow_logger(tmp_path, Every(3, "updates")),
            *others,
            checkpoint,
            epochs=2,
            validation_data=(X, Y),
            **options,
        )

    with pytest.raises(RuntimeError, match="fire"):
        train(Fail(RuntimeError("fire"), update=2, epoch=1))
    assert status_of(tmp_path) == "FAILED"
    train(resume_from="auto")
    assert status_of(tmp_path) == "FINISHED"
    assert updates_of(tmp_path, "loss") == [3, 6, 8, 9, 12]
    assert updates_of(tmp_path, "val_loss") == [6, 12]


def test_failure_is_one_warning_and_training_goes_on(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("the server is gone")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fail)
    logger = make_mlflow_logger(tmp_path, Every(1, "updates"))
    with pytest.warns(RuntimeWarning, match="server is gone") as caught:
        trainer = fit(logger)
    assert len(caught) == 1
    assert trainer.progress.updates == 6


@pytest.mark.parametrize("name", ["a//b", "../a", "/a", "a" * 300, "top@5"])
def test_name_that_mlflow_refuses_costs_no_other_number(tmp_path, name):
    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs[name] = 0.5

    fit(Writes(), make_mlflow_logger(tmp_path))
    _, (run,) = mlflow_runs(tmp_path)
    assert updates_of(tmp_path, "loss") == [6]
    assert 0.5 in run.data.metrics.values()


def test_unknown_option_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="Received: runname"):
        fit(make_mlflow_logger(tmp_path, runname="first"))

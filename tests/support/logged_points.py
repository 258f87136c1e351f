"""Reads back what each of the shipped loggers has written."""

import json
import os
import tempfile
from typing import NamedTuple

import pytest
from wandb_file import written_runs

from accumtrainer import callbacks

_trackio_folder = tempfile.TemporaryDirectory(prefix="trackio-")
# Trackio looks once where to write, when it is imported.
os.environ["TRACKIO_DIR"] = _trackio_folder.name


class Written(NamedTuple):
    """One number that a logger has written, and where it stands."""

    name: str
    updates: int
    value: object


def read_run_log(folder):
    """Read `a.jsonl` in a folder."""
    lines = (folder / "a.jsonl").read_text().splitlines()
    return _of_points(map(json.loads, lines))


def read_wandb(folder):
    """Read the only run of W&B below a folder."""
    (run,) = written_runs(folder)
    return _of_points(run.history)


def read_tensorboard(folder):
    """Read a folder as TensorBoard shows it."""
    from tensorboard.backend.event_processing import event_accumulator

    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    shown = event_accumulator.EventAccumulator(str(folder), everything)
    shown.Reload()
    return [
        Written(tag, event.step, event.value)
        for tag in shown.Tags()["scalars"]
        for event in shown.Scalars(tag)
        if tag != "updates"
    ]


def make_mlflow_logger(folder, every=None, **options):
    """Make a logger whose runs lie in a folder; skip without MLflow."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    # The one store that needs no database, which takes seconds to make.
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri((folder / "mlruns").as_uri())
    return callbacks.MLflowLogger(every=every, close_secs=600, **options)


def mlflow_runs(folder):
    """List the runs in a folder, the first one first."""
    import mlflow

    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    experiments = [e.experiment_id for e in client.search_experiments()]
    return client, client.search_runs(
        experiments, order_by=["attributes.start_time"]
    )


def read_mlflow(folder):
    """Read the only run of MLflow in a folder."""
    client, (run,) = mlflow_runs(folder)
    return [
        Written(name, metric.step, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
        if name != "updates"
    ]


def make_trackio_logger(folder, every=None, project=None, **options):
    """Make a logger of a folder's project or another; skip without Trackio."""
    pytest.importorskip("trackio", reason="Trackio is not installed")
    return callbacks.TrackioLogger(
        project or trackio_project(folder), every=every, **options
    )


def trackio_project(folder):
    """Name the project of a folder."""
    return "-".join(folder.parts[-2:])


def trackio_rows(project):
    """List the runs of a project, each with its rows, the first run first."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    return [
        (run, SQLiteStorage.get_logs(project, run.name, run_id=run.id))
        for run in trackio.Api().runs(project)
    ]


def read_trackio(folder):
    """Read the only run of a folder's project."""
    ((_, rows),) = trackio_rows(trackio_project(folder))
    return [
        Written(name, row["step"], value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "timestamp", "updates")
    ]


def _of_points(points):
    return [
        Written(name, point["updates"], value)
        for point in points
        for name, value in point.items()
        if name != "updates"
    ]

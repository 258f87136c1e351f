"""A logger that sends points to MLflow."""

import re
import time
from collections.abc import Callable
from typing import Any

from accumtrainer import Every
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.scalars import as_scalars
from accumtrainer.callbacks.tracker import Tracker

MOST_CHARACTERS = 500
"""What every server of MLflow takes of a text."""

UNNAMEABLE = re.compile(r"[^\w\-. :/]")
"""What MLflow does not allow in a name."""

NO_FILE = re.compile(r"(?<![^/])\.{0,2}(?![^/])")
"""Parts between the slashes of a name that would be no names of files."""

LONGEST_NAME = 250


class MLflowLogger(Tracker):
    """Send points to MLflow; training does not wait for it.

    Points are handed to a thread of their own. Each number is a metric of that
    name, over updates; where a metric has several values, each is one of its
    own, as `per_class/0`. Text that other callbacks put into the logs is left
    out. The run's parameters hold what was configured: accumulation, loss
    scale, optimizer, schedule, model, plan, backend and versions.

    Where MLflow writes to is set as always, by `mlflow.set_tracking_uri` or in
    the environment. While training runs, the run is MLflow's active one: what
    is logged besides, by `mlflow.log_metric` for example, goes there too.

    A run that was started here is ended when training ends, as failed after an
    error; a second `fit` continues it. A run that was active already gets the
    points and is left active. After a resume the same run goes on, and points
    that it has already are not sent again. If MLflow fails while training runs,
    a warning says so once and training goes on.

    Needs MLflow: `pip install 'accumtrainer[mlflow]'`.

    Args:
        experiment: name of the experiment, made if missing; default MLflow's
            own.
        every: how often to send a point; default every 10 updates.
        close_secs: seconds that MLflow may take for what is left when training
            ends.
        **run_options: what `mlflow.start_run` takes besides.

    Raises:
        TypeError: `every` is no `Every`, or `mlflow.start_run` has no option of
            this name; the latter is raised when training begins.
        ImportError: MLflow is not installed; raised when training begins.

    Examples:
        >>> logger = MLflowLogger("digits", run_name="first")
        >>> logger.every
        Every(n=10, unit='updates')
    """

    tool = "MLflow"
    starter = "mlflow.start_run"
    _run_id: str | None

    def __init__(
        self,
        experiment: str | None = None,
        *,
        every: Every | None = None,
        close_secs: float = 60.0,
        **run_options: Any,
    ):
        super().__init__(every, run_options, close_secs)
        self.experiment = experiment
        self._is_started_here = False
        self._client: Any = None
        # By name, the updates that a resumed run has metrics of.
        self._present: dict[str, set[int]] = {}

    @property
    def run_id(self) -> str | None:
        """The id of the run in MLflow; `None` before the first update."""
        return self._run_id

    def get_starter(self) -> Callable[..., Any]:
        start_run: Callable[..., Any] = import_mlflow().start_run
        return start_run

    def send_point(self, updates: int, numbers: dict[str, Any]) -> None:
        self._send(self._log_metrics, updates, numbers, time.time())

    def start(self) -> None:
        """Start the run, or go on with it; errors of the user come up here."""
        mlflow = import_mlflow()
        self._present = {}
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._is_started_here = active is None
        is_new = self._run_id is None
        if active is not None:
            is_new = active.info.run_id != self._run_id
            self._run_id = active.info.run_id
        elif is_new:
            self._run_id = mlflow.start_run(**self._run_options()).info.run_id
        else:
            mlflow.start_run(run_id=self._run_id)
        self._background = Background("accumtrainer-mlflow")
        if is_new:
            self._background.do(self._log_params, self._description())

    def finish(self) -> None:
        status = "FINISHED" if self._failure() is None else "FAILED"
        self._end_thread(lambda: None)
        if self._is_started_here:
            import_mlflow().end_run(status)

    def _run_options(self) -> dict[str, Any]:
        if self.experiment is None:
            return self._options
        found = self._client.get_experiment_by_name(self.experiment)
        experiment_id = (
            self._client.create_experiment(self.experiment)
            if found is None
            else found.experiment_id
        )
        return {"experiment_id": experiment_id} | self._options

    # Called in the thread.

    def _log_params(self, description: dict[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(_nameable(name), str(value)[:MOST_CHARACTERS])
            for name, value in _flat(description).items()
        ]
        self._client.log_batch(self._run_id, params=params)

    def _log_metrics(
        self, updates: int, numbers: dict[str, Any], seconds: float
    ) -> None:
        from mlflow.entities import Metric

        milliseconds = round(seconds * 1000)
        metrics = [
            Metric(_nameable(name), value, milliseconds, updates)
            for name, value in as_scalars(numbers).items()
        ]
        if self._is_resumed:
            metrics = [m for m in metrics if updates not in self._has(m.key)]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _has(self, name: str) -> set[int]:
        """Ask once at which updates the run had a metric before the resume."""
        if name not in self._present:
            history = self._client.get_metric_history(self._run_id, name)
            self._present[name] = {metric.step for metric in history}
        return self._present[name]


def import_mlflow() -> Any:
    """Import MLflow where it is used.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import mlflow
    except ImportError as error:
        raise ImportError(
            "MLflowLogger needs MLflow, which is not installed. "
            "Run: pip install 'accumtrainer[mlflow]'"
        ) from error
    return mlflow


def _nameable(name: str) -> str:
    """Change a name to one that MLflow takes, as it refuses points whole.

    Examples:
        >>> _nameable("top@5//"), _nameable("../a")
        ('top_5/_/_', '_/a')
    """
    return NO_FILE.sub("_", UNNAMEABLE.sub("_", name))[:LONGEST_NAME]


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Give the entries of dicts in a dict names of their own."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat

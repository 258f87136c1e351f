"""A logger that sends points to MLflow."""

import inspect
import re
import sys
import time
import warnings
from typing import Any

from accumtrainer import Every, Logger
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.description import describe_training
from accumtrainer.callbacks.scalars import as_scalars

MOST_UNREAD_POINTS = 200
"""Points that may wait with their numbers on the device."""

MOST_PARAMS = 100
MOST_CHARACTERS = 500
"""What MLflow takes at once, and what every server takes of a text."""

UNNAMEABLE = re.compile(r"[^\w\-. :/]")
"""What MLflow does not allow in a name."""

REFUSED = "MLflow did not take everything ({reason}). Training goes on."
TOO_SLOW = (
    "MLflow takes points more slowly than they come, and some were left out. "
    "Training goes on. A larger `every` makes fewer points."
)
UNFINISHED = (
    "MLflow did not take the last points within close_secs={secs:g} seconds; "
    "they are left out. Give it more."
)


class MLflowLogger(Logger):
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

    def __init__(
        self,
        experiment: str | None = None,
        *,
        every: Every | None = None,
        close_secs: float = 60.0,
        **run_options: Any,
    ):
        super().__init__(every)
        self.experiment = experiment
        self.close_secs = close_secs
        self._options = run_options
        self._run_id: str | None = None
        self._last_updates = -1
        self._is_resumed = False
        self._is_started_here = False
        self._client: Any = None
        self._background: Background | None = None
        self._has_warned = False
        # By name, the updates that a resumed run has metrics of.
        self._present: dict[str, set[int]] = {}

    @property
    def run_id(self) -> str | None:
        """The id of the run in MLflow; `None` before the first update."""
        return self._run_id

    def open(self) -> None:
        mlflow = import_mlflow()
        known = inspect.signature(mlflow.start_run).parameters
        unknown = sorted(set(self._options) - set(known))
        if unknown:
            raise TypeError(
                "MLflowLogger must get its own options and those of "
                f"mlflow.start_run. Received: {', '.join(unknown)}. "
                f"mlflow.start_run has {', '.join(known)}."
            )
        self._outer_error = sys.exc_info()[1]
        self._has_warned = False
        self._present = {}
        # A resume amid an epoch says already before which run it is, and then
        # the Trainer has not been put back yet.
        is_behind = self.trainer.progress.updates < self._last_updates
        if is_behind and not self._is_resumed:
            self._run_id, self._last_updates = None, -1  # another training

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        # Not earlier: a resume says in between which run it is.
        if self._is_open and self._background is None:
            self._start()

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        if self._background is None:
            self._start()  # the last point of a run that has nothing left
        assert self._background is not None
        self._last_updates = updates
        if self._background.waiting >= MOST_UNREAD_POINTS:
            numbers = dict(numbers.items())
        milliseconds = round(time.time() * 1000)
        if not self._background.do(
            self._log_metrics, updates, numbers, milliseconds
        ):
            self._warn_once(TOO_SLOW)
        self._warn_of_failures(self._background)

    def close(self) -> None:
        if self._background is not None:
            self._finish()
        self._is_resumed = False

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        return state | {
            "run_id": self._run_id,
            "last_updates": self._last_updates,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._run_id = state["run_id"]
        self._last_updates = state["last_updates"]
        self._is_resumed = True

    def _start(self) -> None:
        """Start the run, or go on with it; errors of the user come up here."""
        mlflow = import_mlflow()
        self._client = mlflow.MlflowClient()
        active = mlflow.active_run()
        self._is_started_here = active is None
        is_new = self._run_id is None
        if active is not None:
            self._run_id = active.info.run_id
        elif is_new:
            self._run_id = mlflow.start_run(**self._run_options()).info.run_id
        else:
            mlflow.start_run(run_id=self._run_id)
        self._background = Background("accumtrainer-mlflow")
        if is_new:
            self._background.do(
                self._log_params,
                describe_training(self.trainer, self.params)
                | {"every": str(self.every)},
            )

    def _finish(self) -> None:
        assert self._background is not None
        background, self._background = self._background, None
        error = sys.exc_info()[1]
        status = "FINISHED" if error is self._outer_error else "FAILED"
        is_done = background.finish(self.close_secs, lambda: None)
        self._warn_of_failures(background)
        if not is_done:
            self._warn_once(UNFINISHED.format(secs=self.close_secs))
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
        for begin in range(0, len(params), MOST_PARAMS):
            some = params[begin : begin + MOST_PARAMS]
            self._client.log_batch(self._run_id, params=some)

    def _log_metrics(
        self, updates: int, numbers: dict[str, Any], milliseconds: int
    ) -> None:
        from mlflow.entities import Metric

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

    # What goes wrong.

    def _warn_of_failures(self, background: Background) -> None:
        if background.failures:
            failure = background.failures[0]
            reason = str(failure) or type(failure).__name__
            self._warn_once(REFUSED.format(reason=reason))

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


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
    return UNNAMEABLE.sub("_", name)


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Give the entries of dicts in a dict names of their own."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat

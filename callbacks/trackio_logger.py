"""A logger that sends points to Trackio."""

from collections.abc import Callable
from typing import Any

from accumtrainer import Every, Histogram, Image, Table, Text
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.scalars import as_scalars
from accumtrainer.callbacks.tracker import Tracker

ANOTHER_RUN = (
    "name must be that of one run, as Trackio finds runs by their names. "
    "Received: {name!r} in {project!r}, which is also the name of a newer run "
    "than the one before the checkpoint. Give one of them another name: "
    "[run.rename('newer') for run in trackio.Api().runs({project!r}) if "
    "run.id == {received!r}]"
)


class TrackioLogger(Tracker):
    """Send points to Trackio, which keeps them in a folder of this machine.

    Points are handed to a thread of their own. Each number is a metric of that
    name, over updates; where a metric has several values, each is one of its
    own, as `per_class/0`. Text that other callbacks put into the logs is left
    out. The run's config holds what was configured: accumulation, loss scale,
    optimizer, schedule, model, plan, backend and versions; keys that the user
    has set stay.

    Where Trackio writes to is set in the environment, by `TRACKIO_DIR` before
    it is imported. `trackio show` shows the runs in a browser. While training
    runs, the run is Trackio's active one: what is logged besides, by
    `trackio.log`, goes there too.

    A run that was started here is finished when training ends; a second `fit`
    continues it. A run that was active already gets the points and is left
    active. After a resume the same run goes on, and points that it has already
    are not sent again; where they lie elsewhere, on a Space, they are. If
    Trackio fails while training runs, a warning says so, and training goes on.

    Needs Trackio: `pip install 'accumtrainer[trackio]'`.

    Args:
        project: name of the project.
        every: how often to send a point; default every 10 updates, and once
            an epoch at least.
        close_secs: seconds that Trackio may take for what is left when
            training ends.
        **init_options: what `trackio.init` takes besides.

    Raises:
        TypeError: `every` is no `Every`, or `trackio.init` has no option of
            this name; the latter is raised when training begins.
        ValueError: a resumed run cannot be told from a newer one.
        ImportError: Trackio is not installed; raised when training begins.

    Examples:
        >>> logger = TrackioLogger("digits", name="first")
        >>> logger.every
        Every(n=10, unit='updates')
    """

    tool = "Trackio"
    starter = "trackio.init"
    _run_id: str | None

    def __init__(
        self,
        project: str,
        *,
        every: Every | None = None,
        close_secs: float = 60.0,
        **init_options: Any,
    ):
        super().__init__(every, init_options, close_secs)
        self.project = project
        self._name: str | None = None
        self._run: Any = None
        self._is_started_here = False
        # What a resumed run has already, by updates.
        self._present: dict[int, set[str]] = {}

    @property
    def run(self) -> Any:
        """The `trackio.Run`; `None` unless training runs."""
        return self._run

    def get_starter(self) -> Callable[..., Any]:
        init: Callable[..., Any] = import_trackio().init
        return init

    def start(self) -> None:
        from trackio.context_vars import current_run

        self._present = {}
        active = current_run.get()
        self._is_started_here = active is None
        self._run = self._init() if active is None else active
        if self._is_resumed and self._run.id == self._run_id:
            self._present = _present(self._run)
        self._run_id, self._name = self._run.id, self._run.name
        self._background = Background("accumtrainer-trackio")

    def send_point(self, updates: int, numbers: dict[str, Any]) -> None:
        self._send(self._log_numbers, updates, numbers)

    def write_media(self, updates: int, name: str, value: Any) -> None:
        self._send(self._log_media, updates, name, value)

    def finish(self) -> None:
        self._end_thread(lambda: None)
        if self._is_started_here:
            import_trackio().finish()
        self._run = None

    def get_state(self) -> dict[str, Any]:
        return super().get_state() | {"name": self._name}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._name = state["name"]

    def _init(self) -> Any:
        trackio = import_trackio()
        config = self._description() | (self._options.get("config") or {})
        options = self._options | {"config": config}
        if self._run_id is None:
            return trackio.init(self.project, **options)
        options |= {"name": self._name, "resume": "allow"}
        run = trackio.init(self.project, **options)
        is_another = run.id != self._run_id
        if is_another and self._run_id in _known_runs(self.project):
            trackio.finish()
            raise ValueError(
                ANOTHER_RUN.format(
                    name=self._name, project=self.project, received=run.id
                )
            )
        return run

    # Called in the thread.

    def _log_numbers(self, updates: int, numbers: dict[str, Any]) -> None:
        present = self._present.get(updates, set())
        new = {
            name: value
            for name, value in as_scalars(numbers).items()
            if name not in present
        }
        if new:
            self._run.log(new, step=updates)

    def _log_media(self, updates: int, name: str, value: Any) -> None:
        if name not in self._present.get(updates, set()):
            self._run.log({name: _as_trackio(value)}, step=updates)


def import_trackio() -> Any:
    """Import Trackio where it is used.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import trackio
    except ImportError as error:
        raise ImportError(
            "TrackioLogger needs Trackio, which is not installed. "
            "Run: pip install 'accumtrainer[trackio]'"
        ) from error
    return trackio


def _known_runs(project: str) -> set[str]:
    """List the ids of a project's runs that lie on this machine."""
    try:
        return {run.id for run in import_trackio().Api().runs(project)}
    except ValueError:  # there is no such project
        return set()


def _present(run: Any) -> dict[int, set[str]]:
    """List by updates what a run has that lies on this machine."""
    from trackio.sqlite_storage import SQLiteStorage

    present: dict[int, set[str]] = {}
    for row in SQLiteStorage.get_logs(run.project, run.name, run_id=run.id):
        present.setdefault(row["step"], set()).update(row)
    return present


def _as_trackio(value: Any) -> Any:
    """Make Trackio's object of a value of ours; others stay as they are."""
    trackio = import_trackio()
    if isinstance(value, Image):
        pixels = value.pixels
        is_gray = pixels.shape[-1] == 1
        return trackio.Image(
            pixels.repeat(3, axis=-1) if is_gray else pixels,
            caption=value.caption or None,
        )
    if isinstance(value, Histogram):
        return trackio.Histogram(value.values)
    if isinstance(value, Text):
        # Indented lines are shown as they are.
        lines = value.text.splitlines()
        return trackio.Markdown("\n".join(f"    {line}" for line in lines))
    if isinstance(value, Table):
        rows = [[_as_trackio(cell) for cell in row] for row in value.rows]
        return trackio.Table(columns=list(value.columns), data=rows)
    return value

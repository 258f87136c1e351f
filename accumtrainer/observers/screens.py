"""Where lines of progress go: a terminal, a notebook or a file."""

import abc
import math
import time
from collections.abc import Callable
from typing import Any

from rich import console as rich_console
from rich import live, progress_bar, table, text

from accumtrainer import notebook
from accumtrainer.observers.progress_line import Line

REDRAW_SECS = 0.1
FIRST_SILENCE_SECS = 10.0
LONGEST_SILENCE_SECS = 60.0
MOST_DOUBLINGS = 10

BAR_WIDTH = 30
SMALLEST_BAR_WIDTH = 6


class Screen(abc.ABC):
    """Shows one line at a time, until the next one opens.

    Args:
        console: `rich.console.Console` to write to.
        clock: function that returns seconds, which moves a pulse.
    """

    is_live = True
    """Whether a line that is drawn replaces the one before."""

    def __init__(self, console: Any, clock: Callable[[], float]):
        self._console = console
        self._clock = clock

    @property
    def separator(self) -> str:
        """What stands between the parts of a line."""
        return " - " if self._console.options.ascii_only else " · "

    def secs_to_next(self, drawn: int) -> float:
        """Return seconds until a line is due again.

        Args:
            drawn: lines that were due so far in this training.
        """
        return REDRAW_SECS

    @abc.abstractmethod
    def open(self) -> None:
        """Begin a line; one that was left open by an error stays."""

    @abc.abstractmethod
    def draw(self, line: Line) -> None:
        """Show a line while it is not finished."""

    @abc.abstractmethod
    def close(self, line: Line) -> None:
        """Show a line for good."""


class Terminal(Screen):
    """Redraws a line with a bar in its place."""

    def __init__(self, console: Any, clock: Callable[[], float]):
        super().__init__(console, clock)
        self._live: live.Live | None = None

    def open(self) -> None:
        self._stop()
        self._live = live.Live(
            console=self._console, auto_refresh=False, transient=True
        )
        self._live.start()

    def draw(self, line: Line) -> None:
        if self._live is not None:
            self._live.update(self._grid(line), refresh=True)

    def close(self, line: Line) -> None:
        self._stop()
        self._print(line)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: Line) -> None:
        if self._bar_width(line) >= SMALLEST_BAR_WIDTH:
            self._console.print(self._grid(line))
        else:
            _print_words(self._console, line, self.separator)

    def _bar_width(self, line: Line) -> int:
        words = f"{line.heading}  {line.body(self.separator)}"
        return min(BAR_WIDTH, self._console.width - len(words))

    def _grid(self, line: Line) -> Any:
        cells = [text.Text(line.heading)]
        bar_width = self._bar_width(line)
        if bar_width >= SMALLEST_BAR_WIDTH:
            cells.append(make_bar(line, width=bar_width, clock=self._clock))
        body = text.Text(line.body(self.separator))
        body.truncate(
            max(1, self._console.width - len(line.heading) - 1),
            overflow="crop" if self._console.options.ascii_only else "ellipsis",
        )
        grid = table.Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        for _ in (*cells, body):
            grid.add_column(no_wrap=True)
        grid.add_row(*cells, body)
        return grid


class LogFile(Screen):
    """Writes lines below each other, one whenever it was silent for long.

    The silence grows with the training, from ten seconds to a minute: a short
    one is told at its ends only, and one of days does not fill the file.

    Args:
        has_bar: whether the lines have a bar.
        is_told_within: whether there are lines between the first and the last.
    """

    is_live = False

    def __init__(
        self,
        console: Any,
        clock: Callable[[], float],
        *,
        has_bar: bool,
        is_told_within: bool,
    ):
        super().__init__(console, clock)
        self._terminal = Terminal(console, clock) if has_bar else None
        self._is_told_within = is_told_within

    def secs_to_next(self, drawn: int) -> float:
        if not self._is_told_within:
            return math.inf
        secs = FIRST_SILENCE_SECS * 2 ** min(drawn, MOST_DOUBLINGS)
        return min(secs, LONGEST_SILENCE_SECS)

    def open(self) -> None:
        pass

    def draw(self, line: Line) -> None:
        self.close(line)

    def close(self, line: Line) -> None:
        if self._terminal is None:
            _print_words(self._console, line, self.separator)
        else:
            self._terminal.close(line)


class Notebook(Screen):
    """Redraws a line with a bar in the output of a cell, without widgets.

    Args:
        display: function like `IPython.display.display`, which it is by
            default.
    """

    def __init__(
        self,
        console: Any,
        clock: Callable[[], float],
        display: Callable[..., Any] | None = None,
    ):
        super().__init__(console, clock)
        self._display = display or _display_of_ipython()
        self._shown: Any = None

    def open(self) -> None:
        self._shown = None

    def draw(self, line: Line) -> None:
        body = line.body(self.separator)
        content = {
            "text/plain": f"{line.heading}{self.separator}{body}",
            "text/html": notebook.bar(
                line.heading, line.finished, line.total, body
            ),
        }
        if self._shown is None:
            self._shown = self._display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)

    def close(self, line: Line) -> None:
        self.draw(line)
        self._shown = None


def choose_screen(
    mode: Any,
    console: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> Screen:
    """Choose where lines go, by the mode of a progress bar.

    Args:
        mode: 1, 2 or `"auto"`, as a `ProgressBar` takes it.
        console: `rich.console.Console`. Standard output if `None`.
        clock: function that returns seconds.
    """
    console = console or rich_console.Console()
    if mode != 2 and console.is_jupyter:
        return Notebook(console, clock)
    if mode != 2 and console.is_interactive:
        return Terminal(console, clock)
    if console.is_jupyter:
        # As plain text, of which a notebook makes one output of many lines.
        console = rich_console.Console(force_jupyter=False)
    return LogFile(console, clock, has_bar=mode == 1, is_told_within=mode != 2)


def make_bar(line: Line, *, width: int, clock: Callable[[], float]) -> Any:
    """Make the bar of a line, a moving pulse where the end is unknown.

    Args:
        width: number of characters.
        clock: function that returns seconds, which moves the pulse.

    Returns:
        Something for rich to print.
    """
    is_unknown = not line.total or line.finished > line.total
    return progress_bar.ProgressBar(
        total=None if is_unknown else line.total,
        completed=line.finished,
        width=width,
        animation_time=clock(),
    )


def _print_words(console: Any, line: Line, separator: str) -> None:
    words = f"{line.heading}{separator}{line.body(separator)}"
    console.print(text.Text(words), soft_wrap=True)


def _display_of_ipython() -> Callable[..., Any]:
    from IPython import display  # there where a notebook runs

    return display.display

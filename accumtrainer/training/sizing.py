"""How large micro-batches are: as asked for, or as large as fit into memory."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from accumtrainer import errors
from accumtrainer.config import Accumulation
from accumtrainer.data.batches import Window, leaves
from accumtrainer.diagnosis.device import measure_peak_memory
from accumtrainer.steps.backend import Backend
from accumtrainer.steps.memory import (
    Backup,
    largest_that_fits,
    sizes_of,
    smaller_size,
)
from accumtrainer.steps.plan import Plan
from accumtrainer.steps.report import Report
from accumtrainer.steps.step import Step
from accumtrainer.window.variables import WindowVariables

# Leaves a loader batch whole until it is known what fits.
ANY_SIZE = 2**62


def make_sizing(
    accumulation: Accumulation, backend: Backend
) -> "GivenSize | AutoSize":
    """Make what says how large micro-batches are.

    Returns:
        `GivenSize` or `AutoSize`.
    """
    size = accumulation.micro_batch_size
    if size != "auto":
        return GivenSize(
            None if size is None else size * backend.replicas.count
        )
    limit_bytes = accumulation.memory_limit_bytes
    if limit_bytes is None:
        limit_bytes = backend.memory_limit_bytes()
    return AutoSize(backend, limit_bytes)


@dataclass(frozen=True, slots=True)
class GivenSize:
    """Leave micro-batches as large as they were asked for.

    Args:
        rows_per_pass: samples that all replicas together run at a time; `None`
            where loader batches are micro-batches, whatever their size.
    """

    rows_per_pass: int | None

    is_undecided = False
    """Whether a size has yet to be chosen."""

    may_cut = False
    """Whether a window may come to be of more micro-batches."""

    def cut(self, window: Window) -> Window:
        """Return a window as it will run: as it is."""
        return window

    def trying(
        self, window: Window, variables: WindowVariables
    ) -> AbstractContextManager[Callable[[Report], Report]]:
        """Make a scope to run a window in, and what is to note its report."""
        del window, variables
        return contextlib.nullcontext(_as_it_is)

    def complete(self, plan: Plan) -> Plan:
        """Return a `Plan` with what was chosen here: nothing."""
        return plan


class AutoSize:
    """Choose a size that fits into memory, and a smaller one if it does not.

    Sizes that divide a window evenly are preferred, see `smaller_size`.

    Args:
        limit_bytes: most memory of a device that an update may take.
    """

    may_cut = True

    def __init__(self, backend: Backend, limit_bytes: Any):
        self._backend = backend
        self._limit_bytes = limit_bytes
        self._size: int = 0  # until it is chosen
        self._peak_bytes: int | None = None
        self._measured: tuple[int | None, Any] = None, None
        self._fitted: set[tuple] = set()

    @property
    def is_undecided(self) -> bool:
        """Whether a size has yet to be chosen."""
        return not self._size

    @property
    def rows_per_pass(self) -> int:
        """Samples that all replicas together run at a time."""
        return (self._size or ANY_SIZE) * self._backend.replicas.count

    def choose(self, window: Window, step: Step) -> None:
        """Choose the largest micro-batches that are predicted to fit.

        Args:
            window: `Window` like those to come.
            step: which predicts.
        """
        size, self._peak_bytes = largest_that_fits(
            sizes_of(self._samples_per_replica(window)),
            self._limit_bytes,
            lambda size: self._foresee(size, window, step),
        )
        if self._backend.replicas.processes > 1:
            size = int(self._backend.replicas.gather([size])[:, 0].min())
        self._size = size

    def _foresee(self, size: int, window: Window, step: Step) -> int:
        """Predict what a size takes: too much, where trying it already does."""
        cut = window.recut(size * self._backend.replicas.count)
        try:
            return step.peak_bytes(cut)
        except Exception as error:
            if size == 1 or not self._backend.is_out_of_memory(error):
                raise
        return sys.maxsize

    def cut(self, window: Window) -> Window:
        """Return a window as it will run."""
        return window.recut(self.rows_per_pass)

    @contextlib.contextmanager
    def trying(
        self, window: Window, variables: WindowVariables
    ) -> Iterator[Callable[[Report], Report]]:
        """Make a scope to run a window in, and what is to note its report.

        Where memory runs out inside it, everything is put back and the window
        has no report: it is to be cut anew.

        Args:
            window: as it was cut.
        """
        shapes = _shapes(window)
        if shapes in self._fitted:
            yield _as_it_is
            return
        self._backend.write_back()
        backup = Backup(variables.all_variables)
        try:
            yield _having_run
        except Exception as error:
            is_last = self._size == 1 or self._backend.replicas.processes > 1
            if is_last or not self._backend.is_out_of_memory(error):
                raise
            self._backend.forget()
            backup.put_back()
            self._shrink(window)
        else:
            self._fitted.add(shapes)
            if self._measured == (None, None):
                self._measured = measure_peak_memory()

    def _shrink(self, window: Window) -> None:
        """Go on in smaller micro-batches than those of a window."""
        before = self._size
        self._size = smaller_size(before, self._samples_per_replica(window))
        self._peak_bytes = None
        self._measured = None, None
        warnings.warn(
            errors.TOO_LARGE.format(before=before, after=self._size),
            stacklevel=2,
        )

    def _samples_per_replica(self, window: Window) -> int:
        return -(-window.samples // self._backend.replicas.count)

    def complete(self, plan: Plan) -> Plan:
        """Return a `Plan` with what was chosen here."""
        measured_peak_bytes, measured_of = self._measured
        return replace(
            plan,
            micro_batch_size=self._size or None,
            peak_bytes=self._peak_bytes,
            limit_bytes=self._limit_bytes,
            measured_peak_bytes=measured_peak_bytes,
            measured_of=measured_of,
        )


def _shapes(window: Window) -> tuple:
    """Return what must be equal for windows to take as much memory."""
    return tuple(
        # Text is of one type, however long the longest of a batch is.
        (leaf.shape, leaf.dtype.char)
        for leaf in leaves((window.stacked, window.parts))
    )


def _as_it_is(report: Report) -> Report:
    return report


def _having_run(report: Report) -> Report:
    report.wait()  # since errors may come late
    return report

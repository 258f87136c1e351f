"""Finds out about windows without training on them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from accumtrainer import errors
from accumtrainer.data.batches import Window
from accumtrainer.diagnosis.bare_losses import check_bare_losses
from accumtrainer.diagnosis.data_flow import depend_on_data
from accumtrainer.diagnosis.equivalence import Equivalence, EquivalenceCheck
from accumtrainer.diagnosis.inspection import Inspection, Replay
from accumtrainer.diagnosis.trials import Trials
from accumtrainer.steps import make_backend
from accumtrainer.window.hooks import context_of
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.parts import WindowParts


class Examiner:
    """Tries windows, and puts back whatever that has moved.

    Args:
        parts: whose windows they are.
        make_current: makes the model's variables current.
        run_eagerly: whether everything runs as plain Python.
        jit_compile: whether XLA compiles what is tried.
    """

    def __init__(
        self,
        parts: WindowParts,
        make_current: Callable[[], None],
        *,
        run_eagerly: bool,
        jit_compile: bool | Literal["auto"] = "auto",
    ):
        self._parts = parts
        self._make_current = make_current
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        self._known_losses: list[Any] = []

    def check_bare_losses(
        self,
        losses: list[WeightedLoss],
        make_window: Callable[[], Window],
        *,
        warns: bool = True,
        owner: str = "Trainer",
    ) -> None:
        """Refuse what cannot be weighed; warn once of what is weighed wrongly.

        Losses are others where data are of another structure.

        Args:
            losses: those of the window.
            make_window: returns it as it is cut.
            warns: whether to warn of what the user has stated.
            owner: what users give arguments to.
        """
        is_known = any(known is losses for known in self._known_losses)
        is_stated = context_of(self._parts.hooks).denominator is not None
        if is_known or (is_stated and not warns):
            return

        def find_dependent() -> list[bool | None]:
            self._make_current()
            return depend_on_data(self._parts, make_window())

        def find_trials() -> Any:
            if self._parts.backend.replicas.count > 1:
                return []
            self._make_current()
            return self._trials().judge_losses(make_window())

        check_bare_losses(
            self._parts, losses, find_dependent, find_trials, owner=owner
        )
        self._known_losses.append(losses)

    def compare(
        self,
        window: Window,
        whole: Window,
        tolerance: float,
        *,
        jit_compile: bool,
    ) -> Equivalence:
        """Compare a window with the big batch.

        Args:
            window: of micro-batches.
            whole: the same samples as one.
            tolerance: see `Trainer.check_equivalence`.
            jit_compile: whether XLA compiles windows.
        """
        self._make_current()
        check = EquivalenceCheck(
            self._parts_aside(),
            self._trials(),
            jit_compile=jit_compile,
            tolerance=tolerance,
        )
        return check.run(window, whole)

    def inspect(
        self, window: Window, *, loss_scale: float, micro_batches_before: int
    ) -> Inspection:
        """Run a window again without effect; see `Trainer.inspect`.

        Args:
            window: which.
            loss_scale: by which its losses are multiplied.
            micro_batches_before: number of those that had run by then.

        Raises:
            RuntimeError: there are several processes.
        """
        replicas = self._parts.backend.replicas
        if replicas.processes > 1:
            raise RuntimeError(
                errors.INSPECTION_OF_PROCESSES.format(
                    processes=replicas.processes
                )
            )
        return Replay(self._parts).inspect(
            window,
            loss_scale=loss_scale,
            micro_batches_before=micro_batches_before,
        )

    def _trials(self) -> Trials:
        parts = replace(self._parts_aside(), loss_scale=None)
        return Trials(parts, jit_compile=self._jit_compile)

    def _parts_aside(self) -> WindowParts:
        """Make parts with a backend of their own.

        The shapes of what is tried aside say nothing of training.
        """
        backend = make_backend(
            run_eagerly=self._run_eagerly, jit_compile=self._jit_compile
        )
        return replace(self._parts, backend=backend)

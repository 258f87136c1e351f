"""Where `Model.fit` keeps the model's state while its train function runs.

On TensorFlow it stays in the variables. On JAX `fit` takes the arrays out of
the variables of model, optimizer and metrics when an epoch begins, and hands
them from call to call: a train function is given them for good and returns the
new ones. A callback that asks for the model has `fit` put them back first, and
`fit` takes them out again before the next call. It knows nothing of other
variables that a window changes or reads, such as the random state of a layer
outside of the model: they are current between calls.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from accumtrainer.keras_api.types import Model, Tensor, Variable
from accumtrainer.steps.backend import Backend
from accumtrainer.window.variables import WindowVariables


class FitState:
    """State that stays in the variables.

    Args:
        backend: the backend, which may know of what is in them.
    """

    def __init__(self, backend: Backend):
        self._backend = backend

    def make_train_function(
        self, run: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """Make what `fit` calls for every group of batches.

        Args:
            run: function from an iterator of batches to logs.

        Returns:
            Function that `fit` can call on this backend.
        """
        return run

    def settle(self, variables: WindowVariables) -> None:
        """Let a program's variables go on from what `fit` has handed over."""
        del variables
        # A callback may have changed any of them.
        self._backend.write_back()

    def unsettle(self) -> None:
        """Let a program be changed before it goes on; `settle` comes next."""

    def leave(self) -> None:
        """Make current what `fit` does not know of, between its epochs."""

    def read(self, variable: Variable) -> Tensor:
        """Return a variable's value, wherever it is kept now."""
        return variable.value


class HandedState:
    """State that `fit` hands over as arrays and takes back; see `FitState`.

    Args:
        backend: the backend, which holds the arrays between calls.
        model: compiled `keras.Model`.
    """

    def __init__(self, backend: Backend, model: Model):
        self._backend = backend
        self._model = model
        self._state: Any = None
        self._holder: Any = None
        self._is_settled = False

    def make_train_function(
        self, run: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        """See `FitState`."""

        def train(state: Any, iterator: Iterator[Any]) -> tuple:
            # One that is not the last returned was read from the variables.
            if state is not self._state:
                self._receive(state)
            logs = run(iterator)
            self._holder.write_shared()
            return logs, self._state

        return train

    def _receive(self, state: Any) -> None:
        model = self._model
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        self._state, self._is_settled = state, False
        self._variables = [v for group in groups for v in group]
        arrays = _distinct([array for group in state for array in group])
        self._received = {}
        for variable, array in zip(self._variables, arrays, strict=True):
            self._received[id(variable)] = array
            variable.assign(array)

    def settle(self, variables: WindowVariables) -> None:
        """See `FitState`."""
        if not self._is_settled:
            self._settle(variables)
        # A callback may have changed them.
        self._holder.share(self._shared)

    def _settle(self, variables: WindowVariables) -> None:
        self._holder = self._backend.hold(variables, self._received)
        places = {id(v): i for i, v in enumerate(self._holder.variables)}
        seen = set(map(id, variables.seen_outside))
        self._beside = seen.difference(map(id, self._variables))
        self._shared = [
            i for known, i in places.items() if known in self._beside
        ]
        found = iter([places.get(id(v)) for v in self._variables])
        self._state = tuple(
            _Held(self._holder, [(next(found), array) for array in group])
            for group in self._state
        )
        self._received, self._is_settled = {}, True

    def unsettle(self) -> None:
        """See `FitState`."""
        state = self._state
        if self._is_settled:
            self._holder.write_shared()
        # Or else, as `fit` has handed over anew, what the holder has is old.
        self.leave()
        self._receive(state)

    def leave(self) -> None:
        """See `FitState`."""
        if self._holder is not None:
            if self._is_settled:
                for group in self._state:
                    group.keep()
            known = self._beside.union(map(id, self._variables))
            self._backend.release(self._holder, known)
        self._state = self._holder = None
        self._is_settled = False

    def read(self, variable: Variable) -> Tensor:
        """See `FitState`."""
        if self._holder is not None:
            for known, array in zip(
                self._holder.variables, self._holder.arrays, strict=True
            ):
                if known is variable:
                    return array
        return variable.value


class _Held(Sequence):
    """Arrays as they are now, looked up in a holder when they are asked for.

    This is no list, because `fit` looks at every item of the lists that a
    train function returns, batch by batch.

    Args:
        holder: `Holder`.
        sources: list of pairs of an array's place among those of the holder
            and, where that is `None`, the array.
    """

    def __init__(self, holder: Any, sources: list[tuple[int | None, Tensor]]):
        self._holder = holder
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: Any) -> Any:
        place, array = self._sources[index]
        return array if place is None else self._holder.arrays[place]

    def keep(self) -> None:
        """Keep the arrays, which the holder is about to let go."""
        self._sources = [(None, array) for array in self]


def _distinct(arrays: list[Tensor]) -> list[Tensor]:
    """Copy an array that stands for two variables, as both are given away."""
    seen = set()
    distinct = []
    for array in arrays:
        distinct.append(array.copy() if id(array) in seen else array)
        seen.add(id(array))
    return distinct


def make_fit_state(backend: Backend, model: Model) -> FitState | HandedState:
    """Choose how `fit` keeps the state on the backend.

    Args:
        model: compiled `keras.Model`.

    Returns:
        `FitState` or `HandedState`.
    """
    if backend.fit_hands_state_over:
        return HandedState(backend, model)
    return FitState(backend)

"""Builds an optimizer anew when other variables are trained than before.

Keras builds an optimizer once, for the variables that are trainable then, and
has no way to take others in but a new optimizer, which has forgotten all. So
this resets what `Optimizer.build` has made, under private names, and puts back
what was kept of the variables that stay.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from accumtrainer.keras_api import keras, ops, optimizers_of, strategy_of
from accumtrainer.keras_api.types import Model, Optimizer, Tensor, Variable


def rebuild(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Have a built optimizer update other variables.

    What it keeps of a variable that it goes on to update, and its own numbers,
    are kept; what it keeps of others is gone, and of new ones begins.

    Args:
        optimizer: is the same object afterwards, with new variables.
        variables: those to be updated from now on.
    """
    _, members = optimizers_of(optimizer)
    built = [one for one in members if one.built]
    kept = [_Kept(one) for one in built]
    for one in {id(o): o for o in (optimizer, *built)}.values():
        _reset(one)
    with _chosen_as_before(optimizer, built):
        optimizer.build(variables)
    for one in kept:
        one.put_back()


@contextlib.contextmanager
def _chosen_as_before(
    optimizer: Optimizer, built: list[Optimizer]
) -> Iterator[None]:
    """Have a `MultiOptimizer` leave variables to those that update them.

    A function that chooses one may make a new one whenever it is asked.
    """
    name = "_optimizer_map"
    choose = getattr(optimizer, name, None)
    before = {id(v): one for one in built for v in one._trainable_variables}
    if choose is not None:
        setattr(optimizer, name, lambda v: before.get(id(v)) or choose(v))
    try:
        yield
    finally:
        if choose is not None:
            setattr(optimizer, name, choose)


AVERAGES = "_model_variables_moving_average"
"""Where an optimizer with `use_ema` has averages, which it begins as zeros."""

COPIES = "_copies_of_weights"
"""Where `build` notes the other attributes that begin as the weights."""


def build(optimizer: Optimizer, model: Model) -> None:
    """Build an optimizer, and note what it has copied; see `begin_averages`.

    Args:
        optimizer: is not built.
        model: whose trainable variables it is to update.
    """
    strategy = strategy_of(model)
    if strategy is not None:
        # It updates by the strategy in whose scope it was made otherwise.
        for one in (optimizer, *optimizers_of(optimizer)[1]):
            one._distribution_strategy = strategy
    optimizer.build(model.trainable_variables)
    for one in optimizers_of(optimizer)[1]:
        slots = _slots(one) if one.built else {}
        copies = {name for name, s in slots.items() if _are_copies(one, s)}
        if copies:
            setattr(one, COPIES, frozenset(copies))


def begin_averages(optimizer: Optimizer) -> None:
    """Begin averages and copies of weights as these are at the first update.

    Keras has that update write over the averages. Where none is made, as after
    losses of NaN, the model's weights would become the zeros when training
    ends. What `build` has copied is of weights that may have been loaded over
    since, where it was called to find something out before training.

    Args:
        optimizer: is built.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for one in optimizers_of(inner)[1]:
        # A copy, as replicas may hold the clock in parts.
        if not one.built or int(ops.copy(one.iterations)):
            continue
        copies = {AVERAGES} | getattr(one, COPIES, frozenset())
        for name, slots in _slots(one).items():
            if name in copies:
                for variable, slot in zip(
                    one._trainable_variables, slots, strict=True
                ):
                    _copy(variable, slot)


def _are_copies(optimizer: Optimizer, slots: list[Variable | None]) -> bool:
    """Whether slots hold the weights, and not a constant as the weights do."""
    pairs = zip(optimizer._trainable_variables, slots, strict=True)
    # As tensors first: replicas may hold a value in parts.
    known = [
        (ops.convert_to_tensor(v), ops.convert_to_tensor(slot))
        for v, slot in pairs
        if slot is not None
    ]
    return all(
        one.shape == other.shape and not _differ(one, other)
        for one, other in known
    ) and any(_differ(one, ops.ravel(one)[:1]) for one, _ in known)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether any number differs, compared where they are."""
    return int(ops.any(ops.not_equal(one, other))) > 0


class _Kept:
    """What an optimizer keeps, by its attributes."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._variables = list(optimizer._trainable_variables)
        self._attributes = dict(vars(optimizer))
        self._slots = _slots(optimizer)

    def put_back(self) -> None:
        """Put it into what the optimizer has by now."""
        if not self._optimizer.built:
            return
        before = {id(v): i for i, v in enumerate(self._variables)}
        now = vars(self._optimizer)
        for name, old in self._attributes.items():
            if isinstance(old, keras.Variable) and old is not now.get(name):
                _copy(old, now.get(name))
        for name, new in _slots(self._optimizer).items():
            old = self._slots.get(name)
            pairs = zip(self._optimizer._trainable_variables, new, strict=True)
            for variable, slot in pairs:
                position = before.get(id(variable))
                if old is not None and position is not None:
                    _copy(old[position], slot)
                elif name == AVERAGES:
                    _copy(variable, slot)


def _slots(optimizer: Optimizer) -> dict[str, list[Variable | None]]:
    """List by attribute what it holds for each variable that is updated."""
    variables = optimizer._trainable_variables
    found = {}
    for name, value in vars(optimizer).items():
        is_dict = isinstance(value, dict)
        slots = list(value.values()) if is_dict else value
        if value is variables or value is optimizer._variables:
            continue
        if not isinstance(slots, list) or len(slots) != len(variables):
            continue
        if slots and all(
            # A dict may hold other variables than one for each.
            isinstance(slot, keras.Variable) and slot.shape == variable.shape
            if is_dict
            else slot is None or isinstance(slot, keras.Variable)
            for variable, slot in zip(variables, slots, strict=True)
        ):
            found[name] = list(slots)
    return found


def _copy(old: Any, new: Any) -> None:
    """Copy a variable, of those optimizers that have it."""
    if isinstance(old, keras.Variable) and isinstance(new, keras.Variable):
        new.assign(old.value)


def _reset(optimizer: Optimizer) -> None:
    """Undo `Optimizer.build`."""
    own = (optimizer._iterations, optimizer._learning_rate)
    kept = [v for v in optimizer._variables if any(v is one for one in own)]
    ids = optimizer._tracker.stored_ids["variables"]
    ids.difference_update(map(id, optimizer._variables))
    ids.update(map(id, kept))
    optimizer._variables[:] = kept
    optimizer._trainable_variables_indices = {}
    optimizer.built = False

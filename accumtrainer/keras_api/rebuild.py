"""Builds an optimizer anew when other variables are trained than before.

Keras builds an optimizer once, for the variables that are trainable then, and
has no way to take others in but a new optimizer, which has forgotten all. So
this resets what `Optimizer.build` has made, under private names, and puts back
what was kept of the variables, also of those that were frozen meanwhile.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from accumtrainer.keras_api import keras, ops, optimizers_of, strategy_of
from accumtrainer.keras_api.types import Model, Optimizer, Tensor, Variable

FROZEN = "_kept_of_frozen"
"""Where an optimizer has what it keeps of variables that are frozen.

By the variable's id, the variable and its slots: arrays on the host, by the
attribute that they are of. Of `None` it is what an optimizer keeps beside that
has nothing to update. Keras is not told, or it would track them.
"""


def rebuild(optimizer: Optimizer, model: Model) -> None:
    """Have a built optimizer update what of the model is trainable by now.

    What it keeps of variables that are frozen leaves the device, and comes back
    as they are trained again. Of new variables it begins, and of those that the
    model has no longer nothing is kept.

    Args:
        optimizer: is the same object afterwards, with other variables.
        model: is built.
    """
    _, members = optimizers_of(optimizer)
    kept = [_Kept(one) for one in members]
    for one in {id(o): o for o in (optimizer, *members)}.values():
        _reset(one)
    with _chosen_as_before(optimizer, kept):
        optimizer.build(model.trainable_variables)
    for each in kept:
        each.put_back(model.non_trainable_variables)


def keeps_of_frozen(
    optimizer: Optimizer, model: Model, variable: Variable
) -> bool:
    """Whether `rebuild` can have an optimizer update a variable again.

    Not if it updates variables of others, which it would know no longer.
    """
    members = optimizers_of(optimizer)[1]
    own = set(map(id, model.variables))
    updated = [
        v for one in members if one.built for v in one._trainable_variables
    ]
    kept = {key for one in members for key in vars(one).get(FROZEN, {})}
    return id(variable) in kept and all(id(v) in own for v in updated)


def rebuild_in_scope(optimizer: Optimizer, model: Model) -> None:
    """Do what `rebuild` does where the model's variables were made."""
    strategy = strategy_of(model)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        rebuild(optimizer, model)


def slots_of_frozen(
    optimizer: Optimizer, variables: list[Variable]
) -> dict[str, np.ndarray]:
    """List what an optimizer keeps of those variables that are frozen.

    Args:
        variables: all that it may have something of.

    Returns:
        Dict of NumPy arrays, shaped as slots are; the key says of which member
        of a `MultiOptimizer`, which variable and which attribute.
    """
    return {
        f"{number}/{position}/{name}": value
        for number, one in enumerate(optimizers_of(optimizer)[1])
        for position, variable in enumerate([*variables, None])
        if id(variable) in vars(one).get(FROZEN, {})
        for name, value in vars(one)[FROZEN][id(variable)][1].items()
    }


def put_back_of_frozen(
    optimizer: Optimizer,
    variables: list[Variable],
    slots: dict[str, np.ndarray],
) -> None:
    """Have an optimizer keep what `slots_of_frozen` has listed, and no more."""
    members = optimizers_of(optimizer)[1]
    for one in members:
        one.__dict__[FROZEN] = {}
    for key, value in slots.items():
        number, position, name = key.split("/")
        variable = [*variables, None][int(position)]
        kept = vars(members[int(number)])[FROZEN]
        kept.setdefault(id(variable), (variable, {}))[1][name] = value


@contextlib.contextmanager
def _chosen_as_before(
    optimizer: Optimizer, kept: "list[_Kept]"
) -> Iterator[None]:
    """Have a `MultiOptimizer` leave variables to those that update them.

    A function that chooses one may make a new one whenever it is asked.
    """
    name = "_optimizer_map"
    choose = getattr(optimizer, name, None)
    before = {key: each.optimizer for each in kept for key in each.slots}
    if choose is not None:
        setattr(optimizer, name, lambda v: before.get(id(v)) or choose(v))
    try:
        yield
    finally:
        if choose is not None:
            setattr(optimizer, name, choose)


AVERAGES = "_model_variables_moving_average"
"""Where an optimizer with `use_ema` has averages, which it begins as zeros."""

SINCE = "updates_when_frozen"
"""Under which name it stands beside the slots of a frozen variable."""

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
    """What an optimizer keeps, by its attributes and of each variable."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer
        attributes, slots = vars(optimizer), _slots(optimizer)
        lasting = (optimizer._iterations, optimizer._learning_rate)
        beside = {
            name: value
            for name, value in attributes.items()
            if isinstance(value, keras.Variable)
            and all(value is not one for one in lasting)
        }
        self.slots = {id(None): (None, beside)}
        self.slots |= attributes.get(FROZEN, {})
        self.slots |= {
            id(variable): (variable, {n: s[i] for n, s in slots.items()})
            for i, variable in enumerate(optimizer._trainable_variables)
        }

    def put_back(self, frozen: list[Variable]) -> None:
        """Put it into what the optimizer has by now, or aside if frozen."""
        now = self.optimizer.__dict__
        for name, old in self.slots[id(None)][1].items():
            _copy(old, now.get(name))
        for name, new in _slots(self.optimizer).items():
            pairs = zip(self.optimizer._trainable_variables, new, strict=True)
            for variable, slot in pairs:
                old = self.slots.get(id(variable), (None, {}))[1]
                _copy(old.get(name), slot)
                if name == AVERAGES:
                    self._average(variable, slot, old)
        updates = {SINCE: np.array(self._updates)}
        now[FROZEN] = {
            id(variable): (
                variable,
                updates | _on_host(self.slots[id(variable)][1]),
            )
            for variable in (*frozen, *([] if self.optimizer.built else [None]))
            if id(variable) in self.slots
        }

    @property
    def _updates(self) -> int:
        # A copy, as replicas may hold the clock in parts.
        return int(ops.copy(self.optimizer._iterations))

    def _average(
        self, variable: Variable, average: Variable, old: dict[str, Any]
    ) -> None:
        """Begin an average, or move it as far as it has gone meanwhile.

        Keras goes on to average what is frozen, from its weights at the first
        update on, unless averages become the weights every few updates.
        """
        if AVERAGES not in old or old.get(SINCE) == 0:
            _copy(variable, average)
        elif SINCE in old and not self.optimizer.ema_overwrite_frequency:
            share = self.optimizer.ema_momentum ** (self._updates - old[SINCE])
            weight = ops.convert_to_tensor(variable)
            distance = ops.convert_to_tensor(average) - weight
            average.assign(weight + float(share) * distance)


def _on_host(slots: dict[str, Any]) -> dict[str, np.ndarray]:
    """Copy the slots of a variable, of those optimizers that have them."""
    return {
        # As a tensor first: replicas may hold a value in parts.
        name: np.array(ops.convert_to_numpy(ops.convert_to_tensor(slot)))
        for name, slot in slots.items()
        if slot is not None
    }


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
    """Copy a variable or an array, of those optimizers that have it."""
    if old is not None and isinstance(new, keras.Variable):
        new.assign(old.value if isinstance(old, keras.Variable) else old)


def _reset(optimizer: Optimizer) -> None:
    """Undo `Optimizer.build`."""
    own = (optimizer._iterations, optimizer._learning_rate)
    kept = [v for v in optimizer._variables if any(v is one for one in own)]
    ids = optimizer._tracker.stored_ids["variables"]
    ids.difference_update(map(id, optimizer._variables))
    ids.update(map(id, kept))
    optimizer._variables[:] = kept
    optimizer._trainable_variables_indices = {}
    optimizer._trainable_variables.clear()
    optimizer.built = False

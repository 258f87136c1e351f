"""Checks windows on the host, before they change anything."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import (
    Batch,
    Window,
    arrays_of,
    name_of,
    named_arrays,
)
from accumtrainer.data.reading import is_text
from accumtrainer.keras_api import BACKEND, flatten_layers, keras, tree
from accumtrainer.keras_api.types import Layer, Model, Nest, Tensor
from accumtrainer.window.hooks import Hooks, context_of
from accumtrainer.window.losses import find_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexRule:
    """Which whole numbers may stand for a class, or a row of an embedding.

    Args:
        count: how many classes or rows, `None` where nobody knows.
        ignored: the label that means none, or `None`.
        message: what is wrong where the rule is broken.

    Examples:
        >>> rule = IndexRule(count=3, ignored=-1)
        >>> rule.breaches(np.array([0, 3, -1, -2])).tolist()
        [False, True, False, True]
    """

    count: int | None = None
    ignored: int | None = None
    message: str = errors.NO_SUCH_CLASS

    def breaches(self, indices: np.ndarray) -> np.ndarray:
        """Tell which numbers break the rule.

        Args:
            indices: array of numbers; fractions are cut off, as Keras does.

        Returns:
            Array of bool in the same shape.
        """
        indices = indices.astype("int64")
        breaches = indices < 0
        if self.count is not None:
            breaches |= indices >= self.count
        if self.ignored is not None:
            breaches &= indices != self.ignored
        return breaches

    def __str__(self) -> str:
        if self.count is None:
            return "of at least 0"
        return f"from 0 to {self.count - 1}"


def has_own_loss(hooks: Hooks) -> bool:
    """Say whether targets go to code of the user's own."""
    return context_of(hooks).compiled_loss is None or hooks.overrides(
        "compute_loss"
    )


def compile_option(
    batch: Batch, jit_compile: bool | Literal["auto"], *, has_own_loss: bool
) -> bool | Literal["auto"]:
    """Choose whether XLA may compile what runs on a batch.

    Args:
        batch: the first one.
        has_own_loss: whether targets go to code of the user's own.

    Returns:
        The same, or `False` where the batch holds text.

    Raises:
        TypeError: there is text where only numbers can be.
        ValueError: XLA was asked for, and there is text.

    Examples:
        >>> compile_option(Batch(np.ones(3)), "auto", has_own_loss=False)
        'auto'
    """
    for field, part in zip(Batch._fields, batch, strict=True):
        for path, array in named_arrays(part):
            if not is_text(array):
                continue
            name = name_of(field, path)
            _refuse_text(field, name, has_own_loss)
            if jit_compile is True:
                raise ValueError(errors.TEXT_UNDER_XLA.format(name=name))
            jit_compile = False
    return jit_compile


def _refuse_text(field: str, name: str, has_own_loss: bool) -> None:
    if field == "y" and not has_own_loss:
        rule, remedy = "for the loss", errors.NUMBER_LABELS
    elif field == "sample_weight":
        rule, remedy = "to weigh by", "Give one number per sample."
    elif BACKEND != "tensorflow":
        rule, remedy = f"on {BACKEND}, which has no text", errors.NUMBER_TEXT
    else:
        return
    raise TypeError(errors.TEXT.format(name=name, rule=rule, remedy=remedy))


def id_rules(model: Model, x: Nest) -> dict[tuple, IndexRule]:
    """Find the inputs that an embedding looks up, and how many rows it has.

    Args:
        model: built `keras.Model`. Only of one that is made of layers and
            inputs is it known which input goes where.
        x: inputs of a micro-batch, array or nest of arrays.

    Returns:
        Dict from the path in x to `IndexRule`.

    Examples:
        >>> layers = [keras.Input([3]), keras.layers.Embedding(5, 2)]
        >>> list(id_rules(keras.Sequential(layers), np.array([[0, 4, 1]])))
        [()]
    """
    inputs, names = _inputs(model)
    rows = {}
    for layer in flatten_layers(model):
        if isinstance(layer, keras.layers.Embedding):
            for tensor in tree.flatten(_end_of(layer, "input")):
                rows[id(tensor)] = layer.input_dim
    rules = {}
    for path, _ in named_arrays(x):
        count = rows.get(id(_paired(path, inputs, names)))
        if count is not None:
            rules[path] = IndexRule(count=count, message=errors.NO_SUCH_ROW)
    return rules


def _end_of(layer: Layer, name: Literal["input", "output"]) -> Any:
    """Return what a layer of a functional model was called with, or gave."""
    try:
        return getattr(layer, name)
    except (AttributeError, ValueError):  # the latter of Keras Core
        return []  # never, or several times, or not in such a model


def label_rules(model: Model, loss: Any, y: Nest) -> dict[tuple, IndexRule]:
    """Find the targets that are class numbers, and what they may be.

    Args:
        model: built `keras.Model`.
        loss: what `Model.compile` takes as `loss`.
        y: targets of a micro-batch, array or nest of arrays.

    Returns:
        Dict from the path in y to `IndexRule`.

    Examples:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(5)])
        >>> loss = keras.losses.SparseCategoricalCrossentropy()
        >>> label_rules(model, loss, np.array([0, 4]))[()].count
        5
    """
    outputs, names = _outputs(model)
    rules = {}
    for path, labels in named_arrays(y):
        if is_text(labels):
            continue  # which others refuse
        output = _paired(path, outputs, names)
        identifier = _loss_of(path, loss, outputs, names)
        rule = identifier and _label_rule(identifier, labels, output)
        if rule:
            rules[path] = rule
    return rules


def _inputs(model: Model) -> tuple[Any, Any]:
    inputs = getattr(model, "inputs", None) or []
    names = [tensor.name for tensor in inputs]
    return inputs, _keys(model, "input", names) if inputs else names


def _outputs(model: Model) -> tuple[Any, Any]:
    outputs = getattr(model, "outputs", None) or []
    names = getattr(model, "output_names", None) or []
    return outputs, _keys(model, "output", names) if outputs else names


def _keys(model: Model, name: Literal["input", "output"], names: Any) -> Any:
    """Return the keys of the dict a model was made with, else names."""
    structure = _end_of(model, name)
    if not isinstance(structure, dict):
        return names
    keys = tree.flatten({key: key for key in structure})  # in Keras's order
    return keys if len(keys) == len(names) else []


def _paired(path: tuple, tensors: Any, names: Any) -> Any:
    """Return the input or output that a path belongs to, or `None`."""
    if not path and len(tensors) == 1:
        return tensors[0]
    if len(path) != 1:
        return None
    (key,) = path
    if isinstance(key, int):
        return tensors[key] if key < len(tensors) else None
    return dict(zip(names, tensors, strict=False)).get(key)


def _loss_of(path: tuple, loss: Any, outputs: Any, names: Any) -> Any:
    """Return the loss of one output, or `None`."""
    if isinstance(loss, (list, tuple)):
        by_place = dict(enumerate(loss))
        by_name = dict(zip(names, loss, strict=False))
    elif isinstance(loss, dict):
        by_name = loss
        by_place = {i: loss.get(name) for i, name in enumerate(names)}
    else:
        return loss
    if path:
        return by_place.get(path[0], by_name.get(path[0]))
    return by_place.get(0) if len(outputs) == 1 else None


def _label_rule(
    identifier: Any, labels: Any, output: Tensor
) -> IndexRule | None:
    """Return the rule for labels, `None` where they are no class numbers."""
    shape = None if output is None else tuple(output.shape)
    if str(identifier).lower() in ("crossentropy", "ce") and output is None:
        return None
    loss = find_loss(identifier, labels, output)
    is_class = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    if (
        not is_class
        and loss is not keras.losses.sparse_categorical_crossentropy
    ):
        return None
    is_known = shape is not None and _has_classes_last(labels.shape, shape)
    return IndexRule(
        count=shape[-1] if shape is not None and is_known else None,
        ignored=getattr(loss, "ignore_class", None),
    )


def _has_classes_last(labels: Sequence[int], output: Sequence[int]) -> bool:
    """Whether an output has one class more per label on its last axis."""
    if len(labels) == len(output) and labels[-1] == 1:
        labels = labels[:-1]
    pairs = zip(labels[1:], output[1:-1], strict=False)
    return len(labels) == len(output) - 1 and all(
        size in (None, one) for one, size in pairs
    )


def fixed_sizes(model: Model, batch: Batch) -> dict[tuple, dict[int, int]]:
    """Find the axes that must stay as long as they are.

    These are the axes of inputs, and of targets shaped like an output, whose
    size the model knows.

    Args:
        model: built `keras.Model`.
        batch: the first micro-batch.

    Returns:
        Dict from `(field, path)` to a dict from axis to size.

    Examples:
        >>> inputs = keras.Input([None, 3])
        >>> model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        >>> fixed_sizes(model, Batch(np.zeros([4, 7, 3])))
        {('x', ()): {2: 3}}
    """
    known = {"x": _inputs(model), "y": _outputs(model)}
    fixed = {}
    for field, (tensors, names) in known.items():
        for path, array in named_arrays(getattr(batch, field)):
            tensor = _paired(path, tensors, names)
            if tensor is None or len(tensor.shape) != array.ndim:
                continue
            fixed[field, path] = {
                axis: size
                for axis, size in enumerate(tensor.shape)
                if axis and size == array.shape[axis]
            }
    return fixed


class Place(NamedTuple):
    """Where a batch is, each counted from 0; spelled out only in an error."""

    micro_batch: int
    window: int
    epoch: int

    def __str__(self) -> str:
        return (
            f"micro-batch {self.micro_batch}, window {self.window} of epoch "
            f"{self.epoch}"
        )


class _Rules(NamedTuple):
    """What holds for batches of a kind.

    Args:
        sizes: dict, from `fixed_sizes`.
        inputs_may_vary: whether the model takes inputs of other sizes too, as
            a `Sequential` does, which leaves that to its layers.
        indices: dict by field, from `id_rules` and `label_rules`.
    """

    sizes: dict[tuple, dict[int, int]]
    inputs_may_vary: bool
    indices: dict[str, dict[tuple, IndexRule]]


class InputChecks:
    """What is checked of every window before it runs.

    What the Trainer's own hooks may change is left to them: sizes and ids with
    an `on_micro_batch`, targets with a `compute_loss`.

    Args:
        trainer: `Trainer`, whose model and loss say what can be right.
        numbers: whether every number is looked at.
    """

    def __init__(self, trainer: Any, *, numbers: bool):
        self._trainer = trainer
        self._numbers = numbers
        self._rules: dict[Hashable, _Rules] = {}  # by kinds of windows

    def check(self, window: Window, *, epoch: int, index: int) -> None:
        """Refuse a window that cannot be right.

        Args:
            epoch: index of the epoch, for the message.
            index: index of the window in the epoch, for the message.

        Raises:
            DataError: another size than before; or, with `numbers`, a number
                that is not finite, a label of no class, or an id of no row.
        """
        axis = 1 if window.is_even else 0
        batches: Any = window.parts or (window.stacked,)
        if window.kind not in self._rules:
            self._rules[window.kind] = self._make_rules(window.split()[0])
        rules = self._rules[window.kind]
        for position, batch in enumerate(batches):
            place = Place(position, index, epoch)
            _check_sizes(batch, rules, place, axis)
        if not self._numbers:
            return
        for position, batch in enumerate(window.split()):
            place = Place(position, index, epoch)
            check_numbers(batch, rules.indices, place)

    def _make_rules(self, batch: Batch) -> _Rules:
        trainer, model = self._trainer, self._trainer.model
        has_own_loss = trainer.overrides("compute_loss")
        sizes = fixed_sizes(model, batch)
        rules = {}
        if trainer.overrides("on_micro_batch"):
            sizes = {}
        elif self._numbers:
            rules["x"] = id_rules(model, batch.x)
        if has_own_loss:
            sizes = {key: size for key, size in sizes.items() if key[0] == "x"}
        if self._numbers and not has_own_loss:
            rules["y"] = label_rules(model, model.loss, batch.y)
        return _Rules(sizes, model.input_spec is None, rules)


def _check_sizes(
    batch: Batch, rules: _Rules, place: Place, samples_axis: int
) -> None:
    """Refuse arrays whose fixed axes have another size than before."""
    arrays = arrays_of(batch) if rules.sizes else {}
    for (field, path), axes in rules.sizes.items():
        shape = arrays[field, path].shape[samples_axis:]
        for axis, size in axes.items():
            if shape[axis] == size:
                continue
            if field == "x" and rules.inputs_may_vary:
                return  # outputs, and targets with them, vary as well
            raise errors.DataError(
                errors.OTHER_SIZE.format(
                    name=name_of(field, path),
                    axis=axis,
                    before=size,
                    now=shape[axis],
                    place=place,
                )
            )


def check_numbers(batch: Batch, rules: dict, place: Place) -> None:
    """Refuse numbers that are not finite, and indices of nothing.

    Args:
        rules: dict by field of dicts from the path to `IndexRule`.
        place: `Place` of the batch, for the message.

    Raises:
        DataError: there is one.
    """
    for field, part in zip(Batch._fields, batch, strict=True):
        for path, array in named_arrays(part):
            if "float" in array.dtype.name:
                is_wrong = ~np.isfinite(array)
                _refuse(errors.NOT_FINITE, field, path, array, is_wrong, place)
            rule = rules.get(field, {}).get(path)
            if rule is not None:
                is_wrong = rule.breaches(array)
                _refuse(rule.message, field, path, array, is_wrong, place, rule)


def _refuse(
    message: str,
    field: str,
    path: tuple,
    array: np.ndarray,
    is_wrong: np.ndarray,
    place: Place,
    rule: IndexRule | None = None,
) -> None:
    """Raise an error that names the first wrong value, if there is one."""
    if not is_wrong.any():
        return
    index = tuple(int(i) for i in np.argwhere(is_wrong)[0])
    raise errors.DataError(
        message.format(
            name=name_of(field, path),
            value=array[index],
            row=index[0],
            place=place,
            rule=rule,
        )
    )

"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them, or
divides each value by what all of them come to. The number of its values says
nothing about what it was averaged over.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from accumtrainer.keras_api import keras, looking_up_anything, ops, tree
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.window.state import Scratch


def reduces_examples(loss: Any, y_true: Nest, y_pred: Nest) -> bool:
    """Whether a loss has other than twice as many values of twice the data.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, or nest of such.
        y_pred: the same of predictions.
    """
    # Whether it can be computed is found out where it is used; what it draws or
    # assigns here does not count.
    with contextlib.suppress(Exception), Scratch([]), _changing_copies(loss):
        # Copies, as a loss may change what it is given in place.
        once = tree.map_structure(
            lambda tensor: ops.copy(ops.cast(tensor, loss.dtype)),
            [y_true, y_pred],
        )
        twice = tree.map_structure(lambda t: ops.concatenate([t, t]), once)
        shapes = [tuple(loss.call(*given).shape) for given in (once, twice)]
        if None not in (*shapes[0], *shapes[1]):
            count, count_of_twice = map(math.prod, shapes)
            return bool(count_of_twice != 2 * count)
    return False


MOST_NUMBERS = 2**18
"""With more of them in an example a trial would take a second or more."""


OnItsOwn = Callable[[Callable[..., Nest]], Callable[..., Nest]]
"""As `WindowBackend.on_its_own`."""


def fails_to_add_up(
    loss: Any, y_true: Nest, y_pred: Nest, on_its_own: OnItsOwn
) -> bool:
    """Whether a loss makes another value of an example in another batch.

    That is beside other examples, at another place, or among more of them. It
    is tried with several kinds of numbers made up, in a thread of its own: a
    program may be traced here, which is so for one thread. Where an example
    has more than `MOST_NUMBERS` it is not tried.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, of which the shape counts, or nest of such.
        y_pred: the same of predictions.
        on_its_own: that of a backend.
    """
    values = _Values(loss, on_its_own)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_differs, values, y_true, y_pred).result()


def _differs(values: "_Values", y_true: Nest, y_pred: Nest) -> bool:
    """Whether it does with one of the kinds of numbers, tried in turn."""
    rng = np.random.default_rng(0)
    changing = _changing_copies(values.loss)
    with contextlib.suppress(Exception), Scratch([]), changing:
        of_targets, of_outputs = (
            [math.prod(_lengths(tensor)) for tensor in tree.flatten(nest)]
            for nest in (y_true, y_pred)
        )
        sizes = [*of_targets, *of_outputs]
        if max(sizes) > MOST_NUMBERS:
            return False
        # A label should come in some examples, where they have few of them.
        most = min(2**12 // max(of_targets), MOST_NUMBERS // max(sizes))
        count = min(16, max(2, most))
        widths = [(_lengths(t) or [1])[-1] for t in tree.flatten(y_pred)]
        for place, kinds in enumerate(_kinds(widths)):
            parts = [
                [
                    tree.map_structure(
                        partial(_draw, rng, kind, share, count), nest
                    )
                    for kind, nest in zip(kinds, (y_true, y_pred), strict=True)
                ]
                for share in (0.3, 0.6, 0.6, 0.3)
            ]
            is_label = place > 1  # and perhaps one of no class
            scope = looking_up_anything if is_label else contextlib.nullcontext
            may_miss = place >= WITHIN
            # A loss need not be defined for numbers that it is not made for.
            ignored = np.errstate(all="ignore")
            with contextlib.suppress(Exception), ignored, scope():
                if _differs_with(values, parts, may_miss=may_miss):
                    return True
    return False


class _Numbers(NamedTuple):
    """A range of numbers to draw from, or of whole ones between them.

    Some are a mask instead, if there is one.
    """

    low: float
    high: float
    are_whole: bool = False
    mask: int | None = None


WITHIN = 5
"""So many kinds of targets, the first, are found within an example's output."""


def _kinds(widths: list[int]) -> list[tuple[_Numbers, _Numbers]]:
    """List which numbers a loss is tried with, as targets and as outputs.

    Labels are tried alone and beside a mask that is none, as a loss may look
    them up in a row of all outputs, and count what is masked.

    Args:
        widths: sizes of the outputs' last axes.
    """
    shares = _Numbers(0.05, 0.95)
    signed = _Numbers(-3.0, 3.0)
    above_one = _Numbers(1.05, 3.0)
    below_one_in_sum = _Numbers(0.0, 1 / max(widths))
    labels = _Numbers(-0.5, min(widths) - 0.5, True)
    return [
        (shares, shares),
        (_Numbers(-0.5, 1.5, True), shares),
        *((labels, of) for of in (shares, signed, above_one)),  # all `WITHIN`
        *((labels._replace(mask=mask), shares) for mask in (-1, -100, 255)),
        (_Numbers(-1.5, 9.5, True), shares),  # classes, -1 where unlabelled
        (_Numbers(-0.5, 255.5, True), shares),  # pixels
        (signed, signed),
        (above_one, above_one),
        (below_one_in_sum, below_one_in_sum),
    ]


def _draw(
    rng: np.random.Generator,
    numbers: _Numbers,
    share: float,
    count: int,
    tensor: Tensor,
) -> np.ndarray:
    """Draw some examples of the shape of a tensor's, a share of them masked.

    Small ones among whole numbers are the more frequent the larger the share.
    """
    shape = [count, *_lengths(tensor)]
    places = rng.uniform(size=shape)
    if numbers.are_whole:
        places **= 3 * share
    drawn = numbers.low + (numbers.high - numbers.low) * places
    drawn = np.round(drawn, 0 if numbers.are_whole else 9)
    if numbers.mask is not None:
        masked = rng.permutation(drawn.size)[: int(share * drawn.size)]
        drawn.flat[masked] = numbers.mask
    return drawn


def _differs_with(
    values: "_Values", parts: list[list[Nest]], *, may_miss: bool
) -> bool:
    """Whether f(A) + f(B) is not f(A, B).

    Args:
        values: those whose sum is f.
        parts: A, B, C and D, each targets and outputs of as many examples.
        may_miss: whether targets may be looked up in outputs of a neighbour,
            as they are no labels. So it does not count if it differs with the
            order of examples, too.
    """
    one, other, third, fourth = parts
    batches = [(one,), (other,), (one, other)]
    totals = [values(*batch).sum() for batch in batches]
    both = totals[2]
    difference = abs(totals[0] + totals[1] - both)
    # What they have in common, as a constant, counts for its rounding alone.
    allowed = 1e-4 * abs(totals[0] - totals[1])
    allowed += 1e-6 * max(map(abs, totals))
    if not difference > allowed:  # nor where one is not finite
        return False
    # It may divide by what is all but zero, so that rounding is seen.
    moved = [_move_outputs(part) for part in (one, other)]
    allowed += 10 * abs(values(*moved).sum() - both)
    # Nothing is rounded otherwise where others of as many are beside it.
    crossed = both + values(third, fourth).sum()
    crossed -= values(one, fourth).sum() + values(third, other).sum()
    if not abs(crossed) > allowed:
        # Only their number may matter, and more than rounding does: of values
        # that are near 0 as others near 1 are taken from each other, too.
        for share in (1e-4, -1e-4):
            move = partial(_move, share=share)
            moved = [tree.map_structure(move, part) for part in (one, other)]
            changes = np.abs(values(*moved) - values(one, other))
            allowed += np.sum(1e-6 + 10 * changes)
    if may_miss:
        turned = [
            tree.map_structure(lambda numbers: numbers[::-1], part)
            for part in (other, one)
        ]
        if abs(values(*turned).sum() - both) > allowed:
            return False
    # Where it draws or counts, they are others again.
    again = values.made_anew()
    return bool(difference > allowed) and totals == [
        again(*batch).sum() for batch in batches
    ]


def _move_outputs(part: list[Nest]) -> list[Nest]:
    y_true, y_pred = part
    return [y_true, tree.map_structure(partial(_move, share=1e-6), y_pred)]


def _move(numbers: np.ndarray, *, share: float) -> np.ndarray:
    """Change numbers by up to a share of them, up and down, but no labels."""
    if np.array_equal(numbers, np.round(numbers)):
        return numbers
    signs = np.cos(np.arange(numbers.size)).reshape(numbers.shape)
    return numbers * (1 + share * signs)


@contextlib.contextmanager
def _changing_copies(loss: Any) -> Iterator[None]:
    """Make a scope in which a loss changes copies of the numbers it keeps.

    Those in variables of Keras stay the same ones: what is written to them in a
    `Scratch` is forgotten.
    """
    kept = [(one, dict(vars(one))) for one in _losses_in(loss, {})]
    for one, attributes in kept:
        for name, value in attributes.items():
            with contextlib.suppress(Exception):  # what cannot be copied stays
                vars(one)[name] = tree.map_structure(_copy_of_leaf, value)
    try:
        yield
    finally:
        for one, attributes in kept:
            vars(one).clear()
            vars(one).update(attributes)


def _losses_in(loss: Any, known: dict[int, Any]) -> list[Any]:
    """List a loss, and those that it keeps."""
    known[id(loss)] = loss
    for value in vars(loss).values():
        with contextlib.suppress(Exception):
            for leaf in tree.flatten(value):
                is_loss = isinstance(leaf, keras.losses.Loss)
                if is_loss and id(leaf) not in known:
                    _losses_in(leaf, known)
    return list(known.values())


def _copy_of_leaf(leaf: Any) -> Any:
    is_ours = isinstance(leaf, keras.Variable) or not hasattr(leaf, "__array__")
    return leaf if is_ours else copy.deepcopy(leaf)


class _Values:
    """Computes the values that a loss has of some rows beside others.

    Args:
        loss: `keras.losses.Loss`.
        on_its_own: that of a backend.
    """

    def __init__(self, loss: Any, on_its_own: OnItsOwn):
        self.loss = loss
        self._on_its_own = on_its_own
        self._has_state = False
        # With fewer bits, what is compiled is rounded visibly otherwise.
        is_precise = loss.dtype in ("float32", "float64")
        compute = self._compute_once
        self._compute = on_its_own(compute) if is_precise else compute

    def made_anew(self) -> "_Values":
        """Make another one, which knows no number that Python had."""
        return _Values(self.loss, self._on_its_own)

    def __call__(self, *rows: list[Nest]) -> np.ndarray:
        given = tree.map_structure(
            lambda *parts: ops.convert_to_tensor(
                np.concatenate(parts), dtype=self.loss.dtype
            ),
            *rows,
        )
        values = None if self._has_state else self._compute(given)
        if self._has_state:  # which moves from call to call
            values = self.loss.call(*given)
        values = ops.convert_to_numpy(ops.cast(values, "float32"))
        return values.astype("float64")

    def _compute_once(self, given: list[Nest]) -> Tensor:
        with Scratch([]) as scope:
            values = self.loss.call(*given)
        self._has_state = self._has_state or bool(scope.others_written)
        return values


def _lengths(tensor: Tensor) -> list[int]:
    """List the sizes of the axes of an example, 3 where one is open."""
    return [3 if length is None else length for length in tensor.shape[1:]]

"""How the results of a traced function of a batch are computed, on JAX."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from accumtrainer.window.backend import (
    MAX_COMPARED,
    UNKNOWN,
    Recipe,
    recipe_of,
)


def recipes_of(traced: Any) -> list[Recipe]:
    """Tell how results are computed; see `WindowBackend.recipes`.

    Of an operation that has others within and several results, nobody can tell
    which of them the batch goes into.

    Args:
        traced: what `jax.make_jaxpr` returns, of the leaves of a batch.
    """
    jaxpr = traced.jaxpr
    return _recipes(jaxpr, traced.consts, [None] * len(jaxpr.invars))


def _recipes(
    jaxpr: Any, constants: Sequence[Any], given: Sequence[Recipe]
) -> list[Recipe]:
    known: dict[Any, Recipe] = dict(zip(jaxpr.invars, given, strict=True))
    of_constants = map(_of_constant, constants)
    known |= dict(zip(jaxpr.constvars, of_constants, strict=True))

    def find(value: Any) -> Recipe:
        is_literal = isinstance(value, Literal)
        return _of_constant(value.val) if is_literal else known[value]

    for equation in jaxpr.eqns:
        made = _made_by(equation, [find(v) for v in equation.invars])
        known |= dict(zip(equation.outvars, made, strict=True))
    return [find(value) for value in jaxpr.outvars]


def _made_by(equation: Any, given: list[Recipe]) -> list[Recipe]:
    """Tell how the results of an operation are computed."""
    name, results = equation.primitive.name, len(equation.outvars)
    # What asks the host may be told anything, and gradients of one's own be
    # computed with the size of the batch.
    if "callback" in name or "custom_vjp" in name:
        return [UNKNOWN] * results
    if name in ("jit", "pjit"):
        inner = equation.params["jaxpr"]
        return _recipes(inner.jaxpr, inner.consts, given)
    within = list(_programs_in(equation.params))
    if equation.effects or any(map(_is_opaque, within)):
        return [UNKNOWN] * results
    # Functions are told by their addresses, which are others again.
    text = re.sub("0x[0-9a-f]+", "", str(equation.params))
    constants = [c for program in within for c in _constants_in(program)]
    recipe = recipe_of((name, text), [*given, *map(_of_constant, constants)])
    if recipe is None and within and results > 1:
        recipe = UNKNOWN
    return [recipe_of((place,), [recipe]) for place in range(results)]


def _programs_in(params: dict[str, Any]) -> Iterator[Any]:
    for value in jax.tree.leaves(
        list(params.values()),
        is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
    ):
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            yield value


def _is_opaque(program: Any) -> bool:
    """Whether a program asks the host, or has gradients of its own."""
    return any(
        "callback" in equation.primitive.name
        or "custom_vjp" in equation.primitive.name
        or any(map(_is_opaque, _programs_in(equation.params)))
        for equation in getattr(program, "jaxpr", program).eqns
    )


def _constants_in(program: Any) -> Iterator[Any]:
    """List the constants of a program and of those within it."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        for value in equation.invars:
            if isinstance(value, Literal):
                yield value.val
        for inner in _programs_in(equation.params):
            yield from _constants_in(inner)


def _of_constant(value: Any) -> Recipe:
    """Tell constants apart by their numbers, and large ones by shape."""
    shape = np.shape(value)
    # What another program traces, as a variable of Keras's fit, has none.
    is_here = not isinstance(value, jax.core.Tracer) and getattr(
        value, "is_fully_addressable", True
    )
    if np.size(value) > MAX_COMPARED or not is_here:
        return hash(shape)
    try:
        array = np.asarray(value)
    except TypeError:  # keys of random numbers are no arrays
        return UNKNOWN
    return hash((shape, str(array.dtype), array.tobytes()))

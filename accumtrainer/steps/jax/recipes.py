"""How the results of a traced function of a batch are computed, on JAX."""

import re
from typing import Any

import numpy as np
from jax.extend.core import Literal


def recipes_of(traced: Any) -> list[int | None]:
    """Tell how results are computed; see `WindowBackend.recipes`.

    An operation that has others within is looked at as one.

    Args:
        traced: what `jax.make_jaxpr` returns, of the leaves of a batch.
    """
    jaxpr = traced.jaxpr
    known = dict.fromkeys(jaxpr.invars)
    constants = map(_of_constant, traced.consts)
    known |= dict(zip(jaxpr.constvars, constants, strict=True))

    def find(value: Any) -> int | None:
        is_literal = isinstance(value, Literal)
        return _of_constant(value.val) if is_literal else known[value]

    for equation in jaxpr.eqns:
        given = [find(value) for value in equation.invars]
        recipe = None
        # What asks the host may be told anything.
        if None not in given and not equation.effects:
            # Functions are told by their addresses, which are others again.
            text = re.sub("0x[0-9a-f]+", "", str(equation.params))
            recipe = hash((equation.primitive.name, text, *given))
        for place, value in enumerate(equation.outvars):
            known[value] = None if recipe is None else hash((recipe, place))
    return [find(value) for value in jaxpr.outvars]


def _of_constant(value: Any) -> int:
    """Tell constants apart by shape, and single numbers by their value."""
    number = str(value) if np.size(value) == 1 else ""
    return hash((np.shape(value), number))

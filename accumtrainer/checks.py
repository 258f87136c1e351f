"""Checks of single values that a user gives."""

import math
from collections.abc import Callable, Collection
from numbers import Integral, Real
from typing import Any


def require_count(name: str, value: Any, remedy: str, minimum: int = 1) -> int:
    """Check that an argument is a whole number of at least a minimum.

    Args:
        name: the argument as the user wrote it.
        value: what the user gave.
        remedy: sentence that says what to do instead.
        minimum: smallest value allowed.

    Returns:
        The value as an `int`.

    Raises:
        TypeError: the value is a boolean, a fraction, or no number.
        ValueError: the value is smaller than the minimum.

    Examples:
        >>> require_count("epochs", 3, "Give a number.")
        3
    """
    message = (
        f"{name} must be a whole number of at least {minimum}. "
        f"Received: {name}={value!r}. {remedy}"
    )
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if value < minimum:
        raise ValueError(message)
    return int(value)


def require_choice(
    name: str, value: Any, choices: Collection, remedy: str
) -> None:
    """Check that an argument is one of a few words.

    Raises:
        ValueError: the value is none of them; the message lists them.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"{name} must be one of {listed}. "
            f"Received: {name}={value!r}. {remedy}"
        )


def require_number(
    name: str,
    value: Any,
    rule: str,
    remedy: str,
    is_allowed: Callable[[float], bool],
) -> float:
    """Check that an argument is a finite number that keeps a rule.

    Returns:
        The value as a `float`.

    Raises:
        TypeError: the value is a boolean or no number.
        ValueError: the value is not finite or breaks the rule.
    """
    message = f"{name} must be {rule}. Received: {name}={value!r}. {remedy}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(message)
    if not math.isfinite(value) or not is_allowed(float(value)):
        raise ValueError(message)
    return float(value)

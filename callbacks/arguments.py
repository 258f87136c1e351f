"""Checks of arguments that several callbacks take."""

import os
from pathlib import Path
from typing import Any

from accumtrainer import Every


def require_every(name: str, value: Any, remedy: str) -> None:
    """Check that an argument says how often.

    Args:
        name: the argument as the user wrote it.
        value: what the user gave.
        remedy: sentence that says what to do instead.

    Raises:
        TypeError: it is no `Every`.
    """
    if not isinstance(value, Every):
        raise TypeError(
            f"{name} must be an Every. Received: {name}={value!r}. {remedy}"
        )


def require_path(name: str, value: Any, example: str) -> Path:
    """Check that an argument is a path, and return it as a `Path`.

    Raises:
        TypeError: it is none.

    Examples:
        >>> require_path("directory", "runs/a", "runs/b").name
        'a'
    """
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"{name} must be a path. Received: {name}={value!r}. "
            f"Use for example {example!r}."
        )
    return Path(value)


def require_whole(name: str, value: Any, remedy: str) -> None:
    """Check that an argument is a whole number of at least 1.

    Raises:
        ValueError: it is none.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1. "
            f"Received: {name}={value!r}. {remedy}"
        )

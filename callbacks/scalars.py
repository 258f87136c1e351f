"""The numbers of a point, for trackers that know nothing else."""

from typing import Any


def as_scalars(numbers: dict[str, Any]) -> dict[str, float]:
    """Choose the numbers of a point, those of a list one by one.

    Examples:
        >>> as_scalars({"loss": 1, "f1": [0.5, 0.25], "phase": "warm-up"})
        {'loss': 1.0, 'f1/0': 0.5, 'f1/1': 0.25}
    """
    scalars: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, list | tuple):
            items = {f"{name}/{i}": item for i, item in enumerate(value)}
            scalars |= as_scalars(items)
        elif isinstance(value, int | float):
            scalars[str(name)] = float(value)
    return scalars

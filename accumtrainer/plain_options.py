"""Option values to and from plain dicts, for sweeps and files of settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np


class PlainOptions:
    """Give a frozen dataclass `to_dict` and `from_dict`.

    What `to_dict` returns goes through JSON, and is what `WandbLogger` writes
    into the config of a run.
    """

    __slots__ = ()

    def __new__(cls, *values: Any, **options: Any) -> Self:
        options_class: Any = cls
        first = dataclasses.fields(options_class)[0]
        if values and first.kw_only:
            name, value = cls.__name__, values[0]
            raise TypeError(
                f"{name} takes its arguments by name. Received: {value!r}. "
                f"Write {name}({first.name}={value!r}), if that is meant."
            )
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return every option by name, ready for JSON.

        Keys of inner dicts are strings, as in JSON.

        Raises:
            ValueError: an option is a function, which no dict can hold.
        """
        options: Any = self
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(options)
        }
        for name, value in values.items():
            if callable(value):
                raise ValueError(
                    f"{name} must be a plain value to go into a dict. "
                    f"Received: {name}={value!r}, a function. Use a number, "
                    "or a dict {first_epoch: steps}."
                )
            values[name] = _plain(value)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make the options of a dict; those left out have their defaults.

        Args:
            values: what `to_dict` returned, or a mapping like it, such as a
                part of W&B's `run.config`.

        Raises:
            TypeError: it is no mapping, or an option is missing or has the
                wrong type.
            ValueError: there is no option of a name, or one breaks its rule.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{cls.__name__}.from_dict must get a dict of options. "
                f"Received: {values!r}. Give what to_dict returns."
            )
        options: Any = cls
        known = [field.name for field in dataclasses.fields(options)]
        unknown = [str(name) for name in values if name not in known]
        if unknown:
            raise ValueError(
                f"{cls.__name__}.from_dict must get options of "
                f"{cls.__name__}. Received: {', '.join(sorted(unknown))}. "
                f"It has {', '.join(known)}."
            )
        return cls(**{k: _with_whole_keys(v) for k, v in values.items()})


def _plain(value: Any) -> Any:
    """Turn numbers of NumPy and keys of mappings into what JSON knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _with_whole_keys(value: Any) -> Any:
    """Turn keys that JSON has made strings back into whole numbers."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: item
        for key, item in value.items()
    }

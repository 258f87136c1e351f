"""What a Trainer is made with, and keeps for good."""

from typing import Any, Generic, TypeVar, cast

from accumtrainer import errors

T = TypeVar("T")


class Settled(Generic[T]):
    """An attribute that is set once, as what follows was made of it.

    Examples:
        >>> class Loader:
        ...     size = Settled[int]()
        >>> loader = Loader()
        >>> loader.size = 4
        >>> loader.size
        4
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        if instance is None:
            return cast(T, self)  # asked for of the class
        if self._name not in vars(instance):
            raise AttributeError(
                f"{owner.__name__!r} object has no attribute {self._name!r}"
            )
        return vars(instance)[self._name]

    def __set__(self, instance: object, value: T) -> None:
        if vars(instance).get(self._name, value) is not value:
            raise AttributeError(
                errors.SETTLED.format(
                    name=self._name, kind=type(instance).__name__, value=value
                )
            )
        vars(instance)[self._name] = value

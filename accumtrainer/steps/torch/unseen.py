"""What Python does with tensors, of which PyTorch records no operation."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, overrides

TELLS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""What tells the host the numbers in a tensor."""

SET_DATA = Tensor.data.__set__
"""What gives a tensor other memory, by `tensor.data = `."""


class Telling(overrides.TorchFunctionMode):
    """A scope that notes whether the host learns numbers.

    Attributes:
        tells: whether it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tells = False

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        self.tells |= function in TELLS
        return function(*args, **(kwargs or {}))


class OnlyWhatIsSeen(overrides.TorchFunctionMode):
    """A scope in which tensors keep the memory that they have.

    Raises:
        ValueError: one is given other memory, which would not be recorded.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if function == SET_DATA:
            raise ValueError("other memory for a tensor is not recorded")
        return function(*args, **(kwargs or {}))

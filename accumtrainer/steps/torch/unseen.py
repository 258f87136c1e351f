"""What Python does with tensors, of which PyTorch records no operation."""

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, overrides
from torch.utils import _python_dispatch

from accumtrainer.steps.torch.attributes import is_fake

TELLS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""What tells the host the numbers in a tensor."""

LIFTS = {
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
}
"""What is told of a tensor that `torch.tensor` has just made of numbers."""

SET_DATA = Tensor.data.__set__
"""What gives a tensor other memory, by `tensor.data = `."""


class _Watching(overrides.TorchFunctionMode):
    """A scope that looks at every function of PyTorch before it runs."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        self.look(function, args)
        return function(*args, **(kwargs or {}))

    def look(self, function: Any, args: Sequence[Any]) -> None:
        """Look at a function that is about to run, and at what it is given."""


class Telling(_Watching):
    """A scope that notes whether the host learns numbers.

    Attributes:
        tells: whether it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tells = False

    def look(self, function: Any, args: Sequence[Any]) -> None:
        """Note what tells them."""
        del args
        self.tells |= function in TELLS


class OnlyWhatIsSeen(_Watching):
    """A scope in which tensors keep the memory that they have.

    Those with numbers, which were there before, do not tell them.
    """

    def look(self, function: Any, args: Sequence[Any]) -> None:
        """Refuse what would not be recorded.

        Raises:
            ValueError: a tensor was to be given other memory, or to tell the
                host its numbers as they are now.
        """
        if function == SET_DATA:
            raise ValueError("other memory for a tensor is not recorded")
        if function in TELLS and not is_fake(args[0]):
            raise ValueError("the numbers in a constant are not recorded")


class NoneFromOutside(_python_dispatch.TorchDispatchMode):
    """A scope in which nothing is done with tensors that have numbers.

    They were there before, in an attribute of a layer or a callback's hands.
    What is recorded would not change them again. What is made of one number, as
    its double, PyTorch takes for a constant, which is as it was.
    """

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given: Any = (args, kwargs or {})
        tensors = [
            t for t in optree.tree_leaves(given) if isinstance(t, Tensor)
        ]
        if function not in LIFTS and not all(map(is_fake, tensors)):
            raise ValueError("what is done with a constant is not recorded")
        return function(*args, **(kwargs or {}))

"""What Python does with tensors, of which PyTorch records no operation."""

from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, overrides
from torch.utils import _python_dispatch

from accumtrainer.steps.torch.attributes import is_fake
from accumtrainer.steps.torch.schemas import arguments_changed_by

TELLS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
}
"""What tells the host the numbers in a tensor."""

NUMBER_OF = "_local_scalar_dense"
"""What reads the number in a tensor, as `item` does; it has no other name."""

READ = getattr(torch.ops.aten, NUMBER_OF).default

LIFTS = {
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
}
"""What is done to a tensor that `torch.tensor` has just made of numbers."""

ALIAS = torch.ops.aten.alias.default
"""What stands for a tensor that was there before."""

WITHOUT_MODES = "_disable_current_modes"
"""Has nothing recorded that is done within; it has no other name."""

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
    """A scope in which tensors with numbers are not changed, nor asked for one.

    They were there before, in an attribute of a layer. What is recorded would
    not change them again, and know the number as it was. What is made of one
    number, as its double, would be a constant to PyTorch, whoever changes the
    number later; here it is made of an alias, which has no number.

    Attributes:
        read: those tensors that have an alias, in the order of the aliases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []
        self._aliases: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given: Any = (args, kwargs or {})
        changed: Any = arguments_changed_by(function, *given)
        if any(map(_is_real, optree.tree_leaves(changed))):
            raise ValueError("changes of a constant are not recorded")
        if function is READ and not is_fake(args[0]):
            raise ValueError("the number in a constant is not recorded")
        if function not in LIFTS:
            given = optree.tree_map(self._alias, given)
        return function(*given[0], **given[1])

    def _alias(self, leaf: Any) -> Any:
        """Put an alias in the place of a tensor with a number."""
        if not _is_real(leaf):
            return leaf
        if leaf.numel() > 1:
            raise ValueError("what is done with a constant is not recorded")
        if id(leaf) not in self._aliases:
            self.read.append(leaf)
            # PyTorch keeps a weak reference of what it sees, and swaps no
            # tensors that have one.
            with getattr(_python_dispatch, WITHOUT_MODES)():
                unseen = leaf.detach()
            self._aliases[id(leaf)] = ALIAS(unseen)
        return self._aliases[id(leaf)]


def _is_real(leaf: Any) -> bool:
    """Whether it is a tensor that has numbers."""
    return isinstance(leaf, Tensor) and not is_fake(leaf)

"""What operations of PyTorch say of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

SCHEMA = "_schema"
"""Where an operation describes its arguments; PyTorch does so nowhere else."""

RUNNING = ("running_mean", "running_var")
"""Arguments that some operations change, and do not say so."""

SIZED_BY_NUMBERS = {"_pack_padded_sequence", "_to_sparse"}
"""Operations whose results are as large as numbers say, without a tag of it."""

NOT_ALIKE = {"mkldnn_rnn_layer", *SIZED_BY_NUMBERS}
"""Operations that do not always make the same of tensors of the same shapes.

The first makes less where no gradients are computed around it.
"""

SAY_NOTHING = {
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    *("batch_norm_update_stats", "batch_norm_gather_stats"),
    "batch_norm_gather_stats_with_counts",
}
"""Operations that do so, but for those that are told that nothing trains."""


def arguments_changed_by(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """List the arguments that an operation changes in place.

    Args:
        operation: one of `torch.ops`; what is none changes nothing.
        args: what it is called with.
        kwargs: by name.
    """
    schema = getattr(operation, SCHEMA, None)
    if schema is None:
        return []
    given = {
        argument.name: args[position]
        if position < len(args)
        else kwargs.get(argument.name)
        for position, argument in enumerate(schema.arguments)
    }
    says_nothing = _name_of(operation) in SAY_NOTHING
    moves = RUNNING if says_nothing and given.get("training", True) else ()
    return [
        given[argument.name]
        for argument in schema.arguments
        if argument.name in moves
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


def returns_its_first(operation: Any) -> bool:
    """Whether an operation returns its first argument, which it changes.

    A name tells nothing: `__lshift__` changes nothing, `out=` another one.
    """
    schema = getattr(operation, SCHEMA, None)
    if schema is None or len(schema.returns) != 1 or not schema.arguments:
        return False
    returned = schema.returns[0].alias_info
    first = schema.arguments[0].alias_info
    if returned is None or first is None or not first.is_write:
        return False
    return bool(returned.before_set & first.before_set)


def can_run_again(operation: Any) -> bool:
    """Whether an operation does the same in a row of recorded ones.

    Not where it gives its argument another shape, which others have by now.
    """
    is_alike = torch.Tag.inplace_view not in getattr(operation, "tags", ())
    return is_alike and _name_of(operation) not in NOT_ALIKE


def takes_only_what_builtins_take(operation: Any) -> bool:
    """Whether PyTorch's own function takes the same arguments.

    None takes a list in which tensors are missing, as an index has it, or the
    names of several results to be filled; those that reduce a loss have another
    default.
    """
    return not any(
        argument.name == "reduction"
        or (argument.is_out and argument.name != "out")
        or str(argument.type) == "List[Optional[Tensor]]"
        for argument in getattr(operation, SCHEMA).arguments
    )


def _name_of(operation: Any) -> str:
    packet = getattr(operation, "overloadpacket", None)
    return getattr(packet, "__name__", "")

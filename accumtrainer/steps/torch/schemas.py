"""What operations of PyTorch say of themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = "_schema"
"""Where an operation describes its arguments; PyTorch does so nowhere else."""

RUNNING = ("running_mean", "running_var")
"""Arguments of `native_batch_norm` that it changes, and does not say so."""

SAY_NOTHING = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}


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
    found = []
    says_nothing = operation.overloadpacket.__name__ in SAY_NOTHING
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        is_running = says_nothing and argument.name in RUNNING
        if is_running or (alias is not None and alias.is_write):
            is_given = position < len(args)
            value = args[position] if is_given else kwargs.get(argument.name)
            found.append(value)
    return found


def takes_only_what_builtins_take(operation: Any) -> bool:
    """Whether PyTorch's own function takes the same arguments.

    None takes a list in which tensors are missing, as an index has it, and
    those that reduce a loss have another default.
    """
    return not any(
        argument.name == "reduction"
        or str(argument.type) == "List[Optional[Tensor]]"
        for argument in getattr(operation, SCHEMA).arguments
    )

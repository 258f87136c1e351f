"""Functions run once, to see what they do, of which nothing stays."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import optree
import torch
from torch.utils import _python_dispatch

from accumtrainer.keras_api import flatten_layers
from accumtrainer.keras_api.types import Model, Tensor, Variable
from accumtrainer.steps.looks import Looks
from accumtrainer.steps.torch.attributes import (
    Made,
    all_metrics,
    attributes_put_back,
    has_tensors,
    modules_of,
)
from accumtrainer.steps.torch.host_draws import host_draws_put_back
from accumtrainer.steps.torch.iterators import iterators_put_back
from accumtrainer.steps.torch.layouts import Kernels
from accumtrainer.steps.torch.looks import objects_of
from accumtrainer.steps.torch.schemas import (
    SCHEMA,
    SIZED_BY_NUMBERS,
    arguments_changed_by,
)
from accumtrainer.steps.torch.seeds import GeneratorsPutBack
from accumtrainer.steps.torch.unseen import Telling

aten = torch.ops.aten

TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""What PyTorch says of operations that tell numbers, or sizes made of them."""


class Trial(_python_dispatch.TorchDispatchMode):
    """A scope in which tensors change that were there before, for a while.

    What is changed in place, the memory of a variable or an array of the
    user's, is copied first, and put back at the end.

    Args:
        variables: that it may change, and convolutions read.
        watch: function of an operation, what it is given and what it returns.

    Attributes:
        operations: the names of those that were run.
        fixes_sizes: whether no size may depend on the numbers in a tensor.
        kernels: which of them convolutions have read.
    """

    def __init__(
        self,
        variables: Iterable[Variable],
        watch: Callable[..., None] = lambda *seen: None,
    ):
        super().__init__()
        self._variables = list(variables)
        self._watch = watch
        self.operations: set[str] = set()
        self.fixes_sizes = True
        self._host = Telling()
        self._generators = GeneratorsPutBack()
        self.kernels = Kernels(self._variables)
        self._made: set[int | None] = {None}
        self._kept: dict[int | None, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        self.operations.add(function.overloadpacket.__name__)
        self.fixes_sizes &= not _reads_numbers(function, args)
        written = arguments_changed_by(function, args, kwargs)
        for tensor in _tensors_in(written):
            key = _address(tensor)
            if key not in self._made and key not in self._kept:
                storage = tensor.untyped_storage()
                self._kept[key] = storage, storage.clone()
        result = function(*args, **kwargs)
        self.kernels.watch(function, args, result)
        self._watch(function, args, kwargs, result)
        if all(r.alias_info is None for r in getattr(function, SCHEMA).returns):
            self._made |= set(map(_address, _tensors_in(result)))
        return result

    def __enter__(self) -> "Trial":
        self._generators.__enter__()
        self._host.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._host.__exit__(*error)
        self._generators.__exit__(*error)
        self.fixes_sizes &= not self._host.tells
        for storage, before in self._kept.values():
            storage.copy_(before)

    def changed(self) -> list[Variable]:
        """List the variables whose memory has been changed in place."""
        return [
            v
            for v in self._variables
            if v.value.untyped_storage().data_ptr() in self._kept
        ]


class UnwatchedTrial:
    """The same where nobody can watch; what has changed shows afterwards.

    Args:
        variables: as there.
    """

    fixes_sizes = False

    def __init__(self, variables: Iterable[Variable]):
        self._variables = list(variables)
        self.operations: set[str] = set()
        self.kernels = Kernels([])

    def __enter__(self) -> "UnwatchedTrial":
        self._before = [v.value.detach().clone() for v in self._variables]
        return self

    def __exit__(self, *error: Any) -> None:
        pairs = zip(self._variables, self._before, strict=True)
        for variable, before in pairs:
            variable.value.detach().copy_(before)

    def changed(self) -> list[Variable]:
        """List the variables that have other numbers than before."""
        pairs = zip(self._variables, self._before, strict=True)
        return [
            variable
            for variable, before in pairs
            if not torch.equal(
                _as_bytes(variable.value.detach()), _as_bytes(before)
            )
        ]


@contextlib.contextmanager
def unchanged(
    model: Model | None, looks: Looks, made: Made | None
) -> Iterator[list[str]]:
    """Put back what layers, and others, keep beside their variables.

    Args:
        model: whose layers they are.
        looks: what code reads.
        made: as of `attributes_put_back`.

    Returns:
        List that has the names of what they keep that no function which is
        recorded would change, once the scope has ended.
    """
    layers = [] if model is None else flatten_layers(model)
    # Normalizations do not say that they change theirs.
    before = {b: b.clone() for layer in layers for b in layer.buffers()}
    numbers: list[str] = []
    metrics = all_metrics(model) if layers else []
    modules = modules_of(layers)
    known = {id(one) for one in [*metrics, *modules]}
    others = [one for one in objects_of(layers) if id(one) not in known]
    # As they are built, layers draw their seeds.
    is_built = model is not None and model.built
    put_back = host_draws_put_back if is_built else contextlib.nullcontext
    try:
        with (
            put_back(looks.things) as drawn,
            iterators_put_back([*modules, *metrics, *others]) as iterators,
            attributes_put_back(modules, made) as of_layers,
            attributes_put_back([*metrics, *others], made) as of_others,
        ):
            yield numbers
    finally:
        for buffer, value in before.items():
            buffer.copy_(value)
    numbers += [*(drawn if is_built else ()), *iterators]
    numbers += of_others
    numbers += (name for name, old in of_layers.items() if not has_tensors(old))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Look at a tensor's bytes, as no number equals a NaN."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _reads_numbers(function: Any, args: Any) -> bool:
    """Whether the host learns numbers, or a size depends on them."""
    if function.overloadpacket is aten.index:
        masks = (torch.bool, torch.uint8)
        return any(t.dtype in masks for t in _tensors_in(args[1]))
    is_sized = function.overloadpacket.__name__ in SIZED_BY_NUMBERS
    return is_sized or not TAGS.isdisjoint(function.tags)


def _address(tensor: Tensor) -> int | None:
    """Say where a tensor's memory is; `None` if it is a wrapper without."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None  # what is differentiated forwards holds two others


def _tensors_in(nest: Any) -> Iterator[Tensor]:
    for leaf in optree.tree_leaves(nest):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf

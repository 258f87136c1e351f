"""The random numbers that Keras draws on PyTorch, from states of its own.

Keras makes a generator for every draw, and seeds it by a number that it reads
from a tensor. Nothing that is recorded can read one, so there a draw becomes an
operation of its own: it is given the seed as a tensor, and makes the generator
when it runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accumtrainer.keras_api import flatten_layers, keras, ops
from accumtrainer.keras_api.torch_draws import (
    draw_seed,
    give_seed,
    lacks_seed,
    making_generators,
)
from accumtrainer.keras_api.types import Model, Tensor
from accumtrainer.steps.torch.tensors import default_device


def draw_from_own_states(model: Model) -> None:
    """Have the layers of a model draw from the states of their generators.

    Dropout draws from the one state of PyTorch, which belongs to the process,
    where it was given no seed. Nobody could repeat what a window has drawn, nor
    go on from a checkpoint.
    """
    for layer in flatten_layers(model):
        for value in vars(layer).values():
            is_generator = isinstance(value, keras.random.SeedGenerator)
            if is_generator and lacks_seed(value):
                seed, _ = ops.convert_to_numpy(value.state).tolist()
                give_seed(value, seed)


@contextlib.contextmanager
def recorded_draws() -> Iterator[None]:
    """Make a scope in which draws of Keras can be recorded.

    Raises:
        ValueError: one was not, as what is rematerialized draws unseen; or
            code seeds a generator itself, which would be done but once.
    """
    seeds: dict[int, tuple[torch.Generator, Tensor]] = {}

    def make(seed: Any) -> torch.Generator:
        generator = torch.Generator()
        seeds[id(generator)] = generator, draw_seed(seed)
        return generator

    with making_generators(make), _marked_state(), _Draws(seeds) as draws:
        yield
        _refuse_seeding()
    if draws.seen != set(seeds):
        raise ValueError("a draw is not recorded")


@contextlib.contextmanager
def _marked_state() -> Iterator[None]:
    """Make a scope in which PyTorch's own state has a seed that tells it."""
    own = torch.default_generator
    before = own.get_state()
    own.manual_seed(MARK)
    try:
        yield
    finally:
        own.set_state(before)


def _refuse_seeding() -> None:
    """Refuse code that has seeded PyTorch's own state."""
    if torch.initial_seed() != MARK:
        raise ValueError("PyTorch's own state is seeded")


class GeneratorsPutBack(TorchFunctionMode):
    """A scope at whose end generators are as they were.

    Their states are noted before functions draw from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for generator, state in self._states.values():
            generator.set_state(state)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._states:
            self._states[id(generator)] = generator, generator.get_state()
        return function(*args, **kwargs)


MARK = 0x6B657261735F6F6E
"""A seed that nobody else chooses."""


class _Draws(TorchFunctionMode):
    """Records functions that are given one of some generators.

    Args:
        seeds: by the id of a generator, it and its seed.

    Attributes:
        seen: the ids of those that a function was given.
    """

    def __init__(self, seeds: dict[int, tuple[torch.Generator, Tensor]]):
        super().__init__()
        self._seeds = seeds
        self.seen: set[int] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        _refuse_seeding()
        generator = kwargs.get("generator")
        known = self._seeds.get(id(generator))
        if known is None and generator is not None:
            raise ValueError("a generator is none that Keras has made")
        if known is None:
            return function(*args, **kwargs)
        self.seen.add(id(kwargs.pop("generator")))
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        numbers = [None if isinstance(a, torch.Tensor) else a for a in args]
        index = _index_of(function, numbers, kwargs)
        return DRAW(known[1], inputs, index)


_calls: list[tuple[Callable[..., Tensor], list[Any], dict[str, Any]]] = []
"""Functions that draw, with what they are given beside tensors."""


def _index_of(function: Any, numbers: list[Any], named: dict[str, Any]) -> int:
    call = function, numbers, named
    if call not in _calls:
        _calls.append(call)
    return _calls.index(call)


def _run(index: int, inputs: list[Tensor], **generator: Any) -> Tensor:
    function, numbers, named = _calls[index]
    tensors = iter(inputs)
    given = [next(tensors) if number is None else number for number in numbers]
    return function(*given, **named, **generator)


def _draw(
    seed: torch.Tensor, inputs: list[torch.Tensor], index: int
) -> torch.Tensor:
    device = inputs[0].device if inputs else default_device()
    generator = torch.Generator(device)
    generator.manual_seed(int(seed) & 0xFFFFFFFF)
    return _run(index, inputs, generator=generator)


def _draw_shape(seed: Tensor, inputs: list[Tensor], index: int) -> Tensor:
    del seed
    return torch.empty_like(_run(index, inputs))


def _draw_rows(
    info: Any,
    in_dims: tuple,
    seed: Tensor,
    inputs: list[Tensor],
    index: int,
) -> tuple[Tensor, int]:
    """Draw for rows that are computed at once, one by one."""
    along, dims, _ = in_dims
    rows = []
    for row in range(info.batch_size):
        own = seed if along is None else seed.select(along, row)
        given = [
            tensor if dim is None else tensor.select(dim, row)
            for tensor, dim in zip(inputs, dims, strict=True)
        ]
        rows.append(DRAW(own, given, index))
    return torch.stack(rows), 0


_operation = torch.library.custom_op(
    "accumtrainer::draw", _draw, mutates_args=()
)
_operation.register_fake(_draw_shape)
_operation.register_vmap(_draw_rows)
DRAW = torch.ops.accumtrainer.draw

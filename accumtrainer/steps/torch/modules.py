"""Modules of PyTorch within a model of Keras.

Keras knows of their parameters, not of their buffers, such as the statistics of
`torch.nn.BatchNorm1d`. These get variables here, so that they are saved and put
back as those of layers are. Within a program a variable has other tensors than
the memory of a module, so a module computes with those of the scope that it is
called in, and what becomes of its buffers is assigned to their variables.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.func import functional_call

from accumtrainer.keras_api import flatten_layers, keras
from accumtrainer.keras_api.types import Model, Tensor, Variable
from accumtrainer.steps.torch.scopes import innermost


class Modules:
    """The modules of PyTorch that are layers of a model.

    Args:
        model: built, or `None`, which has none.

    Attributes:
        model: the same.
        buffers: variables that share the memory of the modules' buffers, of
            those that modules save.
    """

    def __init__(self, model: Model | None):
        self.model = model
        layers = [] if model is None else flatten_layers(model)
        wrappers = [
            layer
            for layer in layers
            if isinstance(layer, keras.layers.TorchModuleWrapper)
            and not isinstance(layer.module, torch.jit.ScriptModule)
        ]
        known: dict[int, Variable] = {
            id(v.value): v for layer in wrappers for v in layer.variables
        }
        self.buffers: list[Variable] = []
        self._modules: list[_Module] = []
        for layer in wrappers:
            saved = layer.module.state_dict().keys()
            for name, buffer in layer.module.named_buffers():
                if name in saved and id(buffer) not in known:
                    known[id(buffer)] = _sharing(buffer, f"{layer.path}/{name}")
                    self.buffers.append(known[id(buffer)])
            self._modules.append(_Module(layer.module, known))

    @contextlib.contextmanager
    def computing(
        self, *, is_recording: bool = False, is_trial: bool = False
    ) -> Iterator[None]:
        """Make a scope in which modules compute with variables' values.

        Args:
            is_recording: whether tensors have no numbers.
            is_trial: whether somebody asks which variables are assigned, and
                those that have the same numbers as before are not to be.
        """
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                if is_recording:
                    run = module.run_without_buffers
                else:
                    run = module.run_in_trial if is_trial else module.run
                stack.enter_context(module.running(run))
            yield

    def settle(self) -> None:
        """Have buffers that others have replaced share memory again."""
        for module in self._modules:
            module.settle()


def show_parameters(model: Model | None) -> None:
    """Have the `parameters` of a model, as a module, list all of them.

    Keras does not note those of layers that are built in a scope.
    """
    for layer in [] if model is None else flatten_layers(model):
        noted = layer.torch_params
        for variable in layer.variables:
            if variable.path not in noted:
                noted[variable.path] = variable.value


class _Module:
    """A module that is a layer, whose tensors belong to variables.

    Args:
        module: the layer's.
        known: variables by the id of the parameter or buffer they share.
    """

    def __init__(self, module: torch.nn.Module, known: dict[int, Variable]):
        self._module = module
        self._forward = module.forward
        self._body = _Body(module, self._forward)
        self._parameters = {
            name: known[id(p)]
            for name, p in self._body.named_parameters()
            if id(p) in known
        }
        self._buffers = {
            name: known[id(b)]
            for name, b in self._body.named_buffers()
            if id(b) in known
        }
        self._own = self._tensors()
        self._is_running = False

    def _tensors(self) -> dict[str, Tensor]:
        """Look up what the module computes with where nobody interferes."""
        body = self._body
        return {**dict(body.named_parameters()), **dict(body.named_buffers())}

    @contextlib.contextmanager
    def running(self, run: Callable[..., Any]) -> Iterator[None]:
        """Make a scope in which another function runs the module."""
        own = vars(self._module).get("forward")
        self._module.forward = run
        try:
            yield
        finally:
            del self._module.forward
            if own is not None:
                self._module.forward = own

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with what variables have in the innermost scope."""
        return self._run(args, kwargs, lambda old, new: True)

    def run_in_trial(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and assign only what has changed."""
        return self._run(args, kwargs, lambda old, new: not old.equal(new))

    def run_without_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module if it has no buffers.

        Normalizations change theirs in place, and do not tell what records.
        """
        if self._buffers:
            raise ValueError("buffers of modules of PyTorch are not recorded")
        return self._run(args, kwargs, lambda old, new: True)

    def _run(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        changes: Callable[[Tensor, Tensor], bool],
    ) -> Any:
        if self._is_running:
            return self._forward(*args, **kwargs)  # it calls itself
        # What a caller has put there, as `functional_call` does, is computed
        # with as it is.
        found = self._tensors()
        own = {name for name, t in self._own.items() if found.get(name) is t}
        values = {
            n: _value_of(v) for n, v in self._parameters.items() if n in own
        }
        buffers = {n: v for n, v in self._buffers.items() if n in own}
        before = {n: v.value.detach() for n, v in buffers.items()}
        tensors = {n: tensor.clone() for n, tensor in before.items()}
        tensors |= {n: t for n, t in values.items() if t is not None}
        self._is_running = True
        try:
            result = functional_call(self._body, tensors, args, kwargs)
        finally:
            self._is_running = False
        for name, variable in buffers.items():
            if changes(before[name], tensors[name]):
                variable.assign(tensors[name].detach())
        return result

    def settle(self) -> None:
        """Have buffers that others have replaced share memory again."""
        for path, variable in self._buffers.items():
            owner, _, name = path.rpartition(".")
            module, memory = self._body.get_submodule(owner), variable.value
            buffer = getattr(module, name)
            if buffer.data_ptr() != memory.data_ptr():
                variable.assign(buffer)
                setattr(module, name, memory.detach())
            self._own[path] = getattr(module, name)


class _Body(torch.nn.Module):
    """What a module computes, without what others have hooked to its call."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self.module = module
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _sharing(buffer: Tensor, name: str) -> Variable:
    """Make a variable whose memory is that of a buffer."""
    return keras.Variable(
        buffer,
        dtype=keras.backend.standardize_dtype(buffer.dtype),
        trainable=False,
        autocast=False,
        name=name.replace("/", "."),
    )


def _value_of(variable: Variable) -> Tensor | None:
    """Return the tensor that a parameter is in here, if it is another one.

    A layer may differentiate by the parameter that it finds in its module.
    """
    scope = innermost()
    if scope.parameter(variable) is not None:
        return None
    return scope.get_current_value(variable)

"""A device of PyTorch that is no CPU, on a machine that has none.

As a plugin of pytest (`-p accelerator`) it has Keras put everything there, as
it would on a GPU. What stays on the CPU then, or is read by NumPy as if it were
there, is an error, and NumPy's is one too where somebody catches it. Its memory
is the host's, and the CPU computes.

PyTorch has a place for a device that it does not know, "private use one", which
`accelerator.cpp` fills.
"""

import os
import pathlib
import sys
import traceback
import types

import pytest
import torch
from torch.utils import cpp_extension

NAME = "pretend"

PACKAGE = pathlib.Path(__file__).parents[2] / "accumtrainer"

GLOO = "Gloo exchanges nothing between devices of this kind"

LEFT_OUT = {
    "test_claims_about_replicas_hold_of_two_processes": GLOO,
    "test_processes.py": GLOO,
    "test_values_left_out_by_what_the_host_has_read_do_not_count": "its losses "
    "have NumPy read tensors of the CPU",
}
"""Why some tests, or all of a file, are left out on this device."""


class _Current:
    """Makes one of its devices the current one; there is one."""

    def __init__(self, device):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def make_module():
    """Make what PyTorch asks about the device, as it asks `torch.cuda`."""
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = _Current
    module.synchronize = lambda device=None: None
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._is_in_bad_fork = lambda: False
    state = torch.Generator(device=NAME)
    module.get_rng_state = lambda device=None: state.get_state()
    module.set_rng_state = lambda new, device=None: state.set_state(new)
    return module


def build():
    """Build the device, or find what was built of it before."""
    source = pathlib.Path(__file__).with_suffix(".cpp")
    cpp_extension.load("accelerator_of_tests", [str(source)])


def use():
    """Have Keras use the device, in this process alone."""
    build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    os.environ["KERAS_TORCH_DEVICE"] = NAME
    import keras

    # The processes that tests start have no such device.
    del os.environ["KERAS_TORCH_DEVICE"]
    assert keras.ops.zeros(()).device.type == NAME
    for name in ("numpy", "__array__"):
        setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))


READ = []
"""The lines of the package that have had NumPy read the device."""


def noting(read):
    """Have a method that makes an array of a tensor note who calls it."""

    def method(tensor, *arguments, **options):
        if tensor.device.type == NAME and not options.get("force"):
            caller = traceback.extract_stack(limit=2)[0]
            if pathlib.Path(caller.filename).is_relative_to(PACKAGE):
                READ.append(f"{caller.filename}:{caller.lineno}")
        return read(tensor, *arguments, **options)

    return method


def pytest_runtest_teardown(item):
    """Fail where the package caught an error of the device."""
    read, READ[:] = READ[:], []
    assert not read, read


def pytest_collection_modifyitems(items):
    """Leave out what the device cannot do."""
    for item in items:
        for name in (item.path.name, item.originalname):
            if name in LEFT_OUT:
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT[name]))


if __name__ != "__main__":
    use()
else:
    try:
        build()
    except Exception as error:
        sys.exit(f"The tests on an accelerator are left out: {error}")

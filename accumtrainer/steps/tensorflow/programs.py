"""TensorFlow programs of functions, found by the shapes of what they take."""

import functools
from typing import Any, cast

import numpy as np
import optree
import tensorflow as tf

from accumtrainer.data.batches import ALIGNMENT, empty_for_device


class Compiled:
    """A `tf.function` that looks its programs up by shape and type alone.

    `tf.function` itself takes longer to find the program for some nested
    arguments than a small model takes to run it.

    Args:
        function: function of nests of tensors.
        jit_compile: bool, whether XLA compiles it.
        shares_memory: bool, whether to compute with arrays where they are.
    """

    def __init__(self, function, jit_compile, *, shares_memory):
        self._function = function
        self._jit_compile = jit_compile
        self._to_tensor = to_tensor if shares_memory else tf.convert_to_tensor
        self._programs = {}
        self._structures = {}

    def expect(self, calls):
        """Trace one program for calls to come, whose shapes differ.

        The first of them would be traced by itself, for its own shape alone.
        """
        strangers, kinds = {}, set()
        for arguments in calls:
            leaves, treedef = optree.tree_flatten(cast(Any, arguments))
            key = _key(leaves, treedef)
            if key not in self._programs:
                strangers[key] = leaves
                kinds.add((treedef, *map(_kind, leaves)))
        if len(strangers) > 1 and len(kinds) == 1:
            alike = zip(*strangers.values(), strict=True)
            program = self._trace(list(map(_joint_spec, alike)), treedef)
            self._programs |= dict.fromkeys(strangers, program)

    def __call__(self, *arguments):
        leaves, treedef = optree.tree_flatten(cast(Any, arguments))
        key = _key(leaves, treedef)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._trace(leaves, treedef)
        return program(*map(self._to_tensor, leaves))

    def _trace(self, leaves, treedef):
        # What reduces retracing joins shapes of different ranks into one of
        # unknown rank, with which a loss can do nothing.
        structure = treedef, *(len(leaf.shape) for leaf in leaves)
        if structure not in self._structures:
            self._structures[structure] = tf.function(
                functools.partial(self._run, treedef),
                jit_compile=self._jit_compile,
                reduce_retracing=True,
                autograph=False,
            )
        specs = map(to_spec, leaves)
        return self._structures[structure].get_concrete_function(*specs)

    def _run(self, treedef, *leaves):
        return self._function(*optree.tree_unflatten(treedef, leaves))


def _key(leaves, treedef):
    return (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))


def _kind(leaf):
    return len(leaf.shape), leaf.dtype


def _joint_spec(leaves):
    """Describe tensors of one rank and type, whatever their sizes."""
    sizes = zip(*(leaf.shape for leaf in leaves), strict=True)
    shape = [n if {n} == set(others) else None for n, *others in sizes]
    return tf.TensorSpec(shape, leaves[0].dtype)


def to_tensor(leaf):
    """Make a tensor of an array, which shares the memory of large windows.

    Nobody writes to that any more. `tf.convert_to_tensor` would copy it, and
    takes ten times as long to find out that it is an array.
    """
    if not isinstance(leaf, np.ndarray) or not _can_share(leaf.dtype):
        return tf.convert_to_tensor(leaf)
    flags = leaf.flags
    is_sharable = flags.c_contiguous and flags.writeable
    # TensorFlow does not look where memory begins, and fails later.
    if not is_sharable or leaf.ctypes.data % ALIGNMENT:
        copied = empty_for_device(leaf.shape, leaf.dtype)
        copied[...] = leaf
        leaf = copied
    return tf.experimental.dlpack.from_dlpack(leaf.__dlpack__())


def _can_share(dtype):
    return dtype.kind in "iuf" and dtype.isnative


def to_spec(leaf):
    """Describe an array or tensor by shape and type, `None` by `None`."""
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)

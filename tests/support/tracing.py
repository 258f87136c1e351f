"""Tracing by TensorFlow without what only its error messages would tell."""

import functools


def leave_out_stacks():
    """Have TensorFlow not note where in Python an operation was made.

    It does so for every operation, which takes a tenth of the time of tests
    that trace. No public name turns it off; a test tells if this one no longer
    does.
    """
    from tensorflow.python.framework import ops

    ops._create_c_op = functools.partial(
        ops._create_c_op, extract_traceback=False
    )

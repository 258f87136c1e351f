"""The compiled step: how a window is run on a backend.

`backend.py` is the interface of a backend. Only the folders named after one
import it: their own `backend.py` implements that interface.
"""

import functools
import importlib.util
import pkgutil
from typing import Any, Literal

from accumtrainer import errors
from accumtrainer.keras_api import BACKEND
from accumtrainer.steps.backend import Backend
from accumtrainer.steps.plan import Plan, choose_plan, should_compile_evaluation
from accumtrainer.steps.report import CLOCKS, Report
from accumtrainer.steps.step import EvaluationStep, Step

__all__ = [
    "CLOCKS",
    "Backend",
    "EvaluationStep",
    "Plan",
    "Report",
    "Step",
    "choose_plan",
    "make_backend",
    "should_compile_evaluation",
    "should_run_eagerly",
]


def make_backend(
    *,
    run_eagerly: bool = False,
    model: Any | None = None,
    jit_compile: bool | Literal["auto"] = "auto",
) -> Backend:
    """Make the functions of the backend Keras runs on.

    Args:
        run_eagerly: whether to run everything as plain Python.
        model: `keras.Model` whose replicas share windows out, if it has
            several; `None` to keep to one device.
        jit_compile: see `Backend`.

    Raises:
        ImportError: the backend is not supported.
    """
    return _backend_class(BACKEND)(
        model,
        run_eagerly=run_eagerly,
        jit_compile=jit_compile,
    )


def should_run_eagerly(model: Any) -> bool:
    """Whether nothing is to be compiled, as Keras would see it.

    Args:
        model: `keras.Model`, whose `compile` may have been told so; or it was
            the backend, by `tf.config.run_functions_eagerly` or
            `jax.disable_jit`.
    """
    return model.run_eagerly or _backend_class(BACKEND).is_told_to_run_eagerly()


@functools.cache  # `fit` asks before every batch
def _backend_class(name: str) -> type[Backend]:
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        known = sorted(
            m.name for m in pkgutil.iter_modules(__path__) if m.ispkg
        )
        raise ImportError(
            errors.UNSUPPORTED_BACKEND.format(
                supported=" or ".join(known), backend=name, first=known[0]
            )
        )
    return importlib.import_module(f"{module}.backend").THE_BACKEND

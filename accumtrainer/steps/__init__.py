"""The compiled step: how a window is run on a backend.

Only the folders named after a backend import one: their `backend.py` says what
a backend must do itself, the files beside it how.
"""

from accumtrainer import errors
from accumtrainer.keras_api import BACKEND, current_distribution, strategy_of
from accumtrainer.steps.batchwise import (
    BatchwiseProgram,
    BatchwiseStep,
    late_logs,
)
from accumtrainer.steps.plan import Plan, choose_plan, should_compile_evaluation
from accumtrainer.steps.step import CLOCKS, EvaluationStep, Report, Step

__all__ = [
    "CLOCKS",
    "BatchwiseProgram",
    "BatchwiseStep",
    "EvaluationStep",
    "Plan",
    "Report",
    "Step",
    "choose_plan",
    "late_logs",
    "make_backend",
    "should_compile_evaluation",
]


def make_backend(*, run_eagerly=False, model=None):
    """Make the functions of the backend Keras runs on.

    Args:
        run_eagerly: bool, whether to run everything as plain Python.
        model: `keras.Model` whose replicas share windows out, if it has
            several; `None` to keep to one device.

    Returns:
        An object with the methods of `TensorFlowBackend`.

    Raises:
        ImportError: the backend is not supported.
    """
    if BACKEND == "tensorflow":
        from accumtrainer.steps.tensorflow.backend import TensorFlowBackend

        strategy = None if model is None else strategy_of(model)
        return TensorFlowBackend(run_eagerly=run_eagerly, strategy=strategy)
    if BACKEND == "jax":
        from accumtrainer.steps.jax.backend import JaxBackend

        distribution = None if model is None else current_distribution()
        return JaxBackend(run_eagerly=run_eagerly, distribution=distribution)
    raise ImportError(errors.UNSUPPORTED_BACKEND.format(backend=BACKEND))

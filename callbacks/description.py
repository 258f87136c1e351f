"""A training told as plain values: what it was configured to be."""

import dataclasses
import inspect
import math
import platform
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from accumtrainer.keras_api import (
    BACKEND,
    KERAS_NAME,
    keras,
    optimizers_of,
    schedule_of,
)

FIT = ("epochs", "steps", "batch_size", "samples")
LIBRARIES = ("tensorflow", "jax", "jaxlib", "numpy")


def describe_training(trainer: Any, params: dict[str, Any]) -> dict[str, Any]:
    """List everything that a Trainer and a `fit` were configured with.

    Args:
        trainer: `Trainer`.
        params: dict, the `params` of a callback.

    Returns:
        Dict of what JSON knows.
    """
    return as_plain(
        {
            "accumulation": trainer.accumulation,
            "loss_scale": trainer.loss_scale,
            "optimizer": _told(_describe_optimizer, trainer.optimizer),
            "schedule": _told(
                _describe_schedule, schedule_of(trainer.optimizer)
            ),
            "model": _told(_describe_model, trainer.model),
            "fit": {name: params.get(name) for name in FIT},
            "command": shlex.join(sys.argv),
            "trainer": type(trainer).__name__,
            "plan": str(trainer.plan),
            "backend": BACKEND,
            "versions": _versions(),
        }
    )


def as_plain(value: Any) -> Any:
    """Turn options of any kind into what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return str(value)


def _told(describe: Callable[[Any], Any], part: Any) -> Any:
    """Describe a part; one that cannot be described has its class alone.

    It may be of a user's class, which trains without what is asked here.
    """
    try:
        return as_plain(describe(part))
    except Exception:
        return {"class_name": type(part).__name__}


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    """Read the arguments of an optimizer, by the names of its constructor.

    Not by `get_config`, which imports TensorFlow where there is a schedule.
    """
    names: list[str] = []
    for cls in (keras.optimizers.Optimizer, type(optimizer)):
        names += inspect.signature(cls.__init__).parameters
    values = {name: getattr(optimizer, name, None) for name in names}
    for name in ("self", "args", "kwargs"):
        values.pop(name, None)
    is_one, members = optimizers_of(optimizer)
    if is_one:
        has_schedule = schedule_of(optimizer) is not None
        rate = None if has_schedule else float(optimizer.learning_rate)
        values["learning_rate"] = rate
    else:
        for name in ("learning_rate", "optimizer_map"):
            values.pop(name, None)
        values["optimizers"] = [
            _describe_optimizer(member)
            | {"schedule": _told(_describe_schedule, schedule_of(member))}
            for member in members
        ]
    return {"class_name": type(optimizer).__name__, **values}


def _describe_schedule(schedule: Any) -> Any:
    if schedule is None:
        return None
    return {"class_name": type(schedule).__name__} | schedule.get_config()


def _describe_model(model: Any) -> dict[str, Any]:
    def count(variables: list[Any]) -> int:
        return sum(math.prod(variable.shape) for variable in variables)

    lines = []
    # A model may have a `summary` of its own, which takes something else.
    keras.Model.summary(model, print_fn=lambda line, **_: lines.append(line))
    return {
        "name": model.name,
        "class_name": type(model).__name__,
        "parameters": count(model.weights),
        "trainable_parameters": count(model.trainable_weights),
        "dtype_policy": keras.config.dtype_policy().name,
        "summary": "\n".join(lines),
    }


def _versions() -> dict[str, str]:
    versions = {
        "accumtrainer": metadata.version("accumtrainer"),
        "python": platform.python_version(),
        KERAS_NAME: keras.__version__,
    }
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions

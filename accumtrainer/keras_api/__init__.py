"""The one place that decides which Keras this library stands on.

Every other module imports `keras`, `ops` and `tree` from here. What differs
between Keras 3 and Keras Core is in `keras3.py` and `keras_core.py`,
which nothing else imports. Private names are used only there and by the
functions at the end of this file, each with its reason;
`tests/keras_api/test_keras_api.py` notices when one of them changes.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api.types import (
    Layer,
    Metric,
    Model,
    Nest,
    Optimizer,
    Tensor,
    Variable,
)

KERAS_NAME = os.environ.get("ACCUMTRAINER_KERAS", "keras")

if KERAS_NAME == "keras":
    import keras
    from keras import ops, tree

    from accumtrainer.keras_api.keras3 import (
        ACTIVITY_LOSSES_ARE_MEANS,
        check_feature,
        check_loss_support,
        check_replica_support,
        check_support,
        compile_losses,
        keras_mask,
        looking_up_anything,
        losses_of_layers,
        losses_weighed_by,
        make_metrics_of_losses,
        metric_names,
        set_keras_mask,
    )
elif KERAS_NAME == "keras_core":
    import keras_core as keras

    from accumtrainer.keras_api.keras_core import (
        ACTIVITY_LOSSES_ARE_MEANS,
        check_feature,
        check_loss_support,
        check_replica_support,
        check_support,
        compile_losses,
        keras_mask,
        looking_up_anything,
        losses_of_layers,
        losses_weighed_by,
        make_metrics_of_losses,
        metric_names,
        ops,
        set_keras_mask,
        tree,
    )
else:
    raise ImportError(errors.UNKNOWN_KERAS.format(name=KERAS_NAME))

OTHER_KERAS_NAME = "keras" if KERAS_NAME == "keras_core" else "keras_core"

BACKEND = keras.backend.backend()

# Whether Keras takes a loss of several values for their sum: that is what a
# tape's gradient of them is, and elsewhere an error.
DESCENDS_SUMS = BACKEND == "tensorflow"

__all__ = [
    "ACTIVITY_LOSSES_ARE_MEANS",
    "BACKEND",
    "DESCENDS_SUMS",
    "KERAS_NAME",
    "OTHER_KERAS_NAME",
    "by_path",
    "check_feature",
    "check_loss_support",
    "check_replica_support",
    "call_predict_step",
    "check_support",
    "compiled_metrics",
    "compile_losses",
    "compiled_arguments",
    "copy_mask",
    "current_distribution",
    "flatten_layers",
    "give_rate",
    "given_rate",
    "global_limit",
    "is_known_to",
    "is_overwritten",
    "keras",
    "keras_mask",
    "looking_up_anything",
    "set_keras_mask",
    "leaf_names",
    "losses_of_layers",
    "losses_weighed_by",
    "make_metrics_of_losses",
    "metric_names",
    "noting_activity",
    "ops",
    "overrides",
    "read_metrics",
    "reads_metrics_itself",
    "refuse_other_keras",
    "optimizers_of",
    "schedule_of",
    "strategy_of",
    "take_initial_epoch",
    "tree",
    "untold_results",
]


def refuse_other_keras(name: str, *things: Any) -> None:
    """Refuse objects made with the Keras that is not in use here.

    Args:
        name: the argument as the user wrote it.
        things: objects of any kind.

    Raises:
        TypeError: one of them is of a class of the other Keras.
    """
    for thing in things:
        packages = {c.__module__.partition(".")[0] for c in type(thing).__mro__}
        if OTHER_KERAS_NAME in packages:
            raise TypeError(
                errors.OTHER_KERAS.format(
                    name=name,
                    received=type(thing).__name__,
                    here=KERAS_NAME,
                    other=OTHER_KERAS_NAME,
                )
            )


def flatten_layers(model: Model) -> list[Layer]:
    """List the model and every layer below it, parents before children.

    Keras walks its own layers this way and offers no public walk that also
    reaches the layers inside a subclassed layer.

    Args:
        model: a `keras.Layer`, usually a `keras.Model`.

    Returns:
        List of layers, the given one first.
    """
    return list(model._flatten_layers())


@contextlib.contextmanager
def noting_activity(model: Model) -> Iterator[Callable[[], list[Tensor]]]:
    """Make a scope that tells what activity regularizers add from the rest.

    Keras adds it like any other loss of a layer, one per output, each time
    right after it has called the regularizer. So each stands, among the losses
    of its layer, for which there is a private name, where there was none yet
    when its regularizer was called.

    Args:
        model: `keras.Model` that is called in the scope.

    Yields:
        Function that returns what was added so in the last call, list of
        tensors.
    """
    regularizers = {
        layer: layer.activity_regularizer
        for layer in flatten_layers(model)
        if getattr(layer, "activity_regularizer", None) is not None
    }
    places: dict[Layer, list[int]] = {layer: [] for layer in regularizers}

    def note(layer: Layer) -> None:
        place = len(layer._get_own_losses())
        # A new call of the model begins with no losses.
        before = [known for known in places[layer] if known < place]
        places[layer] = [*before, place]

    def noted() -> list[Tensor]:
        own = {layer: layer._get_own_losses() for layer in places}
        return [own[k][place] for k, known in places.items() for place in known]

    try:
        for layer, regularizer in regularizers.items():
            noting = functools.partial(note, layer)
            layer.activity_regularizer = _Telling(regularizer, noting)
        yield noted
    finally:
        for layer, regularizer in regularizers.items():
            layer.activity_regularizer = regularizer


class _Telling:
    """A regularizer that tells when it is called, and is else as it was."""

    def __init__(self, regularizer: Any, tell: Callable[[], None]):
        self._regularizer = regularizer
        self._tell = tell

    def __call__(self, output: Tensor) -> Tensor:
        self._tell()
        return self._regularizer(output)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy looks before there is anything
            raise AttributeError(name)
        return getattr(self._regularizer, name)


def overrides(model: Any, name: str) -> bool:
    """Tell whether a model, or its class, has a method of its own.

    Args:
        model: `keras.Model`, or a class of such.
        name: of a method of `keras.Model`.
    """
    method = getattr(model, name)
    return getattr(method, "__func__", method) is not getattr(keras.Model, name)


def is_known_to(optimizer: Optimizer, variable: Variable) -> bool:
    """Say whether an optimizer can update a variable.

    One that is not built yet will know any variable. Keras keeps those a
    built one knows under a private name, and refuses others only when the
    update is made.
    """
    if not optimizer.built:
        return True
    return any(known is variable for known in optimizer._trainable_variables)


def optimizers_of(optimizer: Optimizer) -> tuple[bool, list[Optimizer]]:
    """List what an optimizer consists of; older Keras has no `MultiOptimizer`.

    Returns:
        Whether it is but one, and those that update variables. Of several,
        some may have none to update, and are never built.
    """
    several = getattr(keras.optimizers, "MultiOptimizer", ())
    if isinstance(optimizer, several):
        return False, list(optimizer.optimizers)
    return True, [optimizer]


def by_path(variables: Iterable[Variable]) -> dict[str, Variable]:
    """Name variables by their paths; one that comes again is given a number.

    Layers of one name in several that were built apart have variables of one
    path.

    Returns:
        Dict in the order given.
    """
    named: dict[str, Variable] = {}
    for variable in variables:
        path, number = variable.path, 1
        while path in named:
            number += 1
            path = f"{variable.path}#{number}"
        named[path] = variable
    return named


def is_overwritten(variable: Variable) -> bool:
    """Say whether an optimizer assigns a variable what its gradient is.

    The scales of float8 layers are such variables. Older versions of Keras do
    not know of any.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def copy_mask(source: Tensor, target: Tensor) -> Tensor:
    """Attach to `target` the mask Keras attached to `source`, if any.

    A loss with `ignore_class` marks the values it ignored by such a mask.
    Keras reads it from the values a loss returns.

    Returns:
        `target`, changed in place.
    """
    mask = keras_mask(source)
    if mask is not None:
        set_keras_mask(target, mask)
    return target


def take_initial_epoch(model: Model) -> int | None:
    """Return the epoch at which a callback wants training to begin, if any.

    `BackupAndRestore` leaves it in a private attribute of the model, where
    `Model.fit` reads it. There it stays, and a later `fit` of the same model
    would leave out as many epochs; so here it is taken out. Keras Core has no
    such callback.

    Returns:
        Its index, `None` where no callback has restored anything. Keras takes
        0 for the one that `fit` was told.
    """
    epoch = getattr(model, "_initial_epoch", None)
    if epoch is not None:
        model._initial_epoch = None
    return epoch


def compiled_metrics(model: Model) -> list[Metric]:
    """List the metric that holds those given to `compile`, if it is there.

    The `metrics` of a model may leave it out; it is updated all the same.
    """
    compiled = getattr(model, "_compile_metrics", None)
    return [] if compiled is None else [compiled]


def read_metrics(model: Model, leaving_out: list[Metric]) -> dict[str, Any]:
    """Read the metrics of a model as `Model.get_metrics_result` does.

    That fails where what was given to `compile` has not seen any data, and
    has a private name. A method of the model's own is asked on Keras 3 alone.

    Args:
        leaving_out: list of metrics not to read.

    Returns:
        Dict from name to tensor, or to a dict of such.
    """
    if reads_metrics_itself(model):
        names = [metric.name for metric in leaving_out]
        every = model.get_metrics_result()
        return {k: v for k, v in every.items() if k not in names}
    compiled = model._compile_metrics
    results: dict[str, Any] = {}
    for metric in model.metrics:
        is_empty = metric is compiled and not metric.built
        if is_empty or any(metric is other for other in leaving_out):
            continue
        result = metric.result()
        is_dict = isinstance(result, dict)
        results |= result if is_dict else {metric.name: result}
    return results


def reads_metrics_itself(model: Model) -> bool:
    """Whether a model has a `get_metrics_result` that is asked."""
    return KERAS_NAME == "keras" and overrides(model, "get_metrics_result")


def untold_results(model: Model, returned: dict[str, Any]) -> set[str]:
    """Name the results that a model's `compute_metrics` does not return.

    Keras logs what that returns; Keras Core in the end all there are. Where it
    gives them names of its own, nobody can tell which it leaves out.

    Args:
        returned: what it has returned, in which dicts may be nested.
    """
    read = read_metrics(model, leaving_out=[])
    told, known = leaf_names(returned), leaf_names(read)
    if KERAS_NAME == "keras_core" or not told <= known:
        return set()
    return known - told - {"loss"}


def leaf_names(results: dict[str, Any]) -> set[str]:
    """Name what is in nested dicts, as Keras logs it."""
    names: set[str] = set()
    for name, value in results.items():
        names |= leaf_names(value) if isinstance(value, dict) else {name}
    return names


def compiled_arguments(model: Model) -> dict[str, Any]:
    """Return what the user gave to `model.compile`, as the objects given.

    `Model.get_compile_config` returns them serialized, which loses functions
    and the identity of metric objects. What an earlier `compile` was given
    stands where the last one was given none, if Keras keeps it so.

    Args:
        model: a compiled `keras.Model`.

    Returns:
        Dict with the keys `loss`, `loss_weights`, `metrics` and
        `weighted_metrics`; values are `None` where nothing was given.
    """
    config = model._compile_config.config
    arguments: dict[str, Any] = {}
    for names, kept in (
        (("loss", "loss_weights"), model._compile_loss),
        (("metrics", "weighted_metrics"), model._compile_metrics),
    ):
        values = [config[name] for name in names]
        # Keras asks for a loss alone, and for either kind of metrics.
        asked = values[:1] if names[0] == "loss" else values
        if kept is not None and all(value is None for value in asked):
            values = [getattr(kept, f"_user_{name}") for name in names]
        arguments.update(zip(names, values, strict=True))
    return arguments


def given_rate(optimizer: Optimizer) -> Any:
    """Return what an optimizer learns at: variable, schedule or function.

    Its property `learning_rate` calls the last two.
    """
    return optimizer._learning_rate


def give_rate(optimizer: Optimizer, rate: Any) -> None:
    """Have an optimizer learn at a schedule or a function.

    To assign its property on TensorFlow reads that first, so calls a function.
    """
    optimizer._learning_rate = rate


def schedule_of(optimizer: Optimizer) -> Any:
    """Return the schedule of an optimizer's learning rate, or `None`.

    `Optimizer.get_config` returns it serialized, and serializing imports
    TensorFlow wherever it is installed.
    """
    rate = given_rate(optimizer)
    schedules = keras.optimizers.schedules
    return rate if isinstance(rate, schedules.LearningRateSchedule) else None


def call_predict_step(model: Model, x: Nest) -> Nest:
    """Call `predict_step` of a built model, wherever Keras keeps its state.

    On JAX it is given the values of the variables, and returns new ones.

    Args:
        x: nest of tensors, what the model is given.

    Returns:
        Nest of tensors.
    """
    if BACKEND != "jax":
        return model.predict_step((x,))
    kinds = (model.trainable_variables, model.non_trainable_variables)
    state = tuple([variable.value for variable in kind] for kind in kinds)
    outputs, moved = model.predict_step(state, (x,))
    if KERAS_NAME == "keras_core":
        _, moved = moved  # the trainable ones too
    for variable, value in zip(kinds[1], moved, strict=True):
        variable.assign(value)
    return outputs


def current_distribution() -> Any:
    """Return the `keras.distribution.Distribution` in force, or `None`."""
    distribution = getattr(keras, "distribution", None)
    return None if distribution is None else distribution.distribution()


def strategy_of(thing: Any) -> Any:
    """Return the `tf.distribute` strategy a thing was made under, or `None`.

    Keras keeps that of a model, and TensorFlow that of a variable, in an
    attribute without an underscore that is documented nowhere.

    Args:
        thing: `keras.Model`, or variable of TensorFlow with several copies.
    """
    return getattr(thing, "distribute_strategy", None)


def global_limit(name: str) -> int | None:
    """Return how much of something `keras.config` allows a program, if not all.

    Older versions of Keras have no such limits.

    Args:
        name: `"max_epochs"` or `"max_steps_per_epoch"`.
    """
    return getattr(keras.config, name, lambda: None)() or None

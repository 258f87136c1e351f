"""What plain Keras makes of the big batches, and how near another must come.

This file imports nothing of the package under test. Every program that a
failing case prints contains it.
"""

import keras
import numpy as np

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

ROUNDING = 2e-5
"""Most that a number may be off, relative to how far the largest one moves."""

ROUNDING_OF_FLOAT8 = 5e-2
"""The same where layers compute in float8, which turns the smallest difference
into an eighth, or into none."""

NOISES = (1e-5, -1e-5, 5e-6, -5e-6)
"""By how much gradients may be off, relative to the largest one."""

FURTHER_LOGS = (
    "gradient_norm",
    "clipped_gradient_norm",
    "loss_scale",
    "updates",
    "skipped_updates",
)
"""What a Trainer tells besides what Keras does."""


def join(batches):
    """Make one batch of several, `(x, y)` or `(x, y, sample_weight)`.

    Sequences of different lengths are filled up with zeros.
    """
    return keras.tree.map_structure(concatenate, *batches)


def concatenate(*parts):
    """Concatenate arrays whose second axis may differ."""
    if parts[0].ndim > 1:
        length = max(part.shape[1] for part in parts)
        parts = [
            np.pad(
                part,
                [(0, 0), (0, length - part.shape[1])]
                + [(0, 0)] * (part.ndim - 2),
            )
            for part in parts
        ]
    return np.concatenate(parts)


def windows_of_epochs(batches, epochs, steps, tail):
    """Say which batches make an update together, epoch by epoch.

    Args:
        batches: list of what the loader yields in every epoch.
        epochs: how many there are.
        steps: function of the updates made, how many batches make the next.
        tail: what becomes of an update that an epoch leaves incomplete.

    Returns:
        For every epoch a list of lists of batches. Those that are not finite
        are left out, as they must leave no trace.
    """
    updates, window, result = 0, [], []
    for epoch in range(epochs):
        windows = []
        for index, batch in enumerate(batches):
            window.append(batch)
            ends = index + 1 == len(batches) and (
                tail == "flush" or (tail == "carry" and epoch + 1 == epochs)
            )
            if len(window) == steps(updates) or ends:
                if is_finite(window):
                    windows.append(window)
                    updates += 1
                window = []
        if tail == "drop":
            window = []
        result.append(windows)
    return result


def is_finite(nest):
    """Say whether there is neither NaN nor infinity in a nest of arrays."""
    return all(np.all(np.isfinite(leaf)) for leaf in keras.tree.flatten(nest))


def with_dense_gradients(optimizer, noise=0.0):
    """Have an optimizer add up gradients of one row, as Keras should.

    Args:
        optimizer: Keras optimizer, changed.
        noise: what to add to gradients, relative to the largest of them.
    """
    apply = optimizer.apply

    def apply_dense(grads, trainable_variables=None):
        variables = trainable_variables or optimizer._trainable_variables
        grads = [dense(gradient) for gradient in grads]
        if noise:
            # They go by signs, even of what is left where terms cancel.
            by_signs = (keras.optimizers.Lion, keras.optimizers.Adafactor)
            at_zeros = isinstance(optimizer, by_signs)
            grads = with_noise(grads, variables, noise, at_zeros=at_zeros)
        may_keep = isinstance(
            optimizer,
            (
                keras.optimizers.ScheduleFreeAdamW,
                keras.optimizers.MultiOptimizer,  # of which it may be a member
            ),
        )
        if keras.backend.backend() != "torch" or not may_keep:
            return apply(grads, trainable_variables)
        apply_at_once(apply, grads, variables, optimizer)

    optimizer.apply = apply_dense
    return optimizer


def apply_at_once(apply, grads, variables, optimizer):
    """Have all that an optimizer reads be what was there before its update.

    ScheduleFreeAdamW of Keras 3.15 keeps the momentum to use it after it has
    moved, and on PyTorch has kept what is written to. On JAX it is a copy.
    """
    with keras.StatelessScope() as scope:
        apply(grads, variables)
    for variable in [*optimizer.variables, *variables]:
        value = scope.get_current_value(variable)
        if value is not None:
            variable.assign(value)


def dense(gradient):
    """Add up what stands in several places of an `IndexedSlices`."""
    if keras.backend.backend() != "tensorflow" or gradient is None:
        return gradient
    return tf.convert_to_tensor(gradient)


def with_noise(gradients, variables, noise, at_zeros):
    """Add rounding to every gradient, or to those that are not exactly zero.

    Another size of noise has other signs.
    """
    rng = np.random.default_rng(round(abs(noise) * 1e8))
    plain = [
        g is not None and not getattr(v, "overwrite_with_gradient", False)
        for g, v in zip(gradients, variables, strict=True)
    ]
    largest = keras.ops.max(
        keras.ops.stack(
            [
                keras.ops.max(keras.ops.abs(g))
                for g, is_plain in zip(gradients, plain, strict=True)
                if is_plain
            ]
        )
    )
    result = []
    for gradient, is_plain in zip(gradients, plain, strict=True):
        if is_plain:
            signs = rng.choice([-1.0, 1.0], gradient.shape).astype("float32")
            signs = keras.ops.convert_to_tensor(signs)
            added = gradient + signs * noise * largest
            is_zero = (gradient == 0) & (not at_zeros)
            gradient = keras.ops.where(is_zero, gradient, added)
        result.append(gradient)
    return result


def round_weights(model, noise):
    """Round weights otherwise, by a tenth of what gradients are.

    Of outputs whose terms cancel, as many digits are noise as are lost: a loss
    of their direction alone has other gradients then.
    """
    rng = np.random.default_rng(round(abs(noise) * 1e8))
    for variable in model.variables if noise else ():
        if keras.backend.standardize_dtype(variable.dtype) == "float32":
            signs = rng.choice([-1.0, 1.0], variable.shape)
            value = keras.ops.convert_to_numpy(variable.value)
            variable.assign(value * (1 + 0.1 * noise * signs).astype("float32"))


def arrays(batches):
    """Give `fit` arrays that it cuts into these batches again."""
    x, y, *weights = join(batches)
    return {
        "x": x,
        "y": y,
        "sample_weight": weights[0] if weights else None,
        "batch_size": len(keras.tree.flatten(batches[0])[0]),
    }


def spoil(batch):
    """Make a batch whose update is not finite."""
    for leaf in keras.tree.flatten(batch[:2]):
        if leaf.dtype == "float32":
            leaf[...] = np.nan
    return batch


def train_plainly(model, fits, class_weight, between, is_fit):
    """Train a compiled model by Keras's own step, a window at a time.

    Args:
        model: `keras.Model`, compiled.
        fits: for every fit its epochs, for each of them its windows, each of
            them one batch.
        class_weight: as in `fit`.
        between: function to call after every fit.
        is_fit: whether to do as `fit` does, and not as `train_on_batch`.

    Returns:
        What `outcome_of` returns.
    """
    call_as_elsewhere(model)
    updates, histories = [], []
    reset_metrics = model.reset_metrics
    # A batch begins anew here; what `fit` tells is over an epoch.
    model.reset_metrics = lambda: None
    for epochs in fits:
        history = {}
        for windows in epochs:
            reset_metrics()
            logs = {}
            for window in windows:
                # For any size in one program, Keras counts a batch as one.
                for metric in filter(lambda m: is_loss(m.name), model.metrics):
                    metric.reset_state()
                logs = model.train_on_batch(
                    *window, class_weight=class_weight, return_dict=True
                )
                if is_fit:
                    updates.append({n: logs[n] for n in filter(is_loss, logs)})
                else:
                    updates.append(logs)
                    reset_metrics()
            for name, value in logs.items():
                if len(windows) > 1 and is_loss(name):
                    # Keras weighs updates by samples, we by what losses were
                    # divided by; both stand for themselves update by update.
                    value = np.nan
                history.setdefault(name, []).append(np.asarray(value))
        if is_fit:
            finish_fit(model)
        histories.append(history)
        between()
    model.reset_metrics = reset_metrics
    return outcome_of(model, model.optimizer, updates, histories)


def call_as_elsewhere(model):
    """Have training call a model as everybody else does.

    On JAX Keras 3.15 trains by `Model.call` alone. A layer that is used twice
    then takes itself for the outermost one, and forgets what it added to the
    loss the first time.
    """

    def stateless_call(trainable, others, *args, return_losses=False, **kwargs):
        variables = model.trainable_variables + model.non_trainable_variables
        pairs = zip(variables, [*trainable, *others], strict=True)
        with keras.StatelessScope(list(pairs), return_losses) as scope:
            outputs = model(*args, **kwargs)
            losses = list(model.losses)
        others = [
            scope.get_current_value(variable)
            for variable in model.non_trainable_variables
        ]
        others = [
            variable.value if value is None else value
            for value, variable in zip(
                others, model.non_trainable_variables, strict=True
            )
        ]
        if return_losses:
            return outputs, others, losses
        return outputs, others

    model.stateless_call = stateless_call


def finish_fit(model):
    """Do what `fit` does in the end: put averages in the weights' place."""
    optimizer = model.optimizer
    optimizer.finalize_variable_values(model.trainable_weights)
    if optimizer.use_ema:
        for variable in model.trainable_weights:
            # JAX must not be given the memory of an average twice.
            variable.assign(np.array(variable))


def is_loss(name):
    """Say whether a name in the logs is that of a loss."""
    return name == "loss" or name.endswith("_loss")


def outcome_of(model, optimizer, updates, histories):
    """Collect everything that training has changed or told.

    Args:
        model: `keras.Model`.
        optimizer: the one that trained it.
        updates: list of dicts, the losses of every update.
        histories: list of dicts, `History.history` of every fit.

    Returns:
        Dict of arrays. The part of a name before the first `:` says how they
        are compared.
    """
    outcome = {}
    for kind, variables in (
        ("weight", model.weights),
        ("slot", optimizer.variables),
    ):
        for index, variable in enumerate(variables):
            path = variable.path.split("/", 1)[-1]
            if path.startswith("variable"):
                path = "variable"  # Keras numbers those that have no name
            name = f"{kind}:{index} {path}"
            outcome[name] = keras.ops.convert_to_numpy(variable)
    for index, logs in enumerate(updates):
        for name, value in logs.items():
            if is_further(name):
                continue
            outcome[f"number:update {index} {name}"] = np.asarray(value)
    for index, history in enumerate(histories):
        for name, value in history.items():
            if not is_further(name):
                outcome[f"number:fit {index} {name}"] = np.asarray(value)
    return outcome


def is_further(name):
    """Say whether Keras would not tell of this."""
    return name in FURTHER_LOGS or name.startswith(("part ", "learning_rate"))


def with_results(outcome, evaluation, prediction):
    """Add what `evaluate` and `predict` return to an outcome."""
    if not isinstance(evaluation, dict):
        evaluation = {"list": evaluation}
    for name, value in evaluation.items():
        if is_further(name):
            continue
        outcome[f"number:evaluate {name}"] = np.asarray(value)
    for index, leaf in enumerate(keras.tree.flatten(prediction)):
        outcome[f"number:predict {index}"] = np.asarray(leaf)
    return outcome


def differences(actual, expected, initial, train):
    """List how an outcome differs from that of plain Keras.

    What differs by more than rounding is compared once more with how far
    Keras's own outcome moves when its gradients are rounded otherwise: where
    a true gradient is zero, an optimizer may make anything of it.

    Args:
        actual: dict of arrays.
        expected: dict of arrays, Keras's own.
        initial: list of arrays, the weights before training.
        train: function of the noise in gradients, returns Keras's outcome.

    Returns:
        List of sentences, empty where both agree.

    Raises:
        FloatingPointError: Keras's own outcome is NaN and can tell nothing.
    """
    if not any(name.startswith("number:update") for name in actual):
        expected = {
            name: value
            for name, value in expected.items()
            if not name.startswith("number:update")
        }
    if not any(name.startswith("number:fit") for name in actual):
        expected = {
            name: value
            for name, value in expected.items()
            if not name.startswith("number:fit")
        }
    for name, value in expected.items():
        if not name.startswith("number:fit") and np.isnan(value).any():
            raise FloatingPointError(f"Keras itself makes NaN of {name}.")
    found = [
        f"{name} is missing" for name in expected if name not in actual
    ] + [f"{name} is too many" for name in actual if name not in expected]
    names = [name for name in expected if name in actual]
    for name in names:
        if actual[name].shape != expected[name].shape:
            shapes = f"{actual[name].shape} instead of {expected[name].shape}"
            found.append(f"{name} has the shape {shapes}")
    if found:
        return found
    allowed = tolerances(expected, initial)
    off = [n for n in names if not is_near(actual, expected, n, allowed[n])]
    if not off:
        return []
    floors = dict.fromkeys(off, 0.0)
    for noise in NOISES:
        noisy = train(noise)
        for name in off:
            floor = largest(noisy[name] - expected[name])
            if floor > floors[name]:
                allowed[name] += 2 * (floor - floors[name])
                floors[name] = floor
        off = [n for n in off if not is_near(actual, expected, n, allowed[n])]
        if not off:
            break
    return [
        f"{name}: off by {largest(actual[name] - expected[name]):.3g}, where "
        f"{allowed[name]:.3g} is rounding, {floors[name]:.3g} of it noise\n"
        f"    Keras {brief(expected[name])}\n"
        f"    ours  {brief(actual[name])}"
        for name in off
    ]


def tolerances(expected, initial):
    """Say how far each array may be off: how much of it may be rounding."""
    weights = [v for name, v in expected.items() if name.startswith("weight:")]
    moved = max(
        (largest(a - b) for a, b in zip(weights, initial, strict=True)),
        default=0.0,
    )
    is_float8 = any("amax_history" in name for name in expected)
    rounding = ROUNDING_OF_FLOAT8 if is_float8 else ROUNDING
    # Where terms cancel, what is left depends on how large they were.
    largest_slots = {}
    for name, value in expected.items():
        if name.startswith("slot:"):
            kind = name.rsplit("_", 1)[-1]
            size = max(largest(value), largest_slots.get(kind, 0.0))
            largest_slots[kind] = size
    result = {}
    for name, value in expected.items():
        size = largest(value)
        if name.startswith("weight:"):
            result[name] = rounding * moved + 1e-6 * size
        elif name.startswith("slot:"):
            of_kind = largest_slots[name.rsplit("_", 1)[-1]]
            result[name] = 5 * rounding * size + 1e-6 * of_kind
        else:
            result[name] = rounding * (size + 0.1)
    return result


def is_near(actual, expected, name, allowed):
    """Say whether two arrays agree, where Keras's is a number."""
    if actual[name].dtype.kind not in "fiub":
        return bool(np.all(actual[name] == expected[name]))
    a, b = actual[name].astype(float), expected[name].astype(float)
    is_near = (np.abs(a - b) <= allowed) | (a == b) | np.isnan(b)
    return bool(np.all(is_near))


def largest(array):
    """Return the largest absolute value among an array's finite numbers."""
    array = np.asarray(array, dtype=float)
    array = array[np.isfinite(array)]
    return float(np.max(np.abs(array))) if array.size else 0.0


def brief(array):
    """Show the first few numbers of an array."""
    return np.array2string(
        np.ravel(np.asarray(array, dtype=float))[:6], precision=7
    )

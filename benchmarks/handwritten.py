"""Windows written by hand for one model, with nothing beside them.

No metrics, no hooks, no loss scaling, no denominators, and unless asked for no
check that gradients are finite: what a researcher writes who needs only this
one update. `make_window` is the limit; `make_recipe` and `make_optax_loop` are
what is found when one looks for how to accumulate. All functions return a
function of a window's arrays `[k, m, ...]` that makes one update and returns
the mean loss, still on the device.
"""

import keras
from handwritten_torch import make_torch_window


def make_window(
    model,
    optimizer,
    loss_fn,
    *,
    jit_compile,
    is_fused=True,
    parallel=1,
    is_guarded=False,
):
    """Make the hand-written update of the backend Keras runs on.

    Args:
        model: `keras.Model`, built.
        optimizer: Keras optimizer, not built.
        loss_fn: function of targets and predictions, a scalar mean.
        jit_compile: bool, for TensorFlow; JAX always compiles.
        is_fused: bool, for JAX: whether the window is one compiled call, or
            one for each micro-batch and one to apply.
        parallel: int, for TensorFlow: how many micro-batches may be under way
            at once, and have their activations in memory.
        is_guarded: bool: whether weights and optimizer are left alone where
            the gradients' sum of squares is not finite, as by a Trainer.

    Returns:
        Pair of functions: of `(x, y)` to the window's mean loss, and of
        nothing, to wait for the device.
    """
    optimizer.build(model.trainable_variables)
    if keras.backend.backend() == "torch":
        return _make_torch_window(model, optimizer, loss_fn, is_guarded)
    if keras.backend.backend() == "jax":
        make = _make_jax_window if is_fused else _make_jax_stream
        return make(model, optimizer, loss_fn, is_guarded)
    if keras.backend.backend() == "torch":
        return make_torch_window(model, optimizer, loss_fn, is_guarded)
    return _make_tensorflow_window(
        model,
        optimizer,
        loss_fn,
        jit_compile=jit_compile,
        parallel=parallel,
        is_guarded=is_guarded,
    )


def _guard_jax(stateless_apply):
    """Let the application of gradients be skipped where they are not finite."""
    import jax

    def guarded(slots, gradients, weights):
        square = sum(jax.numpy.sum(g * g) for g in gradients)
        return jax.lax.cond(
            jax.numpy.isfinite(square),
            lambda: stateless_apply(slots, gradients, weights),
            lambda: (weights, slots),
        )

    return guarded


def _make_jax_window(model, optimizer, loss_fn, is_guarded):
    import jax

    stateless_apply = optimizer.stateless_apply
    if is_guarded:
        stateless_apply = _guard_jax(stateless_apply)

    def loss_of(weights, others, x, y):
        outputs, others = model.stateless_call(
            weights, others, x, training=True
        )
        return loss_fn(y, outputs), others

    def window(state, x, y):
        weights, others, slots = state

        def step(carry, batch):
            total, others, gradients = carry
            (loss, others), new = jax.value_and_grad(loss_of, has_aux=True)(
                weights, others, *batch
            )
            gradients = jax.tree.map(jax.numpy.add, gradients, new)
            return (total + loss, others, gradients), None

        zeros = jax.tree.map(jax.numpy.zeros_like, weights)
        start = (jax.numpy.zeros(()), others, zeros)
        (total, others, gradients), _ = jax.lax.scan(step, start, (x, y))
        gradients = [gradient / x.shape[0] for gradient in gradients]
        weights, slots = stateless_apply(slots, gradients, weights)
        return total / x.shape[0], (weights, others, slots)

    window = jax.jit(window, donate_argnums=0)
    state = [
        [jax.numpy.array(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]

    def run(x, y):
        loss, state[:] = window(tuple(state), x, y)
        return loss

    return run, lambda: jax.block_until_ready(state)


def _make_jax_stream(model, optimizer, loss_fn, is_guarded):
    import jax

    stateless_apply = optimizer.stateless_apply
    if is_guarded:
        stateless_apply = _guard_jax(stateless_apply)

    def loss_of(weights, others, x, y):
        outputs, others = model.stateless_call(
            weights, others, x, training=True
        )
        return loss_fn(y, outputs), others

    def add(sums, weights, x, y):
        total, others, gradients = sums
        (loss, others), new = jax.value_and_grad(loss_of, has_aux=True)(
            weights, others, x, y
        )
        gradients = jax.tree.map(jax.numpy.add, gradients, new)
        return total + loss, others, gradients

    def apply(weights, slots, sums, count):
        total, others, gradients = sums
        means = [gradient / count for gradient in gradients]
        weights, slots = stateless_apply(slots, means, weights)
        zeros = jax.tree.map(jax.numpy.zeros_like, gradients)
        sums = (jax.numpy.zeros_like(total), others, zeros)
        return total / count, (weights, slots, sums)

    add = jax.jit(add, donate_argnums=0)
    apply = jax.jit(apply, donate_argnums=(0, 1, 2))
    weights, others, slots = [
        [jax.numpy.array(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    zeros = jax.tree.map(jax.numpy.zeros_like, weights)
    state = [weights, slots, (jax.numpy.zeros(()), others, zeros)]

    def run(x, y):
        weights, slots, sums = state
        for batch in zip(x, y, strict=True):
            sums = add(sums, weights, *batch)
        loss, state[:] = apply(weights, slots, sums, float(len(x)))
        return loss

    return run, lambda: jax.block_until_ready(state)


def _make_tensorflow_window(
    model, optimizer, loss_fn, *, jit_compile, parallel, is_guarded
):
    import tensorflow as tf

    variables = model.trainable_variables
    weights = [variable.value for variable in variables]

    def apply(gradients):
        if not is_guarded:
            optimizer.apply(gradients, variables)
            return
        square = sum(tf.reduce_sum(g * g) for g in gradients)

        def applied():
            optimizer.apply(gradients, variables)
            return True

        tf.cond(tf.math.is_finite(square), applied, lambda: False)

    @tf.function(jit_compile=jit_compile, autograph=False)
    def window(x, y):
        count = tf.shape(x)[0]

        def step(index, total, gradients):
            with tf.GradientTape() as tape:
                loss = loss_fn(y[index], model(x[index], training=True))
            new = tape.gradient(loss, weights)
            gradients = [a + b for a, b in zip(gradients, new, strict=True)]
            return index + 1, total + loss, gradients

        zeros = [tf.zeros_like(weight) for weight in weights]
        _, total, gradients = tf.while_loop(
            lambda index, *_: index < count,
            step,
            [0, 0.0, zeros],
            parallel_iterations=parallel,
        )
        scale = 1 / tf.cast(count, tf.float32)
        gradients = [gradient * scale for gradient in gradients]
        apply(gradients)
        return total * scale

    return window, lambda: weights[0].numpy()


def _make_torch_window(model, optimizer, loss_fn, is_guarded):
    import torch

    variables = model.trainable_variables

    def apply(gradients):
        if is_guarded:
            square = sum((g * g).sum() for g in gradients)
            if not square.isfinite():
                return
        with torch.no_grad():
            optimizer.apply(gradients, variables)

    return _accumulate_in_torch(model, loss_fn, apply)


def make_torch_loop(model):
    """Make the update that PyTorch users write, of a Keras model.

    Loss and optimizer are PyTorch's own, with the numbers of Keras.

    Args:
        model: `keras.Model`, built, of logits.

    Returns:
        Pair of functions, as of `make_window`.
    """
    import torch

    weights = [variable.value for variable in model.trainable_variables]
    optimizer = torch.optim.Adam(weights, lr=1e-3, eps=1e-7)

    def loss_fn(targets, logits):
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), targets.flatten().long()
        )

    return _accumulate_in_torch(model, loss_fn, lambda _: optimizer.step())


def _accumulate_in_torch(model, loss_fn, apply):
    import torch

    weights = [variable.value for variable in model.trainable_variables]

    def run(x, y):
        total = 0.0
        x, y = map(keras.ops.convert_to_tensor, (x, y))
        for batch, targets in zip(x, y, strict=True):
            loss = loss_fn(targets, model(batch, training=True))
            (loss / len(x)).backward()
            total += loss.detach()
        apply([weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        return total / len(x)

    def wait():
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    return run, wait


def make_recipe(model, optimizer, loss_fn):
    """Make the update that tutorials show, on TensorFlow.

    One compiled function adds a micro-batch's gradients to variables, another
    applies them.

    Args:
        model: `keras.Model`, built.
        optimizer: Keras optimizer, not built.
        loss_fn: function of targets and predictions, a scalar mean.

    Returns:
        Pair of functions, as of `make_window`.
    """
    import tensorflow as tf

    optimizer.build(model.trainable_variables)
    weights = [variable.value for variable in model.trainable_variables]
    sums = [tf.Variable(tf.zeros_like(w), trainable=False) for w in weights]

    @tf.function(reduce_retracing=True)
    def accumulate(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        for total, new in zip(sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(new)
        return loss

    @tf.function
    def apply(count):
        means = [total / count for total in sums]
        optimizer.apply(means, model.trainable_variables)
        for total in sums:
            total.assign(tf.zeros_like(total))

    def run(x, y):
        losses = [accumulate(*batch) for batch in zip(x, y, strict=True)]
        apply(tf.constant(float(len(losses))))
        return sum(losses) / len(losses)

    return run, lambda: weights[0].numpy()


def make_optax_loop(model, loss_fn, steps):
    """Make the update of `optax.MultiSteps`, on JAX.

    Args:
        model: `keras.Model`, built.
        loss_fn: function of targets and predictions, a scalar mean.
        steps: int, micro-batches in an update.

    Returns:
        Pair of functions, as of `make_window`.
    """
    import jax
    import optax

    optimizer = optax.MultiSteps(optax.adam(1e-3, eps=1e-7), steps)

    def loss_of(weights, others, x, y):
        outputs, others = model.stateless_call(
            weights, others, x, training=True
        )
        return loss_fn(y, outputs), others

    def step(state, x, y):
        weights, others, slots = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            weights, others, x, y
        )
        changes, slots = optimizer.update(gradients, slots, weights)
        return loss, (optax.apply_updates(weights, changes), others, slots)

    step = jax.jit(step, donate_argnums=0)
    weights, others = [
        [jax.numpy.array(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
        )
    ]
    state = (weights, others, optimizer.init(weights))

    def run(x, y):
        nonlocal state
        losses = []
        for batch in zip(x, y, strict=True):
            loss, state = step(state, *batch)
            losses.append(loss)
        return sum(losses) / len(losses)

    return run, lambda: jax.block_until_ready(state)

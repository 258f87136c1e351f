"""The reference every exactness test compares with: plain Keras, one batch.

The gradient of a window is Keras's own gradient of `Model.compute_loss` on
the concatenated window, differentiated here by the backend alone and without
the package under test. Repeated rows of embedding gradients are added up,
which Keras itself leaves undone on TensorFlow.
"""

import functools

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Batch, Trainer
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras, ops, tree

TOLERANCE = 1e-5

# Many ways to cut a window are many shapes, of which users of JAX are warned.
cuts_in_many_ways = pytest.mark.filterwarnings(
    "ignore:Micro-batches should have few different shapes:UserWarning"
)


if BACKEND == "tensorflow":
    import tensorflow as tf

    def differentiate(objective, variables, others=(), arguments=()):
        """Return the value and the dense gradients, `None` where unused."""
        del others
        values = [variable.value for variable in variables]
        with tf.GradientTape() as tape:
            loss = objective(*arguments)
        gradients = tape.gradient(loss, values)
        return loss, [
            None if g is None else tf.convert_to_tensor(g) for g in gradients
        ]

elif BACKEND == "torch":
    import torch

    def differentiate(objective, variables, others=(), arguments=()):
        """Return the value and the gradients, `None` where unused."""
        del others
        values = [variable.value for variable in variables]
        with torch.enable_grad():
            loss = objective(*arguments)
        gradients = torch.autograd.grad(loss, values, allow_unused=True)
        return loss.detach(), list(gradients)

elif BACKEND == "jax":
    import jax

    def differentiate(objective, variables, others=(), arguments=()):
        """Return the value and the gradients.

        Args:
            objective: function of `arguments`. What it reads besides must be
                the same whenever it is passed: it is compiled once.
            variables: list of Keras variables.
            others: list of those that it reads, and that may have changed.
            arguments: nest of arrays.
        """
        if not hasattr(objective, "compiled"):
            objective.compiled = value_and_gradients(
                objective, variables, others
            )
        values = [[v.value for v in each] for each in (variables, others)]
        return objective.compiled(*values, arguments)

    def value_and_gradients(objective, variables, others):
        """Make the compiled function that `differentiate` calls."""

        def stateless(values, other_values, arguments):
            pairs = zip(
                [*variables, *others], [*values, *other_values], strict=True
            )
            with keras.StatelessScope(
                state_mapping=list(pairs), collect_losses=True
            ):
                return objective(*arguments)

        return jax.jit(jax.value_and_grad(stateless))


class KeepGradients(keras.optimizers.Optimizer):
    """Changes no weight, only keeps the gradients it was given.

    The gradients can then be compared without the rounding of the weights
    they would be added to.
    """

    def __init__(self):
        super().__init__(learning_rate=1.0)

    def build(self, variables):
        super().build(variables)
        self.kept = [
            self.add_variable_from_reference(variable, "gradient")
            for variable in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        del learning_rate
        kept = self.kept[self._get_variable_index(variable)]
        kept.assign(ops.cast(gradient, kept.dtype))


def concatenate(batches):
    """Join batches, `(x, y)` or `(x, y, sample_weight)`, into one `Batch`."""
    batches = [Batch(*batch) for batch in batches]
    return tree.map_structure(
        lambda *parts: None if parts[0] is None else np.concatenate(parts),
        *batches,
    )


def batch_gradients(model, batch):
    """Compute Keras's loss and dense gradients on one batch.

    Args:
        model: compiled `keras.Model`.
        batch: `Batch` of arrays.

    Returns:
        Pair: the loss as a float, and the list of gradient tensors.
    """

    def make_tensors():
        # Anew for each call: on PyTorch Keras multiplies weights in place.
        return tree.map_structure(
            lambda leaf: None if leaf is None else ops.copy(leaf),
            Batch(*batch),
        )

    objective = objective_of(model)
    outputs = getattr(model, "outputs", ())
    if len(outputs) > 1 and len(model.metrics) < len(outputs):
        # Their losses have metrics too, which Keras makes at the first call.
        objective(*make_tensors())
    loss, gradients = differentiate(
        objective,
        model.trainable_variables,
        model.non_trainable_variables,
        make_tensors(),
    )
    return float(loss), gradients


@functools.lru_cache(maxsize=64)
def objective_of(model):
    """Make the function of a batch whose value Keras minimizes."""

    def objective(x, y, sample_weight):
        if BACKEND == "torch" and getattr(sample_weight, "shape", ())[1:] == (
            1,
        ):
            # Keras multiplies weights by masks in place there, and fails.
            sample_weight = sample_weight * ops.ones_like(y, "float32")
        loss = model.compute_loss(
            x=x,
            y=y,
            y_pred=model(x, training=True),
            sample_weight=sample_weight,
        )
        return loss + forgotten_penalties(model)

    return objective


def forgotten_penalties(model):
    """Add up the weight regularizers, where Keras forgets them.

    Keras Core on JAX looks for the regularizer on the weight's value and not
    on the weight, and finds none.
    """
    if KERAS_NAME == "keras" or BACKEND == "tensorflow":
        return 0.0
    weights = [v for v in model.trainable_weights if v.regularizer is not None]
    return sum(v.regularizer(v.value) for v in weights)


def combined_gradients(model, batches, factor):
    """Run the plain loop: the micro-batches' gradients, added up and scaled.

    Args:
        model: compiled `keras.Model`.
        batches: list of micro-batches.
        factor: what the sum is multiplied by.
    """
    parts = [
        map(ops.convert_to_numpy, batch_gradients(model, batch)[1])
        for batch in batches
    ]
    return [sum(arrays) * factor for arrays in zip(*parts, strict=True)]


def update(model, batch):
    """Make the update plain Keras would make with dense gradients."""
    _, gradients = batch_gradients(model, batch)
    model.optimizer.apply(gradients, model.trainable_variables)


def largest_error(actual, expected):
    """Compare lists of tensors.

    Args:
        actual: list of tensors.
        expected: list of tensors; `None` stands for zeros, the gradient of an
            unused variable.

    Returns:
        The largest difference relative to the largest expected value.
    """
    pairs = [
        (ops.convert_to_numpy(a), 0.0 if b is None else ops.convert_to_numpy(b))
        for a, b in zip(actual, expected, strict=True)
    ]
    scale = max(np.max(np.abs(b)) for _, b in pairs)
    return max(np.max(np.abs(a - b)) for a, b in pairs) / (scale or 1.0)


class Pair:
    """A Trainer, and plain Keras with the same weights.

    Args:
        make_model: function without arguments, returns a built model.
        loss: as in `Model.compile`.
        loss_weights: as in `Model.compile`.
        make_optimizer: function that returns an optimizer; the default one
            keeps gradients for `gradient_error`.
        combine: as in `Accumulation`.
        accumulation: as in `Trainer`; by default every call of `train` makes
            one window of all its batches.
        trainer_class: `Trainer` or a subclass.
        jit_compile: as in `Trainer`; `None` is what is quickest here.
        options: further arguments of `Trainer`.
    """

    def __init__(
        self,
        make_model,
        *,
        loss=None,
        loss_weights=None,
        make_optimizer=KeepGradients,
        combine="exact",
        accumulation=None,
        trainer_class=Trainer,
        jit_compile=None,
        **options,
    ):
        if jit_compile is None:
            jit_compile = JIT_COMPILE
        self.model = make_model()
        self.twin = make_model()
        self.twin.set_weights(self.model.get_weights())
        self.twin.compile(
            make_optimizer(),
            loss,
            loss_weights=loss_weights,
            jit_compile=JIT_COMPILE,
        )
        self.steps = 2
        self.trainer = trainer_class(
            self.model,
            optimizer=make_optimizer(),
            loss=loss,
            loss_weights=loss_weights,
            accumulation=accumulation
            or Accumulation(steps=lambda updates: self.steps, combine=combine),
            jit_compile=jit_compile,
            seed=0,
            **options,
        )

    def train(self, batches, **options):
        """Make one update of all batches; returns the epoch's logs."""
        self.steps = len(batches)
        history = self.trainer.fit(batches, verbose=0, **options).history
        return {name: values[-1] for name, values in history.items()}

    @property
    def gradients(self):
        """What the Trainer's optimizer was given for its last update."""
        return self.trainer.optimizer.kept

    def gradient_error(self, batches, reference=None, **options):
        """Train on a window and compare with the concatenated one.

        Args:
            batches: list of micro-batches.
            reference: `Batch` for plain Keras instead of all micro-batches.
            options: further arguments of `fit`.

        Returns:
            Error of the gradients, relative to the largest; and of the loss.
        """
        logs = self.train(batches, **options)
        loss, gradients = batch_gradients(
            self.twin, reference or concatenate(batches)
        )
        loss_error = abs(logs["loss"] - loss) / (abs(loss) or 1.0)
        return largest_error(self.gradients, gradients), loss_error

    def weight_error(self, windows, **options):
        """Update both once per window; compare weights and optimizers.

        Returns:
            Error of the weights and of the optimizer's variables, each
            relative to the largest of them.
        """
        for batches in windows:
            self.train(batches, **options)
            update(self.twin, concatenate(batches))
        return (
            largest_error(self.model.weights, self.twin.weights),
            largest_error(
                self.trainer.optimizer.variables, self.twin.optimizer.variables
            ),
        )

    def assert_exact(self, batches, reference=None, **options):
        """Assert that gradients and loss are those of the big batch."""
        errors = self.gradient_error(batches, reference, **options)
        assert max(errors) <= TOLERANCE

    def assert_same_weights(self, windows, **options):
        """Assert that a few updates end in the same weights."""
        assert max(self.weight_error(windows, **options)) <= TOLERANCE

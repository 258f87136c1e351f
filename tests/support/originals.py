"""Well-known models whose own `train_step` makes their updates.

Plain Keras, without accumtrainer, on every backend: on JAX a loop calls the
`train_step`, elsewhere `fit` does. What is random is given with the data.
"""

import itertools

import keras
import numpy as np
from keras import ops

IS_JAX = keras.backend.backend() == "jax"
IS_TORCH = keras.backend.backend() == "torch"


def differentiate(function, variables):
    """Return a scalar function's value and its gradients by variables."""
    if IS_JAX:
        import jax

        def of_values(values):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return function()

        return jax.value_and_grad(of_values)([v.value for v in variables])
    if IS_TORCH:
        import torch

        value = function()
        values = [v.value for v in variables]
        return value, torch.autograd.grad(value, values, allow_unused=True)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = function()
    return value, tape.gradient(value, [v.value for v in variables])


def differentiate_by_input(function, x):
    """Return the gradients of a scalar function by its argument."""
    if IS_JAX:
        import jax

        return jax.grad(function)(x)
    if IS_TORCH:
        import torch

        x = ops.copy(x).requires_grad_()
        return torch.autograd.grad(function(x), x, create_graph=True)[0]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


class Original(keras.Model):
    """A model that knows how to descend.

    Args:
        *parts: models, all it consists of.
    """

    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)
        self.built = True

    def descend(self, loss, *, model=None, optimizer=None):
        """Make an update by the gradients of a loss."""
        variables = (model or self).trainable_variables
        value, gradients = differentiate(loss, variables)
        (optimizer or self.optimizer).apply(gradients, variables)
        return {"loss": value}

    def train_through(self, x, y, batch_size):
        """Train once through arrays, or nests of them, in their order."""
        if not IS_JAX:
            arguments = {"batch_size": batch_size, "shuffle": False}
            self.fit(x, y, verbose=0, **arguments)
            return
        samples = len(keras.tree.flatten(x)[0])
        for first in range(0, samples, batch_size):
            rows = slice(first, first + batch_size)
            self.train_step(
                keras.tree.map_structure(
                    lambda leaf, rows=rows: ops.convert_to_tensor(leaf[rows]),
                    (x, y),
                )
            )


class VAE(Original):
    """Kingma and Welling 2014: evidence lower bound, reparametrized."""

    def train_step(self, data):
        (x, noise), _ = data
        encoder, decoder = self.parts

        def loss():
            codes = encoder(x, training=True)
            mean, log_var = codes[:, :2], codes[:, 2:]
            z = mean + ops.exp(log_var / 2) * noise
            difference = decoder(z, training=True) - x
            reconstruction = ops.mean(ops.sum(difference**2, axis=1))
            kl = -0.5 * (1 + log_var - mean**2 - ops.exp(log_var))
            return reconstruction + ops.mean(ops.sum(kl, axis=1))

        return self.descend(loss)


class Distiller(Original):
    """Hinton et al. 2015: soft targets of a teacher at a temperature."""

    def train_step(self, data):
        x, y = data
        student, teacher = self.parts
        teacher.trainable = False
        hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        soft = keras.losses.KLDivergence()

        def loss():
            logits = student(x, training=True)
            targets = ops.softmax(teacher(x, training=False) / 3.0)
            distance = soft(targets, ops.softmax(logits / 3.0)) * 9.0
            return 0.1 * hard(y, logits) + 0.9 * distance

        return self.descend(loss)


class DiffusionModel(Original):
    """Ho et al. 2020: predict the noise; keep an average of the weights."""

    def train_step(self, data):
        x, (noise, times) = data
        network, average = self.parts
        average.trainable = False
        noisy = ops.cos(1.5 * times) * x + ops.sin(1.5 * times) * noise

        def loss():
            inputs = ops.concatenate([noisy, times], axis=1)
            return ops.mean((network(inputs, training=True) - noise) ** 2)

        logs = self.descend(loss)
        for slow, fast in zip(average.weights, network.weights, strict=True):
            slow.assign(0.9 * slow.value + (1 - 0.9) * fast.value)
        return logs


class MaskedAutoencoder(Original):
    """He et al. 2022: the mean error over all hidden patches of a batch."""

    def train_step(self, data):
        x, hidden = data
        (network,) = self.parts

        def loss():
            seen = ops.where(ops.equal(hidden, 1.0)[:, :, None], 0.0, x)
            found = network(ops.reshape(seen, [-1, 6]), training=True)
            errors = (ops.reshape(found, [-1, 3, 2]) - x) ** 2
            per_patch = (errors[:, :, 0] + errors[:, :, 1]) / 2
            return ops.sum(per_patch * hidden) / ops.sum(hidden)

        return self.descend(loss)


class WGAN(Original):
    """Gulrajani et al. 2017: two updates of the critic, one of the other."""

    def compile(self, critic_optimizer, generator_optimizer, **options):
        super().compile(**options)
        self.optimizers = critic_optimizer, generator_optimizer

    def train_step(self, data):
        x, (noise, shares, last_noise) = data
        critic, generator = self.parts
        critic_optimizer, generator_optimizer = self.optimizers

        for turn in range(2):
            z, share = noise[:, turn], shares[:, turn]

            def loss(z=z, share=share):
                fake = generator(z, training=False)

                def score(points):
                    return ops.sum(critic(points, training=True))

                points = fake + share * (x - fake)
                slope = differentiate_by_input(score, points)
                norm = ops.sqrt(ops.sum(slope**2, axis=1) + 1e-12)
                wasserstein = ops.mean(critic(fake)) - ops.mean(critic(x))
                return wasserstein + 10.0 * ops.mean((norm - 1.0) ** 2)

            self.descend(loss, model=critic, optimizer=critic_optimizer)

        def loss():
            return -ops.mean(critic(generator(last_noise, training=True)))

        return self.descend(
            loss, model=generator, optimizer=generator_optimizer
        )


class ContrastiveModel(Original):
    """Chen et al. 2020: tell which of all other views is of the same."""

    def train_step(self, data):
        _, views = data
        (encoder,) = self.parts

        def loss():
            z = ops.concatenate([encoder(v, training=True) for v in views])
            z = z / ops.sqrt(ops.sum(z**2, axis=1, keepdims=True))
            count = z.shape[0]
            logits = z @ ops.transpose(z) / 0.5 - 1e9 * ops.eye(count)
            partner = (np.arange(count) + count // 2) % count
            chosen = ops.sum(ops.one_hot(partner, count) * logits, axis=1)
            return ops.mean(ops.logsumexp(logits, axis=1) - chosen)

        return self.descend(loss)


class SupervisedContrastive(Original):
    """Khosla et al. 2020: all examples of a label attract each other."""

    def train_step(self, data):
        x, y = data
        (encoder,) = self.parts
        labels = list(ops.convert_to_numpy(y))
        indices = range(len(labels))
        pairs = [
            (i, p)
            for i, p in itertools.permutations(indices, 2)
            if labels[i] == labels[p]
        ]
        friends = [sum(i == first for first, _ in pairs) for i in indices]
        anchors = sum(count > 0 for count in friends)

        def loss():
            z = encoder(x, training=True)
            z = z / ops.sqrt(ops.sum(z**2, axis=1, keepdims=True))
            logits = z @ ops.transpose(z) / 0.1
            total = 0.0
            for i, p in pairs:
                others = [logits[i, j] for j in indices if j != i]
                found = logits[i, p] - ops.logsumexp(ops.stack(others))
                total = total - found / friends[i]
            return total / anchors

        return self.descend(loss)


class AdversarialModel(Original):
    """Goodfellow et al. 2015: train on inputs moved by the sign."""

    def train_step(self, data):
        x, y = data
        (network,) = self.parts
        measure = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def loss_at(points):
            return measure(y, network(points, training=True))

        moved = x + 0.1 * ops.sign(differentiate_by_input(loss_at, x))
        return self.descend(lambda: loss_at(moved))


class SharpnessAwareModel(Original):
    """Foret et al. 2020: the gradient from the worst place nearby."""

    def train_step(self, data):
        x, y = data
        (network,) = self.parts
        weights = network.trainable_variables
        measure = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def loss():
            return measure(y, network(x, training=True))

        value, gradients = differentiate(loss, weights)
        norm = ops.sqrt(sum(ops.sum(g**2) for g in gradients))
        before = [ops.copy(weight.value) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign(weight.value + 0.5 * gradient / (norm + 1e-12))
        _, gradients = differentiate(loss, weights)
        for weight, old in zip(weights, before, strict=True):
            weight.assign(old)
        self.optimizer.apply(gradients, weights)
        return {"loss": value}

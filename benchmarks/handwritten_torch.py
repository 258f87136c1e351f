"""The loop that one writes by hand on PyTorch, for one model."""


def make_torch_window(model, optimizer, loss_fn, is_guarded):
    """Make the update of a plain loop: backward passes, then one step.

    Its optimizer is PyTorch's Adam, with the options of Keras's.

    Args:
        model: `keras.Model`, built.
        optimizer: `keras.optimizers.Adam`, which is only read.
        loss_fn: function of targets and predictions, a scalar mean.
        is_guarded: bool: whether the step is left out where the gradients' sum
            of squares is not finite.

    Returns:
        Pair of functions, as of `handwritten.make_window`.
    """
    import torch

    weights = [variable.value for variable in model.trainable_variables]
    device = weights[0].device
    adam = torch.optim.Adam(
        weights,
        lr=float(optimizer.learning_rate),
        betas=(optimizer.beta_1, optimizer.beta_2),
        eps=optimizer.epsilon,
    )

    def is_finite():
        squares = [torch.sum(weight.grad**2) for weight in weights]
        return bool(torch.isfinite(sum(squares)))

    def run(x, y):
        adam.zero_grad()
        total = torch.zeros((), device=device)
        x, y = (torch.as_tensor(array).to(device) for array in (x, y))
        for inputs, targets in zip(x, y, strict=True):
            loss = loss_fn(targets, model(inputs, training=True))
            (loss / len(x)).backward()
            total += loss.detach()
        if not is_guarded or is_finite():
            adam.step()
        return total / len(x)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run, wait

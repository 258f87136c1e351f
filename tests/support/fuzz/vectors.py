"""Random layers from vector to vector, and from image to vector.

Makers add a layer and return how it is called, and its width. Some make layers
of sequences too.
"""

ADDS_LOSS = '''
class AddsLoss(layers.Layer):
    """Adds a loss for every example."""

    def call(self, inputs):
        axes = tuple(range(1, len(inputs.shape)))
        # Of a vector of length one, the squares alone would have no gradient.
        self.add_loss(0.1 * ops.mean((inputs - 0.3) ** 2, axis=axes))
        return inputs
'''


def dense(drawer, tensor):
    """Draw a dense layer, perhaps with LoRA or fewer bits."""
    units = drawer.draw.randint(2, 4)
    options = drawer.regularized(is_matrix=True)
    text = f"layers.Dense({units}, '{drawer.activation()}'{options})"
    after = drawer.quantize(text, tensor) or drawer.adapt(text)
    return drawer.layer(text, after), units


def normalization(drawer, tensor):
    """Draw a normalization; those with batch statistics only where allowed."""
    texts = [
        "layers.LayerNormalization()",
        "layers.LayerNormalization(center=False)",
        "layers.RMSNormalization()",
        "layers.UnitNormalization()",
        "layers.GroupNormalization(1)",
        "layers.BatchNormalization(trainable=False)",
    ]
    if tensor.width < 3:  # Two normalized numbers are always 1 and -1.
        texts = texts[2:4] + texts[5:]
    if drawer.allow_batch_state and drawer.chance(0.5):
        drawer.is_whole = True
        texts = ["layers.BatchNormalization(momentum=0.5)"]
    return drawer.layer(drawer.draw.choice(texts)), tensor.width


def spectral(drawer, tensor):
    """Draw a layer whose weights every forward pass moves, where allowed."""
    if not drawer.allow_batch_state:
        return dense(drawer, tensor)
    drawer.is_whole = True
    units = drawer.draw.randint(2, 4)
    text = f"layers.SpectralNormalization(layers.Dense({units}))"
    return drawer.layer(text), units


def einsum(drawer, tensor):
    """Draw a layer that contracts the last axis."""
    units = drawer.draw.randint(2, 4)
    is_vector = tensor.kind == "vector"
    equation = "ab,bc->ac" if is_vector else "abc,cd->abd"
    shape = units if is_vector else (None, units)
    text = (
        f"layers.EinsumDense('{equation}', {shape}, "
        f"bias_axes='{equation[-1]}', activation='tanh')"
    )
    return drawer.layer(text, drawer.adapt(text)), units


def small(drawer, tensor):
    """Draw a layer with few weights or none."""
    texts = [
        "layers.Activation('tanh')",
        "layers.Rescaling(0.5, 0.1)",
        "layers.PReLU(shared_axes=[1])"
        if tensor.kind == "sequence"
        else "layers.PReLU()",
        "layers.LeakyReLU()",
    ]
    if not drawer.is_padded:
        texts.append("layers.ActivityRegularization(l2=0.05)")
        if drawer.chance(0.4):
            return adds_loss(drawer), tensor.width
    return drawer.layer(drawer.draw.choice(texts)), tensor.width


def adds_loss(drawer):
    """Add a layer that adds a loss; returns how it is called."""
    drawer.definitions["AddsLoss"] = ADDS_LOSS
    drawer.features.add("add_loss")
    return drawer.layer("AddsLoss()")


def inner_model(drawer, tensor):
    """Draw a model in the model."""
    units = drawer.draw.randint(2, 4)
    options = drawer.regularized(is_matrix=True)
    return drawer.layer(
        f"keras.Sequential([keras.Input([{tensor.width}]), "
        f"layers.Dense(3, 'tanh'{options}), layers.Dense({units})])"
    ), units


MAKERS = (dense, dense, normalization, spectral, einsum, small, inner_model)


def extend(drawer, tensor):
    """Add a layer to a vector, a new one or one used before."""
    again = drawer.reuse(tensor, 0.4)
    if again:
        call, width = again.call, again.result_width
    else:
        call, width = drawer.draw.choice(MAKERS)(drawer, tensor)
        drawer.remember(tensor, call, width)
    return drawer.apply(call, tensor.name, "vector", width)


def merge(drawer, vectors):
    """Make one vector of several."""
    if len(vectors) == 1:
        return vectors[0]
    names = ", ".join(vector.name for vector in vectors)
    widths = {vector.width for vector in vectors}
    if len(widths) == 1 and drawer.chance(0.5):
        which = drawer.draw.choice(["Add", "Multiply", "Average"])
        width = vectors[0].width
    else:
        which = "Concatenate"
        width = sum(vector.width for vector in vectors)
    call = drawer.layer(f"layers.{which}()")
    return drawer.apply(call, f"[{names}]", "vector", width)


def of_image(drawer, tensor):
    """Make a vector of an image."""
    for _ in range(drawer.draw.choice([1, 1, 2])):
        width = drawer.draw.randint(2, 3)
        convolution = (
            f"layers.Conv2D({width}, 2, padding='same', activation='tanh'"
            f"{drawer.regularized()})"
        )
        text = drawer.draw.choice(
            [
                convolution,
                f"layers.SeparableConv2D({width}, 2, padding='same')",
                f"layers.Conv2DTranspose({width}, 2)",
            ]
        )
        after = drawer.adapt(text) if text == convolution else None
        call = drawer.layer(text, after)
        tensor = drawer.apply(call, tensor.name, "image", width)
        if drawer.chance(0.3):
            text = drawer.draw.choice(
                [
                    "layers.BatchNormalization(trainable=False)",
                    "layers.GroupNormalization(1)",
                    "layers.MaxPooling2D(2)",
                ]
            )
            call = drawer.layer(text)
            tensor = drawer.apply(call, tensor.name, "image", width)
    call = drawer.layer("layers.GlobalAveragePooling2D()")
    return drawer.apply(call, tensor.name, "vector", tensor.width)

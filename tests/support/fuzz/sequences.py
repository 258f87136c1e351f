"""Random layers of sequences: from words, from step to step, to vectors."""

from fuzz import vectors
from fuzz.drawer import WORDS

KINDS = (
    "dense",
    "recurrent",
    "recurrent",
    "convolution",
    "normalization",
    "attention",
    "einsum",
    "small",
    "distributed",
)


def embed(drawer, tensor):
    """Make a sequence of words."""
    again = drawer.reuse(tensor, 0.6)
    if again:
        call, width, is_masked = again.call, again.result_width, again.is_masked
    else:
        width = drawer.draw.randint(2, 4)
        is_masked = drawer.is_padded or drawer.chance(0.5)
        options = ", mask_zero=True" if is_masked else ""
        if drawer.chance(0.15):
            options += ", embeddings_regularizer='l2'"
        text = f"layers.Embedding({WORDS}, {width}{options})"
        after = drawer.adapt(text)
        if not after and not options.endswith("'l2'") and drawer.chance(0.1):
            drawer.features.add("int8")
            after = "@.quantize('int8')"
        call = drawer.layer(text, after)
        drawer.remember(tensor, call, width, is_masked)
    return drawer.apply(call, tensor.name, "sequence", width, is_masked)


def mask(drawer, tensor):
    """Leave out steps that are all zero."""
    call = drawer.layer("layers.Masking()")
    return drawer.apply(call, tensor.name, "sequence", tensor.width, True)


def recurrent(drawer, returns_sequences):
    """Add a recurrent layer; returns how it is called, and its width."""
    units = drawer.draw.randint(2, 3)
    name = drawer.draw.choice(["LSTM", "GRU", "SimpleRNN"])
    options = ", return_sequences=True" if returns_sequences else ""
    both_ways = drawer.chance(0.25) and drawer.takes_loop()
    if not returns_sequences and not both_ways and drawer.chance(0.2):
        options += ", go_backwards=True"
    if drawer.chance(0.2):
        options += ", recurrent_regularizer='l2'"
    text = f"layers.{name}({units}{options})"
    if both_ways:
        merge = drawer.draw.choice(["concat", "sum", "ave"])
        text = f"layers.Bidirectional({text}, merge_mode='{merge}')"
        units *= 2 if merge == "concat" else 1
    return drawer.layer(text), units


def extend(drawer, tensor):
    """Add a layer to a sequence, a new one or one used before."""
    again = drawer.reuse(tensor, 0.35)
    if again:
        call, width = again.call, again.result_width
    else:
        which = drawer.draw.choice(KINDS)
        if which == "attention" and drawer.takes_loop():
            return attend(drawer, tensor)
        call, width = new_layer(drawer, tensor, which)
        drawer.remember(tensor, call, width)
    return drawer.apply(call, tensor.name, "sequence", width, tensor.is_masked)


def attend(drawer, tensor):
    """Let the steps of a sequence look at each other."""
    heads = drawer.draw.randint(1, 2)
    call = drawer.layer(f"layers.MultiHeadAttention({heads}, 2)")
    arguments = f"{tensor.name}, {tensor.name}"
    return drawer.apply(
        call, arguments, "sequence", tensor.width, tensor.is_masked
    )


def new_layer(drawer, tensor, which):
    """Add a layer of a kind, or a dense one where that cannot be."""
    width = drawer.draw.randint(2, 3)
    if which == "recurrent" and drawer.takes_loop():
        return recurrent(drawer, returns_sequences=True)
    if which == "convolution" and not tensor.is_masked:
        padding = drawer.draw.choice(["same", "causal"])
        text = (
            f"layers.Conv1D({width}, 2, padding='{padding}', activation='tanh')"
        )
        return drawer.layer(text, drawer.adapt(text)), width
    if which == "distributed" and drawer.fixed_length and drawer.takes_loop():
        text = f"layers.TimeDistributed(layers.Dense({width}, 'tanh'))"
        return drawer.layer(text), width
    if which == "normalization":
        return normalization(drawer, tensor), tensor.width
    # A layer that hands no mask on would count the padding.
    if which == "einsum" and not drawer.is_padded:
        return vectors.einsum(drawer, tensor)
    if which == "small":
        return vectors.small(drawer, tensor)
    return vectors.dense(drawer, tensor)


def normalization(drawer, tensor):
    """Add a normalization; returns how it is called."""
    texts = ["layers.BatchNormalization(trainable=False)"]
    if not drawer.is_padded:  # This one hands no mask on.
        texts.append("layers.RMSNormalization()")
    if tensor.width > 2:  # Two normalized numbers are always 1 and -1.
        texts.append("layers.LayerNormalization()")
    return drawer.layer(drawer.draw.choice(texts))


def pool(drawer, tensor):
    """Make a vector of a sequence."""
    which = drawer.draw.choice(["average", "max", "recurrent", "flat"])
    if which == "flat" and drawer.fixed_length and not tensor.is_masked:
        call = drawer.layer("layers.Flatten()")
        return drawer.apply(call, tensor.name, "vector", tensor.width * 4)
    if which == "recurrent" and drawer.takes_loop():
        call, width = recurrent(drawer, returns_sequences=False)
        return drawer.apply(call, tensor.name, "vector", width)
    name = "Max" if which == "max" and not tensor.is_masked else "Average"
    call = drawer.layer(f"layers.Global{name}Pooling1D()")
    return drawer.apply(call, tensor.name, "vector", tensor.width)

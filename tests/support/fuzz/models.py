"""Random small models, as source text."""

import dataclasses

from fuzz import sequences, vectors
from fuzz.drawer import Drawer, Tensor
from fuzz.writing import write_functional, write_sequential, write_subclassed


@dataclasses.dataclass(frozen=True)
class Model:
    """The text of a model, and what is known of it.

    Args:
        definitions: lines that stand before everything.
        text: lines of a function `make_model`.
        inputs: list of `Tensor`.
        outputs: list of `Tensor`, in the order of `structure`.
        input_structure: text with `{0}`, `{1}`, ... for the inputs.
        structure: the same for the outputs.
        kind: `"sequential"`, `"functional"` or `"subclassed"`.
        varies_in_length: whether sequences may have any length.
        is_padded: whether batches of different lengths may be padded to one.
        only_one_micro_batch: whether it is exact for whole batches only.
        has_extra: whether its input is a dict that may hold `"extra"`, an
            array `[n, 2]`; layers of its own look at it, others at what lacks
            it.
        only_layers_add_losses: whether nothing but its layers makes losses.
        features: set of words that say what it is about.
    """

    definitions: tuple
    text: str
    inputs: tuple
    outputs: tuple
    input_structure: str
    structure: str
    kind: str
    varies_in_length: bool
    is_padded: bool
    only_one_micro_batch: bool
    has_extra: bool
    only_layers_add_losses: bool
    features: frozenset


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a model may be drawn with.

    Args:
        batch_state: layers that are exact for whole batches only.
        lists: lists in nests of data, which `tf.data` takes for arrays.
        inner_tuples: tuples within nests of data, which a `DataLoader` of
            PyTorch makes lists of.
        extra: a part of the input that comes and goes.
        padding: sequences that are padded from batch to batch.
        only_layers_add_losses: a model that needs no other loss; it is then
            not sequential.
    """

    batch_state: bool
    lists: bool
    inner_tuples: bool
    extra: bool
    padding: bool
    only_layers_add_losses: bool = False


STRUCTURES = {
    1: ("{0}", "{0}", "{0}", "[{0}]", "{{'a': {0}}}"),
    2: (
        "[{0}, {1}]",
        "({0}, {1})",
        "({0}, ({1},))",
        "{{'a': ({0},), 'b': {1}}}",
        "{{'a': {0}, 'b': {1}}}",
        "{{'b': {0}, 'a': {1}}}",
        "[{0}, [{1}]]",
        "{{'a': [{0}], 'b': {1}}}",
        "[{0}, {{'c': {1}}}]",
    ),
    3: (
        "[{0}, {1}, {2}]",
        "({0}, {1}, {2})",
        "(({0}, {1}), {2})",
        "({0}, {{'d': {1}, 'c': {2}}})",
        "{{'a': {0}, 'b': {1}, 'c': {2}}}",
        "{{'c': {0}, 'a': {1}, 'b': {2}}}",
        "[{0}, [{1}, {2}]]",
        "{{'b': ({0}, {1}), 'a': {2}}}",
        "[{0}, {{'d': {1}, 'c': {2}}}]",
        "{{'a': {{'x': {0}, 'y': {1}}}, 'b': {2}}}",
    ),
}


def draw_model(draw, allowed):
    """Draw a model.

    Args:
        draw: `random.Random`.
        allowed: `Allowed`.

    Returns:
        `Model`.
    """
    is_padded = allowed.padding and draw.random() < 0.4
    drawer = Drawer(draw, allowed.batch_state, is_padded)
    shares = [0 if allowed.only_layers_add_losses else 1, 2, 2]
    kinds = ["sequential", "functional", "subclassed"]
    kind = draw.choices(kinds, shares)[0]
    if kind == "sequential":
        return draw_sequential(drawer, allowed)
    inputs = [draw_input(drawer, i) for i in range(draw.choice([1] * 4 + [2]))]
    encoded = [encode(drawer, tensor) for tensor in inputs]
    vector = vectors.merge(drawer, [each[-1] for each in encoded])
    has_extra = allowed.extra and kind == "subclassed" and len(inputs) == 1
    has_extra = has_extra and not is_padded and drawer.chance(0.6)
    if has_extra:
        vector = take_extra(drawer, vector)
    for _ in range(draw.randint(0, 1)):
        vector = vectors.extend(drawer, vector)
    sources = [vector, vector]
    sources += [tensor for each in encoded for tensor in each[:-1]]
    if allowed.only_layers_add_losses:
        # A functional model has only what lies on the way to its outputs.
        call = vectors.adds_loss(drawer)
        sources = [drawer.apply(call, vector.name, "vector", vector.width)]
    outputs = draw_heads(drawer, sources, draw.choice([1, 1, 1, 1, 2, 2, 3]))
    return finish(drawer, kind, inputs, outputs, allowed, has_extra)


def draw_sequential(drawer, allowed):
    """Draw a model that is a list of layers."""
    tensor = draw_input(drawer, 0)
    inputs = [tensor]
    drawer.may_reuse = False
    *_, tensor = encode(drawer, tensor)
    for _ in range(drawer.draw.randint(0, 2)):
        tensor = vectors.extend(drawer, tensor)
    outputs = draw_heads(drawer, [tensor], 1)
    is_list = not any("Attention" in text for _, text in drawer.layers)
    kind = "sequential" if is_list else "functional"
    return finish(drawer, kind, inputs, outputs, allowed)


def draw_input(drawer, index):
    """Draw what kind of data a model takes."""
    shares = [0, 3, 2, 0] if drawer.is_padded else [4, 3, 2, 1]
    kinds = ["vector", "words", "sequence", "image"]
    kind = drawer.draw.choices(kinds, shares)[0]
    width = 0 if kind == "words" else drawer.draw.randint(2, 4)
    return Tensor(f"x{index}", kind, width)


def encode(drawer, tensor):
    """Make a vector, and perhaps a sequence, of an input."""
    found = []
    if tensor.kind == "words":
        tensor = sequences.embed(drawer, tensor)
    elif tensor.kind == "sequence":
        if drawer.is_padded or drawer.chance(0.3):
            tensor = sequences.mask(drawer, tensor)
    if tensor.kind == "sequence":
        for _ in range(drawer.draw.choice([0, 1, 1, 2])):
            tensor = sequences.extend(drawer, tensor)
        found.append(tensor)
        tensor = sequences.pool(drawer, tensor)
    elif tensor.kind == "image":
        tensor = vectors.of_image(drawer, tensor)
    for _ in range(drawer.draw.choice([0, 1, 1, 2])):
        tensor = vectors.extend(drawer, tensor)
    return [*found, tensor]


def take_extra(drawer, tensor):
    """Use some layers only where there is an extra input, or none."""
    options = [drawer.regularized(is_matrix=True) for _ in range(2)]
    extra, other = (
        drawer.layer(f"layers.Dense({tensor.width}{each})") for each in options
    )
    drawer.count += 1
    name = f"h{drawer.count}"
    drawer.lines += [
        "if 'extra' in inputs:",
        f"    {name} = {tensor.name} + {extra}(inputs['extra'])",
        "else:",
        f"    {name} = {other}({tensor.name})",
    ]
    drawer.features.add("an extra input")
    return Tensor(name, "vector", tensor.width)


def draw_heads(drawer, sources, count):
    """Add outputs, some of them by the same layer."""
    drawer.reusable = []
    outputs = []
    for _ in range(count):
        tensor = drawer.draw.choice(sources)
        again = drawer.reuse(tensor, 0.5)
        if again:
            call, width = again.call, again.result_width
        else:
            width = drawer.draw.randint(1, 3)
            options = drawer.regularized(is_matrix=True)
            options = options.replace(", trainable=False", "")
            call = drawer.layer(f"layers.Dense({width}{options})")
            drawer.remember(tensor, call, width)
        outputs.append(
            drawer.apply(
                call, tensor.name, tensor.kind, width, tensor.is_masked
            )
        )
    return outputs


def finish(drawer, kind, inputs, outputs, allowed, has_extra=False):
    """Write a model down."""
    structure = input_structure = "{0}"
    if kind != "sequential":
        structure = draw_structure(drawer.draw, len(outputs), allowed)
        input_structure = draw_structure(drawer.draw, len(inputs), allowed)
    if has_extra:
        input_structure = "{{'a': {0}}}"
    write = {
        "sequential": write_sequential,
        "functional": write_functional,
        "subclassed": write_subclassed,
    }[kind]
    text = write(drawer, inputs, outputs, input_structure, structure)
    return Model(
        definitions=tuple(drawer.definitions.values()),
        text=text,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        input_structure=input_structure,
        structure=structure,
        kind=kind,
        varies_in_length=not drawer.fixed_length,
        is_padded=drawer.is_padded,
        only_one_micro_batch=drawer.is_whole,
        has_extra=has_extra,
        only_layers_add_losses=allowed.only_layers_add_losses,
        features=frozenset(drawer.features),
    )


def draw_structure(draw, count, allowed):
    """Draw a nest of so many leaves."""
    return draw.choice(
        [
            s
            for s in STRUCTURES[count]
            if (allowed.lists or "[" not in s)
            and (allowed.inner_tuples or "(" not in s[1:])
        ]
    )

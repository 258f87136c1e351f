"""Random small models, as source text."""

import dataclasses

WORDS = 6
"""Words that an embedding knows, with the padding 0."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a model being drawn.

    Args:
        name: what it is called in the program.
        kind: `"vector"` `[n, width]`, `"sequence"` `[n, length, width]`,
            `"words"` `[n, length]` or `"image"` `[n, 4, 4, width]`.
        width: size of the last axis; 0 for words.
        is_masked: whether it may carry a mask.
    """

    name: str
    kind: str
    width: int = 0
    is_masked: bool = False


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
        names: names of the output layers, or `None` where unknown.
        kind: `"sequential"`, `"functional"` or `"subclassed"`.
        varies_in_length: whether sequences may have any length.
        only_one_micro_batch: whether it is exact for whole batches only.
        has_extra: whether its input is a dict that may hold `"extra"`, an
            array `[n, 2]`; layers of its own look at it, others at what lacks
            it.
    """

    definitions: tuple
    text: str
    inputs: tuple
    outputs: tuple
    input_structure: str
    structure: str
    kind: str
    varies_in_length: bool
    only_one_micro_batch: bool
    has_extra: bool = False


REGULARIZERS = (
    "regularizers.L2(0.05)",
    "regularizers.L1(0.02)",
    "regularizers.L1L2(0.01, 0.03)",
    "regularizers.OrthogonalRegularizer(0.02)",
    "'l2'",
)
ACTIVATIONS = ("tanh", "sigmoid", "gelu", "softplus", "swish", "elu", "selu")

ADDS_LOSS = '''
class AddsLoss(layers.Layer):
    """Adds a loss for every example."""

    def call(self, inputs):
        axes = tuple(range(1, len(inputs.shape)))
        self.add_loss(0.1 * ops.mean(inputs**2, axis=axes))
        return inputs
'''

STATE_BY_BATCH = "state moves with every forward pass"


class ModelDrawer:
    """Draw a model.

    Args:
        draw: `random.Random`.
        allow_batch_state: whether layers may be drawn that are exact for whole
            batches only, such as BatchNormalization.
    """

    def __init__(self, draw, allow_batch_state=False):
        self.draw = draw
        self.allow_batch_state = allow_batch_state
        self.is_whole = False  # uses a layer that is exact for whole batches
        self.layers = []  # pairs of a name and a constructor
        self.lines = []
        self.after = []  # lines that follow the model's making
        self.definitions = {}
        self.count = 0
        self.fixed_length = draw.random() < 0.4
        self.reusable = []  # (kind, width, layer, result width, keeps mask)

    # Small tools.

    def chance(self, probability):
        return self.draw.random() < probability

    def layer(self, text, after=None):
        """Add a layer; returns how statements call it."""
        name = f"layer_{len(self.layers)}"
        self.layers.append((name, text))
        if after:
            self.after.append(after.replace("@", f"@{name}"))
        return f"@{name}"

    def apply(self, layer, arguments, kind, width, is_masked=False):
        """Add a statement that calls a layer; returns its result."""
        self.count += 1
        name = f"h{self.count}"
        self.lines.append(f"{name} = {layer}({arguments})")
        return Tensor(name, kind, width, is_masked)

    def regularized(self):
        """Draw further arguments of a layer with a kernel."""
        options = []
        if self.chance(0.2):
            options.append(
                f"kernel_regularizer={self.draw.choice(REGULARIZERS)}"
            )
        if self.chance(0.08):
            options.append("bias_regularizer='l2'")
        if self.chance(0.08):
            options.append("activity_regularizer=regularizers.L2(0.03)")
        if self.chance(0.06):
            options.append("kernel_constraint='max_norm'")
        if self.chance(0.1):
            options.append("use_bias=False")
            options = [o for o in options if not o.startswith("bias")]
        if self.chance(0.06):
            options.append("trainable=False")
        return "".join(f", {option}" for option in options)

    def activation(self):
        return self.draw.choice(ACTIVATIONS)

    # Layers from vector to vector; each returns its call and its width.

    def dense(self, width, kind="vector"):
        units = self.draw.randint(2, 4)
        text = (
            f"layers.Dense({units}, '{self.activation()}'{self.regularized()})"
        )
        after = None
        if self.chance(0.1) and not (
            "trainable=False" in text or "constraint" in text
        ):
            after = "@.enable_lora(2)"
        return self.layer(text, after), units

    def normalization(self, width, kind="vector"):
        texts = [
            "layers.LayerNormalization()",
            "layers.LayerNormalization(center=False)",
            "layers.RMSNormalization()",
            "layers.UnitNormalization()",
            "layers.GroupNormalization(1)",
            "layers.BatchNormalization(trainable=False)",
        ]
        if width < 3:  # Two normalized numbers are always 1 and -1.
            texts = texts[2:4] + texts[5:]
        if self.allow_batch_state and self.chance(0.5):
            self.is_whole = True
            texts = ["layers.BatchNormalization(momentum=0.5)"]
        return self.layer(self.draw.choice(texts)), width

    def spectral(self, width, kind="vector"):
        if not self.allow_batch_state:
            return self.dense(width)
        self.is_whole = True
        units = self.draw.randint(2, 4)
        return self.layer(
            f"layers.SpectralNormalization(layers.Dense({units}))"
        ), units

    def einsum(self, width, kind="vector"):
        units = self.draw.randint(2, 4)
        equation = "ab,bc->ac" if kind == "vector" else "abc,cd->abd"
        shape = units if kind == "vector" else (None, units)
        return self.layer(
            f"layers.EinsumDense('{equation}', {shape}, bias_axes="
            f"'{equation[-1]}', activation='tanh')"
        ), units

    def small(self, width, kind="vector"):
        texts = [
            "layers.Activation('tanh')",
            "layers.Rescaling(0.5, 0.1)",
            "layers.ActivityRegularization(l2=0.05)",
            "layers.PReLU(shared_axes=[1])"
            if kind == "sequence"
            else "layers.PReLU()",
            "layers.LeakyReLU()",
        ]
        if self.chance(0.4):
            self.definitions["AddsLoss"] = ADDS_LOSS
            texts = ["AddsLoss()"]
        return self.layer(self.draw.choice(texts)), width

    def inner_model(self, width, kind="vector"):
        units = self.draw.randint(2, 4)
        options = self.regularized()
        return self.layer(
            f"keras.Sequential([keras.Input([{width}]), "
            f"layers.Dense(3, 'tanh'{options}), layers.Dense({units})])"
        ), units

    def extend_vector(self, tensor):
        """Add a layer, new or one used before."""
        again = [
            entry
            for entry in self.reusable
            if entry[:2] == (tensor.kind, tensor.width)
        ]
        if again and self.chance(0.4):
            _, _, call, width = self.draw.choice(again)
        else:
            makers = [
                self.dense,
                self.dense,
                self.normalization,
                self.spectral,
                self.einsum,
                self.small,
                self.inner_model,
            ]
            call, width = self.draw.choice(makers)(tensor.width)
            self.reusable.append((tensor.kind, tensor.width, call, width))
        return self.apply(call, tensor.name, "vector", width)

    # Layers of sequences.

    def recurrent(self, returns_sequences):
        units = self.draw.randint(2, 3)
        name = self.draw.choice(["LSTM", "GRU", "SimpleRNN"])
        options = ", return_sequences=True" if returns_sequences else ""
        both_ways = self.chance(0.25)
        if not returns_sequences and not both_ways and self.chance(0.2):
            options += ", go_backwards=True"
        if self.chance(0.2):
            options += ", recurrent_regularizer='l2'"
        text = f"layers.{name}({units}{options})"
        if both_ways:
            merge = self.draw.choice(["concat", "sum", "ave"])
            text = f"layers.Bidirectional({text}, merge_mode='{merge}')"
            units *= 2 if merge == "concat" else 1
        return self.layer(text), units

    def extend_sequence(self, tensor):
        again = [
            entry
            for entry in self.reusable
            if entry[:2] == (tensor.kind, tensor.width)
        ]
        if again and self.chance(0.35):
            _, _, call, width = self.draw.choice(again)
            return self.apply(
                call, tensor.name, "sequence", width, tensor.is_masked
            )
        which = self.draw.choice(
            "dense recurrent recurrent conv normalization attention einsum "
            "small distributed".split()
        )
        arguments = tensor.name
        width = tensor.width
        if which == "recurrent":
            call, width = self.recurrent(returns_sequences=True)
        elif which == "conv" and not tensor.is_masked:
            width = self.draw.randint(2, 3)
            padding = self.draw.choice(["same", "causal"])
            call = self.layer(
                f"layers.Conv1D({width}, 2, padding='{padding}', "
                f"activation='tanh')"
            )
        elif which == "attention":
            heads = self.draw.randint(1, 2)
            call = self.layer(f"layers.MultiHeadAttention({heads}, 2)")
            arguments = f"{tensor.name}, {tensor.name}"
            return self.apply(
                call, arguments, "sequence", width, tensor.is_masked
            )
        elif which == "distributed" and self.fixed_length:
            width = self.draw.randint(2, 4)
            call = self.layer(
                f"layers.TimeDistributed(layers.Dense({width}, 'tanh'))"
            )
        elif which == "normalization":
            call = self.layer(
                self.draw.choice(
                    ["layers.LayerNormalization()"] * (width > 2)
                    + [
                        "layers.RMSNormalization()",
                        "layers.BatchNormalization(trainable=False)",
                    ]
                )
            )
        elif which == "einsum":
            call, width = self.einsum(width, "sequence")
        elif which == "small":
            call, width = self.small(width, "sequence")
        else:
            call, width = self.dense(width, "sequence")
        self.reusable.append((tensor.kind, tensor.width, call, width))
        return self.apply(call, arguments, "sequence", width, tensor.is_masked)

    def pool(self, tensor):
        """Make a vector of a sequence."""
        which = self.draw.choice(["average", "max", "recurrent", "flat"])
        if which == "flat" and self.fixed_length and not tensor.is_masked:
            self.count += 0
            call = self.layer("layers.Flatten()")
            return self.apply(call, tensor.name, "vector", tensor.width * 4)
        if which == "recurrent":
            call, width = self.recurrent(returns_sequences=False)
            return self.apply(call, tensor.name, "vector", width)
        name = "Max" if which == "max" and not tensor.is_masked else "Average"
        call = self.layer(f"layers.Global{name}Pooling1D()")
        return self.apply(call, tensor.name, "vector", tensor.width)

    def embed(self, tensor):
        """Make a sequence of words."""
        again = [e for e in self.reusable if e[0] == "words"]
        if again and self.chance(0.6):
            _, is_masked, call, width = again[0]
        else:
            width = self.draw.randint(2, 4)
            is_masked = self.chance(0.5)
            options = ", mask_zero=True" if is_masked else ""
            if self.chance(0.15):
                options += ", embeddings_regularizer='l2'"
            after = "@.enable_lora(2)" if self.chance(0.08) else None
            call = self.layer(
                f"layers.Embedding({WORDS}, {width}{options})", after
            )
            self.reusable.append(("words", is_masked, call, width))
        return self.apply(call, tensor.name, "sequence", width, is_masked)

    # Images.

    def see(self, tensor):
        """Make a vector of an image."""
        for _ in range(self.draw.randint(1, 2)):
            width = self.draw.randint(2, 3)
            text = self.draw.choice(
                [
                    f"layers.Conv2D({width}, 2, padding='same', "
                    f"activation='tanh'{self.regularized()})",
                    f"layers.SeparableConv2D({width}, 2, padding='same')",
                    f"layers.Conv2DTranspose({width}, 2)",
                ]
            )
            tensor = self.apply(self.layer(text), tensor.name, "image", width)
            if self.chance(0.3):
                text = self.draw.choice(
                    [
                        "layers.BatchNormalization(trainable=False)",
                        "layers.GroupNormalization(1)",
                        "layers.MaxPooling2D(2)",
                    ]
                )
                tensor = self.apply(
                    self.layer(text), tensor.name, "image", width
                )
        call = self.layer("layers.GlobalAveragePooling2D()")
        return self.apply(call, tensor.name, "vector", tensor.width)

    # The whole.

    def input(self, index):
        kind = self.draw.choices(
            ["vector", "words", "sequence", "image"], [4, 3, 2, 1]
        )[0]
        width = 0 if kind == "words" else self.draw.randint(2, 4)
        return Tensor(f"x{index}", kind, width)

    def encode(self, tensor):
        """Make a vector, and perhaps a sequence, of an input."""
        found = []
        if tensor.kind == "words":
            tensor = self.embed(tensor)
        elif tensor.kind == "sequence" and self.chance(0.3):
            call = self.layer("layers.Masking()")
            tensor = self.apply(
                call, tensor.name, "sequence", tensor.width, True
            )
        if tensor.kind == "sequence":
            for _ in range(self.draw.randint(0, 2)):
                tensor = self.extend_sequence(tensor)
            found.append(tensor)
            tensor = self.pool(tensor)
        elif tensor.kind == "image":
            tensor = self.see(tensor)
        for _ in range(self.draw.randint(0, 2)):
            tensor = self.extend_vector(tensor)
        return [*found, tensor]

    def merge(self, vectors):
        """Make one vector of several."""
        if len(vectors) == 1:
            return vectors[0]
        names = ", ".join(vector.name for vector in vectors)
        widths = {vector.width for vector in vectors}
        if len(widths) == 1 and self.chance(0.5):
            which = self.draw.choice(["Add", "Multiply", "Average"])
            width = vectors[0].width
        else:
            which = "Concatenate"
            width = sum(vector.width for vector in vectors)
        call = self.layer(f"layers.{which}()")
        return self.apply(call, f"[{names}]", "vector", width)

    def take_extra(self, tensor):
        """Use some layers only where there is an extra input, or none."""
        extra = self.layer(f"layers.Dense({tensor.width}{self.regularized()})")
        other = self.layer(f"layers.Dense({tensor.width}{self.regularized()})")
        self.count += 1
        name = f"h{self.count}"
        self.lines += [
            "if 'extra' in inputs:",
            f"    {name} = {tensor.name} + {extra}(inputs['extra'])",
            "else:",
            f"    {name} = {other}({tensor.name})",
        ]
        return Tensor(name, "vector", tensor.width)

    def head(self, tensor, previous):
        """Add an output."""
        same = [
            (call, width)
            for kind, tensor_width, call, width in previous
            if (kind, tensor_width) == (tensor.kind, tensor.width)
        ]
        if same and self.chance(0.5):
            call, width = self.draw.choice(same)
        else:
            width = self.draw.randint(1, 3)
            options = self.regularized().replace(", trainable=False", "")
            call = self.layer(f"layers.Dense({width}{options})")
            previous.append((tensor.kind, tensor.width, call, width))
        return self.apply(
            call, tensor.name, tensor.kind, width, tensor.is_masked
        )


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


def draw_model(draw, allow_batch_state, allow_lists, allow_extra):
    """Draw a model.

    Args:
        draw: `random.Random`.
        allow_batch_state: whether it may be exact for whole batches only.
        allow_lists: whether nests of data may hold lists, which `tf.data`
            takes for arrays.
        allow_extra: whether a part of the input may come and go.

    Returns:
        `Model`.
    """
    drawer = ModelDrawer(draw, allow_batch_state)
    kind = draw.choices(["sequential", "functional", "subclassed"], [1, 2, 2])[
        0
    ]
    if kind == "sequential":
        return draw_sequential(drawer)
    inputs = [drawer.input(i) for i in range(draw.choice([1, 1, 1, 2, 3]))]
    encoded = [drawer.encode(tensor) for tensor in inputs]
    vector = drawer.merge([each[-1] for each in encoded])
    has_extra = allow_extra and kind == "subclassed" and len(inputs) == 1
    if has_extra and draw.random() < 0.6:
        vector = drawer.take_extra(vector)
    else:
        has_extra = False
    for _ in range(draw.randint(0, 1)):
        vector = drawer.extend_vector(vector)
    sources = [vector, vector] + [
        tensor for each in encoded for tensor in each[:-1]
    ]
    previous, outputs = [], []
    for _ in range(draw.choice([1, 1, 2, 2, 3])):
        outputs.append(drawer.head(draw.choice(sources), previous))
    return finish(drawer, kind, inputs, outputs, allow_lists, has_extra)


def draw_sequential(drawer):
    """Draw a model that is a list of layers."""
    tensor = drawer.input(0)
    inputs = [tensor]
    drawer.reusable = _Forgetful()
    *found, tensor = drawer.encode(tensor)
    for _ in range(drawer.draw.randint(0, 2)):
        tensor = drawer.extend_vector(tensor)
    output = drawer.head(tensor, [])
    if any("MultiHeadAttention" in text for _, text in drawer.layers):
        return finish(drawer, "functional", inputs, [output], False)
    return finish(drawer, "sequential", inputs, [output], False)


class _Forgetful(list):
    """Where no layer may be used twice."""

    def append(self, item):
        pass


def finish(drawer, kind, inputs, outputs, allow_lists, has_extra=False):
    """Write a model down."""
    structure = input_structure = "{0}"
    if kind != "sequential":
        structure = draw_structure(drawer.draw, len(outputs), allow_lists)
        input_structure = draw_structure(drawer.draw, len(inputs), allow_lists)
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
        only_one_micro_batch=drawer.is_whole,
        has_extra=has_extra,
    )


def draw_structure(draw, count, allow_lists):
    """Draw a nest of so many leaves."""
    return draw.choice(
        [s for s in STRUCTURES[count] if allow_lists or "[" not in s]
    )


def shape_of(tensor, drawer):
    """Write the shape of an input, without samples."""
    length = 4 if drawer.fixed_length else None
    return {
        "vector": [tensor.width],
        "words": [length],
        "sequence": [length, tensor.width],
        "image": [4, 4, tensor.width],
    }[tensor.kind]


def write_input(tensor, drawer):
    """Write an input."""
    dtype = ", dtype='int32'" if tensor.kind == "words" else ""
    return f"keras.Input({shape_of(tensor, drawer)}{dtype})"


def fill(structure, tensors):
    """Fill in the names of tensors."""
    return structure.format(*[tensor.name for tensor in tensors])


def write_functional(drawer, inputs, outputs, input_structure, structure):
    """Write the function that makes a functional model."""
    lines = [f"{t.name} = {write_input(t, drawer)}" for t in inputs]
    lines += [f"{name} = {text}" for name, text in drawer.layers]
    lines += [line.replace("@", "") for line in drawer.lines]
    lines.append(
        f"model = keras.Model({fill(input_structure, inputs)}, "
        f"{fill(structure, outputs)})"
    )
    lines += [line.replace("@", "") for line in drawer.after]
    lines.append("return model")
    return "def make_model():\n" + "".join(f"    {line}\n" for line in lines)


def write_sequential(drawer, inputs, outputs, input_structure, structure):
    """Write the function that makes a sequential model."""
    del outputs, input_structure, structure
    lines = [f"{name} = {text}" for name, text in drawer.layers]
    called = [line.split("@")[1].split("(")[0] for line in drawer.lines]
    parts = ", ".join([write_input(inputs[0], drawer), *called])
    lines.append(f"model = keras.Sequential([{parts}])")
    lines += [line.replace("@", "") for line in drawer.after]
    lines.append("return model")
    return "def make_model():\n" + "".join(f"    {line}\n" for line in lines)


def write_subclassed(drawer, inputs, outputs, input_structure, structure):
    """Write a class, and the function that makes and builds one."""
    lines = ["class MyModel(keras.Model):", "    def __init__(self):"]
    lines.append("        super().__init__()")
    lines += [f"        self.{name} = {text}" for name, text in drawer.layers]
    lines += ["", "    def call(self, inputs):"]
    # A structure of names is also a pattern to take the inputs apart by.
    if input_structure == "{0}":
        lines.append("        x0 = inputs")
    else:
        lines += [f"        {line}" for line in take_apart(input_structure)]
    lines += [f"        {line.replace('@', 'self.')}" for line in drawer.lines]
    lines += [f"        return {fill(structure, outputs)}", "", ""]
    lines += ["def make_model():", "    model = MyModel()"]
    example = fill(input_structure, inputs_of(inputs))
    lines.append(f"    model({example})")
    if any("'extra'" in line for line in drawer.lines):
        extra = "'extra': np.zeros([2, 2], 'float32')"
        lines.append(f"    model({{**{example}, {extra}}})")
    lines += [f"    {line.replace('@', 'model.')}" for line in drawer.after]
    lines.append("    return model")
    return "\n".join(lines) + "\n"


def inputs_of(inputs):
    """Write what a model is called on to be built."""
    zeros = {
        "vector": "np.zeros([2, {0}], 'float32')",
        "words": "np.ones([2, 4], 'int32')",
        "sequence": "np.zeros([2, 4, {0}], 'float32')",
        "image": "np.zeros([2, 4, 4, {0}], 'float32')",
    }
    return [
        Tensor(zeros[tensor.kind].format(tensor.width), tensor.kind)
        for tensor in inputs
    ]


def take_apart(structure):
    """Write the statements that name the parts of a nest of inputs."""
    nest = eval(structure.format(*[repr(f"x{i}") for i in range(3)]))
    lines = []

    def walk(part, path):
        if isinstance(part, str):
            lines.append(f"{part} = inputs{path}")
            return
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in items:
            walk(value, f"{path}[{key!r}]")

    walk(nest, "")
    return lines

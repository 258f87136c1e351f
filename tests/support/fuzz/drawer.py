"""What a random model is drawn with: its layers and statements so far."""

import dataclasses

WORDS = 6
"""Words that an embedding knows, with the padding 0."""

REGULARIZERS = (
    "regularizers.L2(0.05)",
    "regularizers.L1(0.02)",
    "regularizers.L1L2(0.01, 0.03)",
    "'l2'",
)
ACTIVATIONS = ("tanh", "sigmoid", "gelu", "softplus", "swish", "elu", "selu")


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

    @property
    def is_input(self):
        """Whether the data come as they are."""
        return self.name.startswith("x")


@dataclasses.dataclass(frozen=True)
class Reusable:
    """A layer that may be called once more.

    Args:
        kind: kind of tensor that it takes.
        width: width of it.
        call: how statements call it.
        result_width: width of what it returns.
        is_masked: whether what it returns carries a mask.
    """

    kind: str
    width: int
    call: str
    result_width: int
    is_masked: bool = False


class Drawer:
    """Collects the layers and statements of a model.

    Args:
        draw: `random.Random`.
        allow_batch_state: whether layers may be drawn that are exact for whole
            batches only, such as BatchNormalization.
        is_padded: whether all sequences must carry a mask, and nothing may
            look at what the mask leaves out.
    """

    def __init__(self, draw, allow_batch_state=False, is_padded=False):
        self.draw = draw
        self.allow_batch_state = allow_batch_state
        self.is_padded = is_padded
        self.is_whole = False  # uses a layer that is exact for whole batches
        self.layers = []  # pairs of a name and a constructor
        self.lines = []
        self.after = []  # lines that follow the model's making
        self.definitions = {}
        self.features = set()
        self.count = 0
        self.fixed_length = not is_padded and self.chance(0.4)
        self.reusable = []
        self.may_reuse = True
        # Layers with loops take ten times as long to compile as others.
        self.loops_left = draw.choice([0, 0, 1, 1, 1, 2])

    def chance(self, probability):
        """Say yes with a probability."""
        return self.draw.random() < probability

    def layer(self, text, after=None):
        """Add a layer.

        Args:
            text: its constructor.
            after: statement to make once the model is built, with `@` for the
                layer.

        Returns:
            How statements call it.
        """
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

    def reuse(self, tensor, probability):
        """Return a layer that was used on such a tensor, or `None`."""
        again = [
            entry
            for entry in self.reusable
            if (entry.kind, entry.width) == (tensor.kind, tensor.width)
        ]
        if again and self.chance(probability):
            return self.draw.choice(again)
        return None

    def remember(self, tensor, call, width, is_masked=False):
        """Note that a layer may be used on such a tensor again."""
        if self.may_reuse:
            self.reusable.append(
                Reusable(tensor.kind, tensor.width, call, width, is_masked)
            )

    def takes_loop(self):
        """Say whether one more layer with a loop may be drawn, and count it."""
        self.loops_left -= 1
        return self.loops_left >= 0

    def adapt(self, text):
        """Draw a statement that makes a new layer learn by LoRA, or `None`."""
        if "trainable=False" in text or "constraint" in text:
            return None
        if not self.chance(0.1):
            return None
        self.features.add("LoRA")
        return "@.enable_lora(2)"

    def quantize(self, text, tensor):
        """Draw a statement that gives a new layer fewer bits, or `None`.

        What rounds to one of 255 steps is drawn where its input is exact: a
        rounding error elsewhere would now and then be a whole step.
        """
        if "regularizer" in text or "constraint" in text:
            return None
        if self.allow_batch_state and self.chance(0.3):
            self.is_whole = True
            self.features.add("float8")
            return "@.quantize('float8')"
        if tensor.is_input and self.chance(0.15):
            self.features.add("int8")
            then = "; @.enable_lora(2)" if self.chance(0.4) else ""
            return f"@.quantize('int8'){then}"
        return None

    def regularized(self, is_matrix=False):
        """Draw further arguments of a layer with a kernel."""
        options = []
        if self.chance(0.2):
            choices = list(REGULARIZERS)
            if is_matrix:
                choices.append("regularizers.OrthogonalRegularizer(0.02)")
            options.append(f"kernel_regularizer={self.draw.choice(choices)}")
        if self.chance(0.08):
            options.append("bias_regularizer='l2'")
        if self.chance(0.08) and not self.is_padded:
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
        """Draw the name of a smooth activation."""
        return self.draw.choice(ACTIVATIONS)

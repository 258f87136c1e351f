"""The text of a drawn model: sequential, functional or subclassed."""

from fuzz.drawer import Tensor


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

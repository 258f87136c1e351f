"""How the results of a traced function of a batch are computed."""

from typing import Any

from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.backend import (
    MAX_COMPARED,
    UNKNOWN,
    Recipe,
    recipe_of,
)


def recipes_of(graph: Any, results: list[Tensor]) -> list[Recipe]:
    """Tell how results are computed; see `WindowBackend.recipes`.

    Where an operation calls a function it is another one in every graph, as
    that has another name.

    Args:
        graph: of a `tf.function` of the leaves of a batch.
        results: tensors in it.
    """
    captured = {inside.op.name: value for value, inside in graph.captures}
    known: dict[str, Recipe] = {}
    writes: set[str] = set()
    for operation in graph.get_operations():
        name = operation.name
        if name in captured:
            known[name] = _of_constant(captured[name])
            continue
        given = [known.get(i.op.name) for i in operation.inputs]
        before = [known.get(b.name) for b in operation.control_inputs]
        # What a variable is read after may have written to it; or it waits for
        # something else, such as a check of the data.
        given += [
            UNKNOWN if recipe is None and b.name not in writes else recipe
            for recipe, b in zip(before, operation.control_inputs, strict=True)
        ]
        if operation.type == "NoOp" or any(
            i.dtype == "resource" for i in operation.inputs
        ):
            writes.add(name)
        known[name] = None
        if operation.type != "Placeholder":
            known[name] = _recipe(operation, given)
    return [recipe_of((t.value_index,), [known[t.op.name]]) for t in results]


def _recipe(operation: Any, given: list[Recipe]) -> Recipe:
    """Tell how an operation computes from what it is given."""
    attributes = sorted(operation.node_def.attr.items())
    calls = any(
        value.HasField("func") or value.list.func for _, value in attributes
    )
    has_own_gradient = "_gradient_op_type" in operation.node_def.attr
    if has_own_gradient or (calls and None in given):
        return UNKNOWN
    # Names of gradients, for one, are others in every graph.
    texts = [
        (key, value.SerializeToString(deterministic=True))
        for key, value in attributes
        if not key.startswith("_")
    ]
    places = [i.value_index for i in operation.inputs]
    return recipe_of((operation.type, *texts, *places), given)


def _of_constant(value: Any) -> int:
    """Tell constants apart by their numbers, and large ones by shape."""
    size = value.shape.num_elements()
    if value.dtype in ("resource", "variant") or not hasattr(value, "numpy"):
        return hash((str(value.shape), str(value) if size == 1 else ""))
    if size is None or size > MAX_COMPARED:
        return hash(str(value.shape))
    array = value.numpy()
    is_text = value.dtype == "string"
    numbers = str(array.tolist()) if is_text else array.tobytes()
    return hash((str(value.shape), str(value.dtype), numbers))

"""How the results of a traced function of a batch are computed."""

from typing import Any

from accumtrainer.keras_api.types import Tensor


def recipes_of(graph: Any, results: list[Tensor]) -> list[int | None]:
    """Tell how results are computed; see `WindowBackend.recipes`.

    Where an operation calls a function it is another one in every graph, as
    that has another name.

    Args:
        graph: of a `tf.function` of the leaves of a batch.
        results: tensors in it.
    """
    captured = {inside.op.name: value for value, inside in graph.captures}
    known: dict[str, int | None] = {}
    for operation in graph.get_operations():
        name = operation.name
        if name in captured:
            known[name] = _of_constant(captured[name])
            continue
        # What a variable is read after may have written to it.
        given = [(i.op.name, i.value_index) for i in operation.inputs]
        given += [(before.name, -1) for before in operation.control_inputs]
        read = [(known.get(source), place) for source, place in given]
        is_of_batch = operation.type == "Placeholder" or any(
            recipe is None for recipe, _ in read
        )
        known[name] = None
        if not is_of_batch:
            attributes = sorted(operation.node_def.attr.items())
            # Names of gradients, for one, are others in every graph.
            texts = [
                (key, value.SerializeToString(deterministic=True))
                for key, value in attributes
                if not key.startswith("_")
            ]
            known[name] = hash((operation.type, *texts, *read))
    found = [(known[t.op.name], t.value_index) for t in results]
    return [None if one[0] is None else hash(one) for one in found]


def _of_constant(value: Any) -> int:
    """Tell constants apart by shape, and single numbers by their value."""
    number = str(value) if value.shape.num_elements() == 1 else ""
    return hash((str(value.shape), number))

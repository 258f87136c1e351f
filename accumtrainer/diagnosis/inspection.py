"""Runs a window again without effect, to find what in it is not finite."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accumtrainer import notebook
from accumtrainer.data.batches import Batch, Window
from accumtrainer.keras_api import flatten_layers, ops, tree
from accumtrainer.keras_api.types import Model, Nest, Tensor, Variable
from accumtrainer.steps import make_backend
from accumtrainer.window.hooks import Info, collect_logs
from accumtrainer.window.objective import Objective, total_loss, unique
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.state import Scratch

MOST_ROWS = 8
"""Rows of an input that are named."""

MOST_LINES = 12
"""Findings that are printed of the first place that has some."""


FOUND = ("where", "what", "NaN", "infinite", "values", "rows")
UNOBSERVED = "Layers could not be observed: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is not finite in one tensor.

    Args:
        what: such as `"output of layer dense (Dense)"`.
        stage: `"variable"`, `"batch"`, `"layer"`, `"loss"` or `"gradient"`.
        micro_batch: index of the micro-batch, `None` for a variable.
        nans: number of values that are NaN.
        infinities: number of values that are infinite.
        size: number of values.
        rows: for a batch, the indices of the first samples concerned.

    Examples:
        >>> print(Finding(what="x", stage="batch", micro_batch=2, nans=1,
        ...               infinities=0, size=64, rows=(5,)))
        x: 1 NaN, 0 infinite of 64, in row 5
    """

    what: str
    stage: str
    micro_batch: int | None
    nans: int
    infinities: int
    size: int
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        counts = f"{self.nans:,} NaN, {self.infinities:,} infinite"
        text = f"{self.what}: {counts} of {self.size:,}"
        if not self.rows:
            return text
        name = "row" if len(self.rows) == 1 else "rows"
        return f"{text}, in {name} {', '.join(map(str, self.rows))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found when a window was run again.

    Printing it says everything in a few lines.

    Args:
        findings: tuple of `Finding`, in the order of computation: variables,
            then each micro-batch from its input to its gradients. Gradients
            stand in the order of backpropagation. What did no harm to a loss
            or a gradient, such as an infinity that a mask puts in, is left
            out.
        micro_batches: number of micro-batches in the window.
        loss_scale: the loss scale used.
        scale_overflows: whether all is finite without the loss scale. Then
            the scale was too high, which is how a good one is found.
        unobserved: why layers could not be observed, or `""`.
    """

    findings: tuple[Finding, ...]
    micro_batches: int
    loss_scale: float
    scale_overflows: bool = False
    unobserved: str = ""

    @property
    def first(self) -> Finding | None:
        """The first `Finding`, `None` if everything is finite."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        lines = [self.verdict]
        by_place: dict[int | None, list[Finding]] = {}
        for finding in self.findings:
            by_place.setdefault(finding.micro_batch, []).append(finding)
        for place, (micro_batch, findings) in enumerate(by_place.items()):
            most = MOST_LINES if place == 0 else 1
            lines += ["", f"{self._place(micro_batch)}:"]
            lines += [f"  {finding}" for finding in findings[:most]]
            if len(findings) > most:
                lines.append(f"  and {len(findings) - most} more")
        if self.unobserved:
            lines += ["", UNOBSERVED + self.unobserved]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        content = notebook.paragraph(self.verdict)
        rows = [
            [
                self._place(found.micro_batch),
                found.what,
                found.nans,
                found.infinities,
                found.size,
                ", ".join(map(str, found.rows)),
            ]
            for found in self.findings
        ]
        if rows:
            content += notebook.table(FOUND, rows)
        if self.unobserved:
            content += notebook.paragraph(UNOBSERVED + self.unobserved)
        return content

    @property
    def verdict(self) -> str:
        """What has been found, in a sentence or two."""
        if self.first is None:
            return (
                "Every micro-batch by itself is finite, run again. If the "
                "window was skipped, the sum of the gradients or their norm "
                "overflows, or on_apply returns something that is not finite, "
                "or it depends on a random draw or a rounding that came out "
                "otherwise."
            )
        if self.scale_overflows:
            return (
                f"Only the loss scale of {self.loss_scale:g} made gradients "
                "overflow. It has been lowered; nothing is wrong."
            )
        place = self._place(self.first.micro_batch)
        return f"First came, in {place}, {self.first}."

    def _place(self, micro_batch: int | None) -> str:
        if micro_batch is None:
            return "the model before the window"
        return f"micro-batch {micro_batch + 1} of {self.micro_batches}"


class Replay:
    """Runs windows again, operation by operation, with nothing kept.

    Args:
        parts: whose windows they are; they run on a backend of their own.
    """

    def __init__(self, parts: WindowParts):
        self._parts = parts
        self._hooks = parts.hooks
        self._model = parts.model
        self._state = parts.state
        self._objective = Objective(parts.hooks, parts.backend)
        self._backend = make_backend(run_eagerly=True)

    @property
    def all_variables(self) -> list[Variable]:
        """Every variable that a window reads or writes, each once."""
        return unique([*self._model.variables, *self._parts.variables])

    def inspect(
        self, window: Window, *, loss_scale: float, micro_batches_before: int
    ) -> Inspection:
        """Look for what is not finite in a window.

        Args:
            loss_scale: by which the loss is multiplied.
            micro_batches_before: those run before this window; random draws in
                hooks of the Trainer depend on it.
        """
        run = functools.partial(self._run, window, micro_batches_before)
        unobserved = ""
        try:
            findings = run(loss_scale, flatten_operations(self._model))
        except Exception as error:
            # What a layer computes inside a transformation of the backend
            # (a loop, a recomputation) may not be carried out of it.
            unobserved = f"{type(error).__name__}: {str(error)[:200]}"
            findings = run(loss_scale, [])
        findings = _harmful(findings)
        stages = {finding.stage for finding in findings}
        overflows = loss_scale != 1 and stages == {"gradient"}
        return Inspection(
            findings=tuple(findings),
            micro_batches=window.micro_batches,
            loss_scale=loss_scale,
            scale_overflows=overflows and not run(1.0, []),
            unobserved=unobserved,
        )

    def _run(
        self,
        window: Window,
        micro_batches_before: int,
        loss_scale: float,
        operations: list[Any],
    ) -> list[Finding]:
        findings = _in_variables(self._model)
        count = np.asarray(window.micro_batches, "int32")
        before = np.asarray(micro_batches_before, "int32")

        def replay(
            batches: list[Batch], count: Tensor, before: Tensor
        ) -> Tensor:
            with Scratch(self.all_variables):
                self._state.micro_batches.assign(before)
                for position, batch in enumerate(batches):
                    info = self._info(position, count, loss_scale)
                    findings.extend(
                        self._micro_batch(batch, position, info, operations)
                    )
            return ops.zeros(())

        compiled = self._backend.compile(replay, self, jit_compile=False)
        try:
            compiled(list(window.split()), count, before)
        finally:
            self._backend.write_back()
        return findings

    def _info(self, position: int, count: Tensor, loss_scale: float) -> Info:
        index = ops.convert_to_tensor(position, "int32")
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            index=index,
            micro_batches=count,
            is_last=ops.equal(index + 1, count),
            loss_scale=ops.convert_to_tensor(loss_scale, "float32"),
        )

    def _micro_batch(
        self,
        batch: Batch,
        position: int | None,
        info: Info,
        operations: list[Any],
    ) -> list[Finding]:
        """Run one micro-batch and list its findings."""
        hooks = self._hooks
        found = _in_batch(batch, position, "")
        self._state.fold_in(info.index)
        with collect_logs(hooks):
            batch = hooks.on_micro_batch(batch, info)
        if hooks.overrides("on_micro_batch") and not found:
            found += _in_batch(batch, position, " after on_micro_batch")
        sketches = []

        def sketch(operation: Any, tensor: Tensor) -> None:
            kind = type(operation).__name__
            what = f"output of layer {operation.name} ({kind})"
            sketches.append(_sketch(what, "layer", tensor))

        def objective() -> tuple[Tensor, Nest]:
            with collect_logs(hooks), recording(operations, sketch):
                measured = self._objective.measure(batch, info)
            total = total_loss(
                measured.means(), measured.losses, measured.regularization
            )
            for number, loss in enumerate(measured.losses):
                name = loss.name or ("added_loss" if number else "loss")
                sketches.append(_sketch(f"loss {name!r}", "loss", loss.mean))
            sketches.append(
                _sketch("regularization loss", "loss", measured.regularization)
            )
            total = total * info.loss_scale
            tensors = [tensor for *_, tensor in sketches]
            return total, {
                "counts": tensors,
                "loss": total,
                "weight": measured.weight,
            }

        variables = self._model.trainable_variables
        summary, gradients = self._backend.value_and_grad(objective, variables)
        pairs = zip(sketches, summary["counts"], strict=True)
        counted = [(*sketch[:-1], counts) for sketch, counts in pairs]
        found += _findings(counted, position)
        gradients = [
            ops.zeros(v.shape, "float32")
            if g is None
            else ops.cast(g, "float32") / info.loss_scale
            for g, v in zip(gradients, variables, strict=True)
        ]
        found += self._in_gradients(gradients, position, "")
        if hooks.overrides("on_accumulate") and not found:
            info = replace(
                info,
                loss=summary["loss"] / info.loss_scale,
                weight=summary["weight"],
            )
            with collect_logs(hooks):
                gradients = hooks.on_accumulate(gradients, info)
            found += self._in_gradients(
                gradients, position, " after on_accumulate"
            )
        return found

    def _in_gradients(
        self, gradients: list[Tensor], position: int | None, suffix: str
    ) -> list[Finding]:
        pairs = zip(self._model.trainable_variables, gradients, strict=True)
        sketches = [
            _sketch(f"gradient of {v.path}{suffix}", "gradient", gradient)
            for v, gradient in reversed(list(pairs))
        ]
        return _findings(sketches, position)


def _harmful(findings: list[Finding]) -> list[Finding]:
    """Leave out what is also found where loss and gradients are finite."""
    hurt = {f.micro_batch for f in findings if f.stage in ("loss", "gradient")}
    hurt.add(None)
    harmless = {
        (f.stage, f.what)
        for f in findings
        if f.micro_batch not in hurt and f.stage == "layer"
    }
    return [
        finding
        for finding in findings
        if finding.micro_batch in hurt
        and (finding.stage, finding.what) not in harmless
    ]


def flatten_operations(model: Model) -> list[Any]:
    """List the layers of a model, and what it computes between them.

    Returns:
        List of `keras.Operation`, each once.
    """
    found = []
    for layer in flatten_layers(model):
        # A functional model is a graph of layers and of bare operations.
        found += [layer, *getattr(layer, "operations", ())]
    return list({id(operation): operation for operation in found}.values())


@contextlib.contextmanager
def recording(
    operations: list[Any], observe: Callable[..., None]
) -> Iterator[None]:
    """Observe what layers return, while the `with` block is open.

    Each layer's own `call` is covered by one that also records, on the
    instance alone, and uncovered in the end.

    Args:
        observe: function that is given a layer and a tensor, for each tensor
            in the order in which the calls return.
    """
    with contextlib.ExitStack() as covers:
        for operation in operations:
            covers.enter_context(_covered(operation, observe))
        yield


@contextlib.contextmanager
def _covered(operation: Any, observe: Callable[..., None]) -> Iterator[None]:
    before = vars(operation).get("call")
    call = operation.call

    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        for tensor in tree.flatten(outputs):
            if ops.is_tensor(tensor):
                observe(operation, tensor)
        return outputs

    operation.call = recorded
    try:
        yield
    finally:
        if before is None:
            del operation.call
        else:
            operation.call = before


def _sketch(what: str, stage: str, tensor: Tensor) -> Any:
    """Count what is not finite, as `(what, stage, size, tensor of two)`."""
    tensor = ops.convert_to_tensor(tensor)
    size = int(np.prod([int(length) for length in tensor.shape]))
    if "float" not in str(tensor.dtype) or not size:
        return what, stage, size, ops.zeros([2], "int32")
    nans = ops.sum(ops.cast(ops.isnan(tensor), "int32"))
    infinities = ops.sum(ops.cast(ops.isinf(tensor), "int32"))
    return what, stage, size, ops.stack([nans, infinities])


def _findings(sketches: Iterable[Any], position: int | None) -> list[Finding]:
    """List the findings among what `_sketch` returned."""
    found = []
    for what, stage, size, counts in sketches:
        nans, infinities = ops.convert_to_numpy(counts).tolist()
        if nans or infinities:
            found.append(
                Finding(
                    what=what,
                    stage=stage,
                    micro_batch=position,
                    nans=nans,
                    infinities=infinities,
                    size=size,
                )
            )
    return found


def _in_variables(model: Model) -> list[Finding]:
    sketches = [_sketch(v.path, "variable", v.value) for v in model.variables]
    return _findings(sketches, None)


def _in_batch(batch: Batch, position: int | None, suffix: str) -> list[Finding]:
    """List what is not finite in a batch, with the rows concerned."""
    found = []
    for path, leaf in _named_leaves(batch):
        sketch = _sketch(path + suffix, "batch", leaf)
        for finding in _findings([sketch], position):
            values = np.asarray(ops.convert_to_numpy(leaf), "float64")
            is_bad = ~np.isfinite(values.reshape([len(values), -1]))
            rows = np.flatnonzero(is_bad.any(axis=1))[:MOST_ROWS]
            found.append(replace(finding, rows=tuple(rows.tolist())))
    return found


def _named_leaves(batch: Batch) -> Iterator[tuple[str, Any]]:
    for field, nest in batch._asdict().items():
        for path, leaf in tree.flatten_with_path(nest):
            if ops.is_tensor(leaf) or isinstance(leaf, np.ndarray):
                keys = "".join(f"[{key!r}]" for key in path)
                yield field + keys, leaf

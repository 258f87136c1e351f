"""What a model's own `train_step` becomes: hooks, shown where it is refused.

The source of the method is read. Where it computes one loss, takes its
gradients and applies them, the hook that replaces it is made of its own lines;
of any other, the general shape is shown.
"""

import ast
import copy
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import losses_of_layers, overrides
from accumtrainer.keras_api.types import Model

APPLYING = ("apply", "apply_gradients", "minimize")
ALL_TRAINABLE = ("self.trainable_variables", "self.trainable_weights")
PARTS = ("batch.x", "batch.y", "batch.sample_weight")
UNPACKING = "unpack_x_y_sample_weight"

# Of the functions in keras.losses, all others return a value per example.
SCALAR_LOSSES = ("dice", "tversky")

# A hook that is longer is not taken in at a glance.
MOST_LINES = 15


def refusal_of_train_step(model: Model) -> str:
    """Say why a `train_step` is refused, and what replaces it.

    Args:
        model: whose class, or which itself, overrides it.
    """
    name = type(model).__name__
    if hands_on(model):
        return errors.MODEL_WITH_OWN_TRAIN_STEP.format(
            model=name, remedy=errors.REPLACED_BY_KERAS
        )
    remedy = errors.REPLACED_BY_HOOKS.format(model=name)
    step = _read(model)
    descent = None if step is None else _find_descent(step, model)
    if descent is not None:
        hook = descent.as_hook()
        if descent.is_of_keras:
            remedy = errors.REPLACED_BY_COMPILED_LOSS
        elif len(hook) <= MOST_LINES:
            remedy = errors.REPLACED_BY_A_LOSS.format(
                model=name, hook=textwrap.indent("\n".join(hook), " " * 12)
            )
            remedy += errors.OF_A_SUM if descent.is_sum else errors.OF_A_MEAN
    if step is not None and _leaves_losses_out(model, step):
        remedy += errors.LOSSES_LEFT_OUT
    if overrides(model, "test_step"):
        remedy += errors.TEST_STEP_TOO
    return errors.MODEL_WITH_OWN_TRAIN_STEP.format(model=name, remedy=remedy)


def hands_on(model: Model) -> bool:
    """Tell whether a `train_step` does no more than hand data on to Keras's.

    It may change them before.

    Args:
        model: whose class, or which itself, overrides it.
    """
    step = _read(model)
    if step is None or "train_step" in vars(model):
        return False
    owner = next(c for c in type(model).__mro__ if "train_step" in vars(c))
    *before, last = step.body
    nodes = [node for s in before for node in ast.walk(s)]
    return (
        re.match(r"return super\([^()]*\)\.train_step\(", ast.unparse(last))
        is not None
        and not any(map(_has_effects, nodes))
        and not overrides(super(owner, model), "train_step")
    )


def _has_effects(node: ast.AST) -> bool:
    """Tell whether a node does more than give a value to a variable."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Return)


def _read(model: Model) -> ast.FunctionDef | None:
    """Read the method's source, `None` where there is none to be read."""
    method: Any = model.train_step
    try:
        source = textwrap.dedent(inspect.getsource(method))
        found = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return found if isinstance(found, ast.FunctionDef) else None


@dataclass(frozen=True, slots=True)
class _Descent:
    """A method that computes a loss and applies its gradients.

    Args:
        data: name of the method's argument.
        statements: what leads to the loss.
        loss: name of the variable that holds it.
    """

    data: str
    statements: list[ast.stmt]
    loss: str

    @property
    def is_of_keras(self) -> bool:
        """Whether the loss is that of `Model.compute_loss`, as it is."""
        call = self._call
        if call is None or self._computed_by != "self.compute_loss":
            return False
        # One of the model's own may take something else.
        return len(call.args) > 2 or "y_pred" in {k.arg for k in call.keywords}

    @property
    def is_sum(self) -> bool:
        """Whether the loss has a value per example, of which a tape sums."""
        module, _, function = self._computed_by.rpartition(".")
        return (
            module in ("keras.losses", "tf.keras.losses")
            and function.islower()
            and function not in SCALAR_LOSSES
        )

    @property
    def _computed_by(self) -> str:
        """The function that the loss comes from as it is, `""` if none."""
        return "" if self._call is None else ast.unparse(self._call.func)

    @property
    def _call(self) -> ast.Call | None:
        given = [s for s in self.statements if self.loss in _stored_in(s)]
        value = getattr(given[0], "value", None)
        return (
            value if len(given) == 1 and isinstance(value, ast.Call) else None
        )

    def as_hook(self) -> list[str]:
        """Write the lines of `compute_loss`, list of str."""
        lines, counted, is_read = [], "batch.x", False
        for statement in self.statements:
            target = self._unpacked_into(statement)
            if target is None:
                moved = _IntoHook().visit(copy.deepcopy(statement))
                lines.extend(ast.unparse(moved).splitlines())
                is_read = is_read or self.data in _read_in(moved)
                continue
            parts = getattr(target, "elts", [target])
            names = ", ".join(map(ast.unparse, parts))
            lines.append(f"{names} = {', '.join(PARTS[: len(parts)])}")
            counted = next(iter(_stored_in(parts[0])), counted)
        if is_read:
            lines.insert(0, f"{self.data} = batch.x")
        if any("self.compute_loss(" in ast.unparse(s) for s in self.statements):
            # They may be in it, by whatever factor: a Trainer adds them anyway.
            lines.append(f"{self.loss} -= sum(map(ops.sum, self.model.losses))")
        loss, count = self.loss, f"ops.shape({counted})[0]"
        if self.is_sum:
            count = "None"
        return [*lines, f"return WeightedLoss({loss}, {count})"]

    def _unpacked_into(self, statement: ast.stmt) -> ast.expr | None:
        """Return into what a statement takes the data apart, if it does."""
        if not isinstance(statement, ast.Assign):
            return None
        value = statement.value
        unpacks = isinstance(value, ast.Call) and _name(value) == UNPACKING
        is_data = isinstance(value, ast.Name) and value.id == self.data
        return statement.targets[0] if unpacks or is_data else None


def _leaves_losses_out(model: Model, step: ast.FunctionDef) -> bool:
    """Tell whether a method has no use for what the model's layers add."""
    named = r"\bself(\.\w+)*\.(losses|compute_loss|compiled_loss)\b"
    has_losses = any(losses_of_layers(model))
    return has_losses and not re.search(named, ast.unparse(step))


def _find_descent(step: ast.FunctionDef, model: Model) -> _Descent | None:
    """Find what a method descends, `None` if it does anything else."""
    arguments = [argument.arg for argument in step.args.args]
    if len(arguments) != 2:
        return None
    data = arguments[-1]
    body = [_longest_unpacking(s, data) for s in step.body]
    tapes = [
        statement
        for statement in body
        if isinstance(statement, ast.With)
        and "GradientTape" in ast.unparse(statement.items[0])
    ]
    calls = [node for node in ast.walk(step) if isinstance(node, ast.Call)]
    taken = [call for call in calls if _name(call) == "gradient"]
    applied = [call for call in calls if _name(call) in APPLYING]
    if not len(tapes) == len(taken) == len(applied) == 1:
        return None
    loss, variables = (taken[0].args + [None, None])[:2]
    before = body[: body.index(tapes[0])]
    after = body[body.index(tapes[0]) + 1 :]
    if not isinstance(loss, ast.Name) or not _are_all(variables, after):
        return None
    if not all(_is_expected(statement) for statement in after):
        return None
    statements = [s for s in [*before, *tapes[0].body] if not _is_idle(s)]
    branches = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef)
    has_branches = any(
        isinstance(node, branches) for s in statements for node in ast.walk(s)
    )
    calls_of_metrics = [*before, *tapes[0].body, *after]
    statements += [s for s in calls_of_metrics if _updates(s, loss.id, model)]
    is_known = any(loss.id in _stored_in(s) for s in statements)
    names_losses = any("self.losses" in ast.unparse(s) for s in statements)
    if has_branches or names_losses or not is_known:
        return None
    if not _takes_in_whole(statements, data):
        return None
    return _Descent(data, statements, loss.id)


def _longest_unpacking(statement: ast.stmt, data: str) -> ast.stmt:
    """Return the longest of the ways in which data are taken apart by length.

    Any other statement is returned as it is.
    """
    if not isinstance(statement, ast.If):
        return statement
    if not ast.unparse(statement.test).startswith(f"len({data})"):
        return statement
    ways = [
        s if isinstance(s, ast.Assign) else _longest_unpacking(s, data)
        for s in (*statement.body, *statement.orelse)
    ]
    given = [ast.unparse(s.value) for s in ways if isinstance(s, ast.Assign)]
    if len(given) < len(ways) or not {*given} <= {data, "None"}:
        return statement
    return max(ways, key=_count_of_parts)


def _count_of_parts(statement: ast.stmt) -> int:
    """Count what a statement assigns to, side by side."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return len(getattr(target, "elts", ()))


def _takes_in_whole(statements: list[ast.stmt], data: str) -> bool:
    """Tell whether data are x, or are taken apart into x, y and weights."""
    nodes = [node for s in statements for node in ast.walk(s)]
    names = [
        len(target.elts)
        for node in nodes
        if isinstance(node, ast.Assign) and data in _read_in(node.value)
        for target in node.targets
        if isinstance(target, ast.Tuple)
    ]
    return all(count <= len(PARTS) for count in names) and not any(
        isinstance(node, ast.Subscript) and data in _read_in(node.value)
        for node in nodes
    )


def _are_all(variables: ast.expr | None, after: list[ast.stmt]) -> bool:
    """Tell whether the loss is differentiated by all of the model."""
    if variables is None:
        return False
    text = ast.unparse(variables)
    known = {
        ast.unparse(s.targets[0]): ast.unparse(s.value)
        for s in after
        if isinstance(s, ast.Assign)
    }
    return known.get(text, text) in ALL_TRAINABLE


def _is_expected(statement: ast.stmt) -> bool:
    """Tell whether a Trainer does by itself what follows a loss.

    It takes gradients, applies them as they are, and keeps metrics.
    """
    if isinstance(statement, ast.Return):
        return True
    if isinstance(statement, ast.For):  # over metrics
        return "self.metrics" in ast.unparse(statement.iter)
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign):
        is_gradient = isinstance(value, ast.Call) and _name(value) == "gradient"
        return is_gradient or ast.unparse(statement.value) in ALL_TRAINABLE
    return isinstance(value, ast.Call) and _name(value) in (
        *APPLYING,
        "update_state",
        "compute_metrics",
    )


def _is_idle(statement: ast.stmt) -> bool:
    """Tell whether a hook has no use for a statement before the loss."""
    text = ast.unparse(statement)
    if isinstance(statement, ast.If):  # whether data are a tuple
        return text.startswith("if isinstance(")
    if isinstance(statement, ast.AugAssign):  # a Trainer adds these
        return "self.losses" in text
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and (
        isinstance(value, ast.Constant)
        or (isinstance(value, ast.Call) and _name(value) == "update_state")
    )


def _updates(statement: ast.stmt, loss: str, model: Model) -> bool:
    """Tell whether a statement updates metrics but that named `"loss"`."""
    if isinstance(statement, ast.For):
        return _is_expected(statement) and "update_state" in ast.unparse(
            statement
        )
    value = getattr(statement, "value", None)
    if not isinstance(statement, ast.Expr) or not isinstance(value, ast.Call):
        return False
    given = [ast.unparse(argument) for argument in value.args]
    metric, _, method = ast.unparse(value.func).rpartition(".")
    known = getattr(model, metric.removeprefix("self."), None)
    is_logged = given == [loss] and getattr(known, "name", None) == "loss"
    return method == "update_state" and not is_logged


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _names_in(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [
        found.id
        for found in ast.walk(node)
        if isinstance(found, ast.Name) and isinstance(found.ctx, context)
    ]


def _stored_in(node: ast.AST) -> list[str]:
    return _names_in(node, ast.Store)


def _read_in(node: ast.AST) -> list[str]:
    return _names_in(node, ast.Load)


class _IntoHook(ast.NodeTransformer):
    """Makes of what a model says what its Trainer says."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_self = node.id == "self"
        return ast.Attribute(node, "model", node.ctx) if is_self else node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        """Ask the hook's own `info` whether this is training."""
        if node.arg == "training" and ast.unparse(node.value) == "True":
            info = ast.Name("info", ast.Load())
            value = ast.Attribute(info, "training", ast.Load())
            return ast.keyword("training", value)
        self.generic_visit(node)
        return node

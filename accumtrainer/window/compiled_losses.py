"""The losses of `Model.compile`, measured output by output."""

import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accumtrainer import errors
from accumtrainer.keras_api import compile_losses, keras, ops, tree
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.window.losses import (
    BareLoss,
    WeightedLoss,
    find_loss,
    loss_name,
    measure,
    resolve_loss,
    shape_of,
    sort_of,
)
from accumtrainer.window.reducing import (
    OnItsOwn,
    fails_to_add_up,
    reduces_examples,
)

_Shape = tuple[int | None, ...]


class CompiledPart(NamedTuple):
    """One of the losses of `Model.compile`, of one micro-batch.

    Attributes:
        name: under which Keras logs it where there are several.
        loss: `WeightedLoss`, or `BareLoss` where it reduced by itself.
        coefficient: its `loss_weights`, a number or a variable.
    """

    name: str
    loss: Any
    coefficient: Any


class CompiledLoss:
    """The `loss` and `loss_weights` of a model, measured output by output.

    Keras pairs losses, weights, targets and outputs; here is only measured
    what each loss is worth.

    Args:
        loss: what `Model.compile` takes as `loss`.
        loss_weights: what `Model.compile` takes as `loss_weights`.
        output_names: list of str, or `None` where the model has no names.

    Attributes:
        on_its_own: that of the backend on which losses are tried.
    """

    def __init__(
        self,
        loss: Nest,
        loss_weights: Nest = None,
        output_names: list[str] | None = None,
    ):
        self.on_its_own: OnItsOwn = lambda function: function
        self._measured: list[WeightedLoss | BareLoss] = []
        self._measuring: list[_Measuring] = []
        self._board = _LossBoard(output_names)
        self._compute = compile_losses(
            self._board,
            tree.map_structure(self._wrap, loss),
            _complete_weights(loss, loss_weights),
        )

    def _wrap(self, leaf: Any) -> "_Measuring | None":
        if leaf is None:
            return None
        self._measuring.append(_Measuring(leaf, self._measured, self))
        return self._measuring[-1]

    @property
    def is_unsure(self) -> bool:
        """Whether some outputs may pair examples, or not."""
        return any(one.may_pair(one.shape) for one in self._outputs)

    @property
    def shapes(self) -> list[Any]:
        """Shapes of the outputs that it was given last, loss by loss."""
        return [one.shape for one in self._outputs]

    def learn(self, once: list[Any]) -> None:
        """Learn which outputs pair examples, after a call with twice the data.

        Args:
            once: the `shapes` before.
        """
        for one, shape in zip(self._outputs, once, strict=True):
            if one.may_pair(shape):
                one.pairs = shape[1:] != one.shape[1:]

    @property
    def _outputs(self) -> list["_Output"]:
        return [v for one in self._measuring for v in one.outputs.values()]

    @property
    def variables(self) -> list[Variable]:
        """Variables in which Keras tracks the losses, read by nobody."""
        return [v for metric in self._board.metrics for v in metric.variables]

    def __call__(
        self, y: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> list[CompiledPart]:
        """Evaluate every output's loss with its denominator.

        Args:
            y: nest of tensors, the targets.
            y_pred: nest of tensors, the predictions, masks attached.
            sample_weight: nest of tensors, or `None`.
        """
        self._measured.clear()
        paired = self._compute(y, y_pred, sample_weight)
        measured = list(self._measured)
        self._measured.clear()
        _check_alike(
            [m for p, m in zip(paired, measured, strict=True) if p.counts]
        )
        return [
            CompiledPart(
                pair.name,
                loss if pair.counts else WeightedLoss(ops.zeros(()), None),
                _as_coefficient(pair.weight),
            )
            for pair, loss in zip(paired, measured, strict=True)
        ]


class _LossBoard(keras.Model):
    """A model without layers that lends `compile` and `compute_loss`."""

    def __init__(self, output_names: list[str] | None):
        super().__init__()
        if output_names is not None:
            self.output_names = list(output_names)


@dataclass(slots=True)
class _Output:
    """What is known of an output with its loss.

    Args:
        flaw: why nobody knows what the loss was divided by, "" if it is known,
            `None` before that is found out.
        shape: of the output, see `_shape_if_spread`.
        pairs: whether that has an axis more of examples, `None` if unknown.
    """

    flaw: str | None = None
    shape: _Shape = ()
    pairs: bool | None = None

    def may_pair(self, shape: _Shape) -> bool:
        """Whether it may have an axis more of examples, for all that is known.

        Args:
            shape: that of the output.
        """
        length, *others = shape or (None,)
        return self.pairs is None and length is not None and length in others


class _Measuring(keras.losses.Loss):
    """A loss that reduces as Keras does and keeps what it has seen.

    Attributes:
        outputs: dict of `_Output`s, by their places: Keras gives one loss to
            all outputs, where it is given one.
    """

    def __init__(
        self,
        identifier: Any,
        measured: list[WeightedLoss | BareLoss],
        among: CompiledLoss,
    ):
        super().__init__(name=loss_name(identifier))
        self._identifier = identifier
        self._among = among
        self._measured = measured
        self.outputs: dict[int, _Output] = {}

    def __repr__(self) -> str:
        return repr(self._identifier)  # Keras shows it in messages

    def __call__(
        self,
        y_true: Tensor,
        y_pred: Tensor,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        loss = resolve_loss(self._identifier, y_true, y_pred)
        measured = measure(loss, y_true, y_pred, sample_weight)
        if isinstance(measured, BareLoss) and self._averages(
            y_true, y_pred, sample_weight
        ):
            origin = errors.LOSS_OF_ROWLESS.format(loss=loss.name)
            measured = measured._replace(origin=origin)
        if isinstance(measured, WeightedLoss):
            sort = sort_of(measured)
            output = self.outputs.setdefault(len(self._measured), _Output())
            if output.flaw is None:
                output.flaw = self._find_flaw(loss, y_true, y_pred, sort)
            output.shape = _shape_if_spread(loss, y_true, y_pred)
            flaw = errors.PAIRING_OUTPUTS if output.pairs else output.flaw
            if flaw:
                origin = flaw.format(loss=loss.name)
                measured = (
                    replace(measured, origin=origin)
                    if sort == "values"
                    else BareLoss(measured.mean, origin)
                )
        self._measured.append(measured)
        return ops.zeros(())  # the sum is not Keras's to make

    def _find_flaw(
        self, loss: Any, y_true: Tensor, y_pred: Tensor, sort: str
    ) -> str:
        """Say why nobody knows what it was divided by, "" if it is known."""
        given = loss, y_true, y_pred
        is_sum = sort == "sum"  # of whatever
        if not is_sum and reduces_examples(*given):
            return errors.REDUCED_LOSS
        if self._is_of_keras(y_true, y_pred) or not fails_to_add_up(
            *given, self._among.on_its_own
        ):
            return ""
        return errors.REDUCED_LOSS if is_sum else errors.COUPLING_LOSS

    def _averages(self, y_true: Tensor, y_pred: Tensor, weights: Any) -> bool:
        """Whether it may be a mean over examples, for want of another axis.

        Keras multiplies that by the mean of weights.
        """
        shapes = (getattr(part, "shape", ()) for part in (y_true, y_pred))
        is_row = any(len(shape) == 1 for shape in shapes) and weights is None
        return is_row and self._is_of_keras(y_true, y_pred)

    def _is_of_keras(self, y_true: Tensor, y_pred: Tensor) -> bool:
        code = find_loss(self._identifier, y_true, y_pred)
        if isinstance(code, keras.losses.Loss):
            # One of Keras's may be made of a function that others wrote.
            parts = [type(code), getattr(code, "fn", type(code))]
        else:
            parts = [code]
        return all(map(_is_in_keras, parts))


def _is_in_keras(code: Any) -> bool:
    """Whether a class or function is what Keras has under its name.

    Functions may have the name of another one, which they wrap, and lambdas
    that Keras has loaded are of its modules.
    """
    module = str(getattr(code, "__module__", None))
    name = getattr(code, "__name__", "")
    found = getattr(sys.modules.get(module), name, None)
    return found is code and module.partition(".")[0] == keras.__name__


def _check_alike(losses: list[WeightedLoss | BareLoss]) -> None:
    """Refuse losses of values beside others that are no such values.

    TensorFlow would spread one over the other before it sums them.
    """
    shapes = [
        shape_of(v.value if isinstance(v, BareLoss) else v.mean) for v in losses
    ]
    if len({(len(shape), *shape[1:]) for shape in shapes}) > 1:
        raise ValueError(errors.LOSSES_OF_SEVERAL_SHAPES.format(shapes=shapes))


def _shape_if_spread(loss: Any, y_true: Tensor, y_pred: Tensor) -> _Shape:
    """Return the shape of outputs that are spread over an axis more.

    Targets lack it, or have 1 there. It may be one of examples, unless it is
    that of the classes of a sparse crossentropy. Of other outputs it is `()`.
    """
    of_targets, of_outputs = (
        tuple(getattr(part, "shape", ())) for part in (y_true, y_pred)
    )
    is_spread = len(of_targets) < len(of_outputs) or 1 in of_targets[1:]
    return of_outputs if is_spread and "sparse" not in loss.name else ()


def _as_coefficient(weight: Any) -> Any:
    """Turn a loss weight into a float, unless it is one that may change."""
    if weight is None:
        return 1.0
    is_constant = isinstance(weight, (int, float, np.ndarray, np.generic))
    return float(weight) if is_constant else weight


def _complete_weights(loss: Nest, loss_weights: Nest) -> Nest:
    """Give every loss of a dict a weight, and refuse weights of no loss."""
    if loss_weights is None:
        return None
    if isinstance(loss, dict) and isinstance(loss_weights, dict):
        unknown = sorted(set(loss_weights) - set(loss))
        if unknown:
            raise ValueError(
                "loss_weights must name outputs that have a loss. Received: "
                f"loss_weights for {unknown}, losses for {sorted(loss)}. "
                "Remove the extra names or give them a loss."
            )
        ones = tree.map_structure(lambda leaf: 1.0, loss)
        loss_weights = {key: loss_weights.get(key, ones[key]) for key in loss}
    leaves, weights = tree.flatten(loss), tree.flatten(loss_weights)
    if len(leaves) != len(weights):
        raise ValueError(
            "loss_weights must have one entry per loss. Received: "
            f"{len(weights)} weights for {len(leaves)} losses. Give one "
            "weight per loss, in the same order."
        )
    return loss_weights

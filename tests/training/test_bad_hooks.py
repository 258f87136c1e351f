"""Claims about hooks that return what they should not: refused by name."""

import pytest
from refusals import (
    X,
    Y,
    assert_refused,
    assert_same_state,
    make_model,
    state_of,
)

from accumtrainer import (
    Accumulation,
    Batch,
    Trainer,
    WeightedLoss,
)
from accumtrainer.keras_api import ops

pytestmark = pytest.mark.usefixtures("without_xla")


HOOKS = [
    ("on_micro_batch", lambda self, batch, info: batch.x, TypeError),
    ("on_micro_batch", lambda self, batch, info: None, TypeError),
    (
        "on_micro_batch",
        lambda self, batch, info: Batch((batch.x, batch.x), batch.y),
        TypeError,
    ),
    ("on_accumulate", lambda self, gradients, info: None, TypeError),
    ("on_accumulate", lambda self, gradients, info: gradients[:1], TypeError),
    ("on_apply", lambda self, gradients, info: gradients[0], TypeError),
    (
        "on_apply",
        lambda self, gradients, info: [ops.sum(g) for g in gradients],
        TypeError,
    ),
    (
        "on_apply",
        lambda self, gradients, info: [None for _ in gradients],
        TypeError,
    ),
    ("compute_loss", lambda self, batch, info: ops.sum(batch.y), TypeError),
    ("compute_loss", lambda self, batch, info: None, TypeError),
    ("compute_loss", lambda self, batch, info: {}, TypeError),
    (
        "compute_loss",
        lambda self, batch, info: WeightedLoss(batch.y, 4.0),
        ValueError,
    ),
]


@pytest.mark.parametrize(
    ("name", "hook", "error"),
    [
        pytest.param(*each, id=f"{each[0]}-{position}")
        for position, each in enumerate(HOOKS)
    ],
)
def test_hook_that_returns_the_wrong_structure_is_refused(name, hook, error):
    model = make_model()
    trainer = type("MyTrainer", (Trainer,), {name: hook})(model)
    before = state_of(model)
    with pytest.raises(error, match=rf"{name} must return .*Received: "):
        trainer.fit(X, Y, verbose=0)
    assert_same_state(before, state_of(model))


def test_refusal_of_a_loss_of_several_values_names_mean_and_sum():
    def compute_loss(self, batch, info):
        values = ops.mean(batch.y, axis=-1)
        return WeightedLoss(values, ops.shape(values)[0])

    trainer = type("MyTrainer", (Trainer,), {"compute_loss": compute_loss})
    assert_refused(
        lambda: trainer(make_model()).fit(X, Y, verbose=0),
        ValueError,
        "compute_loss must return scalar means",
        "give what you divided by as the denominator; or give None",
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.fit(X, batch_size=4, verbose=0),
        lambda trainer: trainer.train_on_batch(X),
        lambda trainer: trainer.check_equivalence(X),
        lambda trainer: trainer.evaluate(X, verbose=0),
    ],
    ids=["fit", "train_on_batch", "check_equivalence", "evaluate"],
)
def test_loss_of_targets_without_any_is_refused(call):
    model = make_model()
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=2))
    before = state_of(model)
    assert_refused(
        lambda: call(trainer),
        ValueError,
        "y must hold the targets of the loss 'mean_squared_error'",
        "Give fit x and y",
    )
    assert_same_state(before, state_of(model))


def test_bare_scalar_loss_of_several_micro_batches_is_refused():
    model = make_model(loss=lambda y, p: ops.mean(ops.square(y - p)))
    trainer = Trainer(model, accumulation=2)
    before = state_of(model)
    assert_refused(
        lambda: trainer.fit(X, Y, batch_size=4, verbose=0),
        ValueError,
        "Trainer(denominator='samples')",
    )
    assert_same_state(before, state_of(model))

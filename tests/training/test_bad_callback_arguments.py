"""Claims about bad arguments of callbacks and of saving: refused when made."""

import pytest
from refusals import (
    X,
    Y,
    assert_refused,
    assert_same_state,
    make_model,
    row,
    state_of,
)

from accumtrainer import (
    CheckpointError,
    Logger,
    Trainer,
    callbacks,
)

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


class Silent(Logger):
    def write(self, updates, numbers):
        """Write nothing."""


def bad_value(make, name, value):
    """Make a row of a callback that is given one bad value."""
    return row(
        f"{make.__name__}-{name}={value!r}",
        lambda: make(**{name: value}),
        (TypeError, ValueError),
        f"{name} must",
        repr(value),
    )


def checkpoint(directory="runs", **arguments):
    return callbacks.Checkpoint(directory, **arguments)


def run_log(path="log.jsonl", **arguments):
    return callbacks.RunLog(path, **arguments)


def training_plot(path="plot.png", **arguments):
    return callbacks.TrainingPlot(path, **arguments)


def nan_locator(directory="nans", **arguments):
    return callbacks.NaNLocator(directory, **arguments)


def profile(directory="profile", **arguments):
    return callbacks.Profile(directory, **arguments)


def gradient_accumulation(steps=2, **arguments):
    return callbacks.GradientAccumulation(steps, **arguments)


CALLBACKS = [
    *(
        bad_value(make, name, value)
        for make, name, values in [
            (checkpoint, "directory", (None, 5, "auto")),
            (checkpoint, "every", (10, "epochs")),
            (checkpoint, "keep", (0, -1, 1.5, True)),
            (checkpoint, "keep_best", (True, 3)),
            (checkpoint, "mode", ("lowest", None)),
            (checkpoint, "signals", ("SIGTERM", ("TERM",))),
            (run_log, "path", (None, 5)),
            (run_log, "every", (10, "updates")),
            (training_plot, "path", (None, 5, "plot.txt")),
            (training_plot, "every", (10, "updates")),
            (training_plot, "redraw_secs", (-1, "often", True)),
            (callbacks.Throughput, "every", (10, "updates")),
            (callbacks.Throughput, "tokens", (512, "x")),
            (nan_locator, "directory", (None, 5)),
            (nan_locator, "most_reports", (0, -1, 1.5, "all", True)),
            (profile, "first_update", (-1,)),
            (profile, "updates", (0, -1)),
            (callbacks.WandbLogger, "every", (10, "updates")),
            (callbacks.WandbLogger, "watch", ("everything", True)),
            (callbacks.WandbLogger, "watch_every", (10, "updates")),
            (callbacks.WandbLogger, "best", ({"val_loss": "low"},)),
            (gradient_accumulation, "steps", (0, 2.5, True, None)),
            (gradient_accumulation, "combine", ("average",)),
            (Silent, "every", (10, "updates")),
        ]
        for value in values
    ),
    row(
        "gradient-accumulation-in-a-trainer",
        lambda: callbacks.GradientAccumulation(2),
        ValueError,
        "GradientAccumulation must be given to keras.Model.fit",
    ),
    row(
        "run-log-below-a-file",
        lambda: callbacks.RunLog(f"{__file__}/log.jsonl"),
        ValueError,
        "path must name a file that can be written",
    ),
    row(
        "watching-gradients-that-nobody-keeps",
        lambda: callbacks.WandbLogger("a", watch="gradients"),
        ValueError,
        "watch must be 'weights' unless the Trainer keeps its gradients",
        "watch='gradients'",
    ),
    row(
        "wandb-run-and-project",
        lambda: callbacks.WandbLogger("a", run=object()),
        ValueError,
        "run must be given without project",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), CALLBACKS)
def test_callback_refuses_a_bad_argument(
    make, error, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        trainer.fit(X, Y, verbose=0, callbacks=[make()])

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))
    assert trainer.progress.samples == 0
    assert list(tmp_path.iterdir()) == []


SAVING = [
    row(
        "save-onto-something-else",
        lambda trainer, path: trainer.save(path / "notes"),
        CheckpointError,
        "path must be a new directory or a checkpoint to be replaced",
        "notes",
    ),
    row(
        "restore-from-nowhere",
        lambda trainer, path: trainer.restore(path / "none"),
        CheckpointError,
        "There must be a checkpoint to go on from",
        "none",
    ),
    row(
        "restore-from-something-else",
        lambda trainer, path: trainer.restore(path / "notes"),
        CheckpointError,
        "notes",
    ),
    *(
        row(
            f"which={which!r}",
            lambda trainer, path, which=which: trainer.restore(path, which),
            (TypeError, ValueError),
            "which must be one of",
            f"which={which!r}",
        )
        for which in ("newest", None, 3)
    ),
    row(
        "best-of-none",
        lambda trainer, path: trainer.restore(path, which="best"),
        CheckpointError,
        "must",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), SAVING)
def test_saving_refuses_a_bad_argument(call, error, words, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("milk")
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)
    assert_refused(lambda: call(trainer, tmp_path), error, *words)
    assert_same_state(before, state_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert (tmp_path / "notes" / "todo.txt").read_text() == "milk"

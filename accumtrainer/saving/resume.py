"""What `fit`, `save` and `restore` have to do with snapshots."""

import dataclasses
import os
import warnings
from importlib import metadata
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras
from accumtrainer.observers.callback import flatten_callbacks
from accumtrainer.saving.checkpoint import CheckpointDirectory, find_checkpoint
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.saving.wandb_artifacts import is_reference, read_artifact


def take_snapshot(trainer: Any, engine: Any, loop: Any) -> Snapshot:
    """Copy everything that training changes to the host.

    Args:
        trainer: `Trainer`.
        engine: its `Engine`.
        loop: its `FitLoop`, or `None` outside a fit.
    """
    if loop is not None and loop.to_be_restored is not None:
        return loop.to_be_restored
    # What has been frozen or unfrozen since counts already.
    if loop is None:
        engine.follow_model()
    else:
        engine.follow_model_amid_fit()
    values, progress = engine.capture()
    nothing: dict[str, Any]
    nothing = {"position": None, "source": None, "run": None, "callbacks": {}}
    return Snapshot(
        variables=values,
        progress=progress,
        about=_facts(trainer) | {"compiled_shapes": engine.compiled_shapes},
        **(nothing if loop is None else loop.snapshot_parts()),
    )


def _facts(trainer: Any) -> dict[str, Any]:
    plan = trainer.plan
    return {
        "backend": BACKEND,
        "versions": {
            "accumtrainer": metadata.version("accumtrainer"),
            KERAS_NAME: keras.__version__,
        },
        "model": type(trainer.model).__name__,
        "optimizer": type(trainer.optimizer).__name__,
        "seed": trainer.seed,
        "accumulation": repr(trainer.accumulation),
        "scales_loss": trainer.loss_scale is not None,
        "plan": None if plan is None else dataclasses.asdict(plan),
    }


def find_saved(resume_from: Any, callbacks: Any) -> Snapshot | None:
    """Find the snapshot that a fit shall go on from.

    Args:
        resume_from: `None`, `"auto"`, the path of a checkpoint or of a
            directory of them, or one that W&B keeps.
        callbacks: callbacks, in which `"auto"` looks for a directory.

    Returns:
        `Snapshot`, or `None` to begin anew.

    Raises:
        TypeError: `resume_from` is none of these.
        ValueError: `"auto"` without a callback that saves.
        CheckpointError: there is nothing good at the path.
    """
    if resume_from is None:
        return None
    if not isinstance(resume_from, str | os.PathLike):
        raise TypeError(
            "resume_from must be 'auto', a path or None. Received: "
            f"resume_from={resume_from!r}. Use 'auto' with a Checkpoint among "
            "the callbacks."
        )
    if is_reference(resume_from):
        return read_artifact(str(resume_from))
    if resume_from != "auto":
        return find_checkpoint(resume_from)
    places = [
        callback.checkpoints
        for callback in flatten_callbacks(callbacks)
        if isinstance(
            getattr(callback, "checkpoints", None), CheckpointDirectory
        )
    ]
    if not places:
        raise ValueError(
            "resume_from='auto' must come with a Checkpoint among the "
            "callbacks, which says where to look. Received: none. Add "
            "accumtrainer.callbacks.Checkpoint(directory), or give the path."
        )
    found, failures = [], []
    for place in places:
        try:
            found.append(place.newest())
        except errors.CheckpointError as error:
            failures.append(error)
    good = [snapshot for snapshot in found if snapshot is not None]
    if failures and not good:
        raise failures[0]
    for failure in failures:
        warnings.warn(f"{failure} It is skipped.", stacklevel=3)
    return max(
        good,
        key=lambda snapshot: snapshot.progress["micro_batches"],
        default=None,
    )


def check_same(saved: Snapshot, trainer: Any) -> None:
    """Refuse to go on with another optimizer; say what cannot be the same.

    Args:
        trainer: `Trainer`.

    Raises:
        CheckpointError: the optimizer is of another class.
    """
    before, now = saved.about["optimizer"], type(trainer.optimizer).__name__
    if before != now:
        raise errors.CheckpointError(
            errors.OTHER_CLASS.format(part="optimizer", before=before, now=now)
        )
    if saved.about["backend"] != BACKEND:
        warnings.warn(
            f"The checkpoint was made on {saved.about['backend']}. Weights, "
            "optimizer and counters go on as they were; random numbers "
            f"(dropout, augmentation) are other ones on {BACKEND}.",
            stacklevel=3,
        )

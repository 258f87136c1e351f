"""Checkpoints that W&B keeps as artifacts, brought onto this machine."""

import re
import tempfile
from typing import Any

from accumtrainer import errors
from accumtrainer.saving.checkpoint import find_checkpoint
from accumtrainer.saving.snapshot import Snapshot

PREFIX = "wandb:"
REFERENCE = re.compile(r"wandb:([^/:\s]+/){1,2}[^/:\s]+:[^/:\s]+")


def is_reference(place: Any) -> bool:
    """Say whether a place is W&B's: a string that begins with `wandb:`."""
    return isinstance(place, str) and place.startswith(PREFIX)


def read_artifact(reference: str) -> Snapshot:
    """Download a checkpoint from W&B, and read it.

    Args:
        reference: `"wandb:entity/project/name:alias"`; the entity may be left
            out.

    Raises:
        ValueError: it is not written like that.
        ImportError: W&B is not installed.
        CheckpointError: W&B does not give it, or it is no good checkpoint.
    """
    if not REFERENCE.fullmatch(reference):
        raise ValueError(
            "resume_from must be 'wandb:entity/project/name:alias' where it "
            f"begins with wandb. Received: resume_from={reference!r}. The name "
            "is in the run's list of artifacts; the alias is for example "
            "latest or best."
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            _download(reference.removeprefix(PREFIX), folder)
        except ImportError:
            raise
        # Whatever W&B or the network raises, it says it in its own words.
        except Exception as error:
            raise errors.CheckpointError(
                errors.NO_ARTIFACT.format(place=reference, reason=error)
            ) from error
        return find_checkpoint(folder)


def _download(name: str, folder: str) -> None:
    """Ask W&B for an artifact: the one place where its server is needed."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "A checkpoint in W&B needs W&B, which is not installed. "
            "Run: pip install 'accumtrainer[wandb]'"
        ) from error
    wandb.Api().artifact(name, type="model").download(root=folder)

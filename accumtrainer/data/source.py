"""The interface of everything that batches are taken from."""

import abc
import contextlib
import math
import warnings
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.config import require_count


class Source(abc.ABC):
    """Where loader batches come from, epoch by epoch.

    Attributes:
        batches_per_epoch: loader batches in an epoch, `None` if unknown.
        samples_per_epoch: samples in an epoch, `None` if unknown.
        batch_size: samples in a loader batch, `None` if unknown.
        is_one_shot: whether the data can be iterated only once, so that
            epochs share it and several need `steps_per_epoch`.
        is_endless: whether an epoch is known never to end.
        orders_epochs: whether any epoch can be begun at any time, each with an
            order of its own.
        processes: how many processes have a share each of the batches; 1
            where all are given the same.
    """

    batches_per_epoch: Any = None  # a property where it can change
    samples_per_epoch: int | None = None
    batch_size: int | None = None
    is_one_shot: bool = False
    is_endless: bool = False
    orders_epochs: bool = False
    processes: int = 1

    def together(self):
        """Make a context that fails everywhere if it fails in one process."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def iterate(self, epoch, start=0):
        """Yield the loader items of one epoch, in order.

        Epoch 0 begins with the first item again whenever it is asked for,
        but for data that can be iterated only once.

        Args:
            epoch: index of the epoch, from zero.
            start: loader batches to leave out at the beginning; above 0 only
                after `go_to` has been asked to go there.

        Yields:
            Items to hand to `window`, one for every loader batch.
        """

    @abc.abstractmethod
    def get_state(self):
        """Return what a saved position needs besides itself.

        Returns:
            Dict of plain values and bytes.
        """

    @abc.abstractmethod
    def go_to(self, position, state, *, fast_forward):
        """Get ready to go on from a saved position, before anything is taken.

        Args:
            position: `Position`; `batches` is changed where the loader's
                batches have another size now.
            state: what `get_state` returned when the position was saved.
            fast_forward: whether to run through past data where there is no
                better way.

        Raises:
            DataError: the data do not lead there, or not again.
        """

    @abc.abstractmethod
    def window(self, items, micro_batch_size):
        """Make a window of loader items.

        Args:
            items: sequence of items that `iterate` yielded, each of them one
                micro-batch; exactly one with `micro_batch_size`.
            micro_batch_size: samples per micro-batch when the one item is
                sliced, the last slice possibly shorter; else `None`.

        Returns:
            `Window`.
        """


def part_of_pass(epoch, steps, batches, skipped, epochs_before):
    """Find out which part of which pass over the data an epoch is.

    Without `steps` an epoch is one pass. With it, a pass is cut into epochs of
    `steps` batches, of which the last takes what is left; so does the only
    one where `steps` is more than there are. As in Keras, no epoch goes on
    with the next pass.

    Args:
        epoch: index of the epoch.
        steps: loader batches in an epoch, or `None`.
        batches: loader batches in a pass.
        skipped: first batches of the epoch to leave out.
        epochs_before: epochs before epoch 0, whose passes are counted too.

    Returns:
        Tuple `(pass_index, start, stop)`.

    Example:
        >>> [part_of_pass(epoch, 3, 5, 0, 0) for epoch in range(3)]
        [(0, 0, 3), (0, 3, 5), (1, 0, 3)]
    """
    if steps is None:
        return epochs_before + epoch, skipped, batches
    epochs_per_pass = math.ceil(batches / steps)
    index, part = divmod(epoch, epochs_per_pass)
    start, stop = part * steps, min(batches, (part + 1) * steps)
    passes_before = math.ceil(epochs_before / epochs_per_pass)
    return passes_before + index, min(stop, start + skipped), stop


def warn_of_the_end(batches, steps):
    """Warn that the data have ended before an epoch of some steps has."""
    warnings.warn(
        errors.RAN_OUT.format(batches=batches, steps=steps), stacklevel=2
    )


def permutation(size, seed, pass_index):
    """Return the order of one pass, which depends on nothing else."""
    order = np.random.default_rng((seed, pass_index)).permutation(size)
    return order.astype(np.intp, copy=False)


def require_same(names, position, before, now, message=errors.OTHER_DATA):
    """Refuse to go on with a source that differs from the one of a saved run.

    Args:
        names: which parts of the states have to be the same.
        position: `Position` that was saved.
        before: what `get_state` returned then.
        now: what it returns now.
        message: str, why they have to.

    Raises:
        DataError: one is not the same.
    """
    for name in names:
        if before.get(name) != now[name]:
            raise errors.DataError(
                message.format(
                    what=name,
                    before=before.get(name),
                    now=now[name],
                    epoch=position.epoch,
                    batches=position.batches,
                )
            )


def require_same_epochs(names, position, before, now):
    """Refuse epochs of some steps that would begin elsewhere in the data.

    See `require_same`; nothing has to be the same at the very beginning, nor
    where epochs are passes over the data.
    """
    is_begun = position.epoch or position.is_amid_epoch
    if is_begun and (before.get("has_steps") or now["has_steps"]):
        require_same(names, position, now | before, now, errors.OTHER_STEPS)


def check_ends(source, argument, others=""):
    """Refuse a source whose epochs are known never to end.

    Args:
        source: `Source`.
        argument: name of the argument that would end them.
        others: str, what else would.

    Raises:
        ValueError: it has no end.
    """
    if source.is_endless:
        raise ValueError(
            errors.ENDLESS.format(argument=argument, others=others)
        )


def check_sizes(batch_size, shuffle, steps):
    """Refuse sizes that are no numbers and a `shuffle` that nobody knows."""
    if batch_size is not None:
        require_count(
            "batch_size", batch_size, "Give the samples of a loader batch."
        )
    if steps is not None:
        require_count(
            "steps_per_epoch", steps, "Leave it out for one pass per epoch."
        )
    is_batch = isinstance(shuffle, str) and shuffle == "batch"
    if not is_batch and not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(
            "shuffle must be True, False or 'batch'. Received: "
            f"shuffle={shuffle!r}. Use True to shuffle samples before they "
            "are batched."
        )

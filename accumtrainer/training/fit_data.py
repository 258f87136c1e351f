"""What `fit` trains on and what it validates on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accumtrainer.checks import require_count
from accumtrainer.data.preprocessing import Preprocessing
from accumtrainer.data.processes import Processes, ShardSource
from accumtrainer.data.source import Source, SourceOptions, check_ends
from accumtrainer.data.sources import (
    Arrays,
    FirstBatches,
    Loader,
    recognize,
    recognize_sets,
)
from accumtrainer.training.fit_options import FitOptions, limited
from accumtrainer.training.validation import Validation


@dataclass(frozen=True, kw_only=True, slots=True)
class FitData:
    """The arguments of `Trainer.fit` that say what to train on and validate on.

    They are explained there.
    """

    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    shuffle: Any
    class_weight: dict[int, float] | None
    steps_per_epoch: int | None = None
    overfit_batches: int | None = None
    validation_data: Any = None
    validation_split: float = 0.0
    validation_steps: int | None = None
    validation_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.overfit_batches is not None:
            require_count(
                "overfit_batches",
                self.overfit_batches,
                "Leave it out for the default.",
            )
        if self.overfit_batches and self.steps_per_epoch is not None:
            raise ValueError(
                "steps_per_epoch must be left out with overfit_batches, whose "
                "epochs are that many batches. Received: "
                f"steps_per_epoch={self.steps_per_epoch!r}, "
                f"overfit_batches={self.overfit_batches!r}. Leave one of them "
                "out."
            )

    def open(
        self,
        options: FitOptions,
        processes: Processes,
        *,
        seed: int,
        epochs_before: int,
        preprocessing: Preprocessing | None,
    ) -> tuple[Source, Validation]:
        """Make the source of the training data, and what to validate on.

        Args:
            options: how long it trains, and how it is validated.
            processes: knows of those that train together; loaders yield their
                shard in each.
            seed: decides the order of the data.
            epochs_before: see `SourceOptions`.
            preprocessing: the model's own, if it has one.

        Raises:
            ValueError: epochs would never end.
        """
        data: Arrays | Loader = recognize(
            self.x, self.y, self.sample_weight, preprocessing
        )
        if self.validation_split and self.validation_data is None:
            data, held_back = data.split(self.validation_split)
            sets: Mapping[str, Arrays | Loader] = {"": held_back}
        else:
            sets = recognize_sets(self.validation_data, self.x, preprocessing)
        first, steps, shuffle = self.overfit_batches, None, False
        if first:
            first = limited("overfit_batches", first, "max_steps_per_epoch")
        else:
            shuffle = self.shuffle
            steps = limited(
                "steps_per_epoch", self.steps_per_epoch, "max_steps_per_epoch"
            )
        source = data.source(
            SourceOptions(
                batch_size=self.batch_size,
                shuffle=shuffle,
                seed=seed,
                class_weight=self.class_weight,
                steps=steps,
                first_epoch=options.initial_epoch,
                epochs_before=epochs_before,
            )
        )
        if first is not None:
            source = FirstBatches(source, first)
        elif not options.may_end_amid_epoch:
            check_ends(source, "steps_per_epoch", ", or max_updates")
        if processes.processes > 1 and isinstance(data, Loader):
            source = ShardSource(source, processes)
        batch_size = self.validation_batch_size
        validation = Validation(
            sets,
            batch_size=self.batch_size if batch_size is None else batch_size,
            steps=self.validation_steps,
            first=int(options.fast_dev_run) or None,
        )
        return source, validation

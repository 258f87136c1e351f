"""Claims about going on with loaders that draw random numbers."""

import numpy as np
import pytest
from resumable import X, Y, assert_same, list_batches, plain

from accumtrainer import Every
from accumtrainer.callbacks import Checkpoint
from accumtrainer.errors import DataError

EPOCHS = 4


class Noisy:
    """Draws for every batch it yields."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __iter__(self):
        for x, y in list_batches():
            yield x + self.rng.normal(size=x.shape).astype("float32"), y


def make_loader(by="generator", **options):
    """Make a torch `DataLoader` of batches of 4 of 22 samples.

    Args:
        by: str, what draws their order.
        options: of the loader.
    """
    data = pytest.importorskip(
        "torch.utils.data", reason="torch is not installed"
    )
    torch = pytest.importorskip("torch")
    samples = list(zip(X[:22], Y[:22], strict=True))
    generator = torch.Generator().manual_seed(3)
    sampler = data.RandomSampler(samples, generator=generator)
    if by == "generator":
        options |= {"shuffle": True, "generator": generator, "batch_size": 4}
    elif by == "sampler":
        options |= {"sampler": sampler, "batch_size": 4}
    else:
        options[by] = data.BatchSampler(sampler, 4, drop_last=False)
    return data.DataLoader(samples, **options)


LOADERS = {
    "generator": make_loader,
    "sampler": lambda: make_loader("sampler"),
    "sampler of batches": lambda: make_loader("batch_sampler"),
    "last one dropped": lambda: make_loader(drop_last=True),
}


def fit(trainer, loader, **options):
    return trainer.fit(loader, **{"epochs": EPOCHS, "verbose": 0} | options)


@pytest.mark.parametrize("updates", [4, 6, 13])
@pytest.mark.parametrize("kind", LOADERS)
def test_torch_loader_goes_on_in_its_order(kind, updates, tmp_path):
    whole = plain()
    history = fit(whole, LOADERS[kind]()).history
    for limit in (updates, None):
        pieces = plain()
        last = fit(
            pieces,
            LOADERS[kind](),
            max_updates=limit,
            callbacks=[Checkpoint(tmp_path, Every(1, "updates"))],
            resume_from="auto",
        )
    assert_same(pieces, whole)
    assert last.history == history


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("kind", LOADERS)
def test_torch_loader_goes_on_from_the_end_of_an_epoch(kind, epochs, tmp_path):
    whole = plain()
    fit(whole, LOADERS[kind]())
    for end in (epochs, EPOCHS):
        pieces = plain()
        checkpoint = Checkpoint(tmp_path)
        fit(
            pieces,
            LOADERS[kind](),
            epochs=end,
            callbacks=[checkpoint],
            resume_from="auto",
        )
    assert_same(pieces, whole)


class Counting:
    """Knows its length; its order is of an epoch that it counts at the end."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 6

    def __iter__(self):
        batches = list_batches()
        for index in np.random.default_rng(self.epoch).permutation(6):
            yield batches[index]
        self.epoch += 1


@pytest.mark.parametrize(
    "make", [Counting, lambda: make_loader(), lambda: make_loader("sampler")]
)
@pytest.mark.parametrize("end", [{"epochs": 3}, {"max_updates": 8}])
def test_loader_with_a_length_is_run_through_to_where_it_was(
    make, end, tmp_path
):
    whole = plain()
    fit(whole, make())
    fit(plain(), make(), callbacks=[Checkpoint(tmp_path)], **end)
    pieces = plain()
    fit(pieces, make(), resume_from=tmp_path, fast_forward=True)
    assert_same(pieces, whole)


def test_loader_that_draws_late_goes_on_or_is_refused(tmp_path):
    whole = plain()
    fit(whole, Noisy())
    for end in (1, EPOCHS):
        pieces = plain()
        fit(
            pieces,
            Noisy(),
            epochs=end,
            callbacks=[Checkpoint(tmp_path)],
            resume_from="auto",
        )
    assert_same(pieces, whole)
    with pytest.raises(DataError, match="same order"):
        fit(plain(), Noisy(), epochs=EPOCHS + 1, resume_from=str(tmp_path))
    longer, again = plain(), plain()
    fit(longer, Noisy(), epochs=EPOCHS + 1)
    fit(
        again,
        Noisy(),
        epochs=EPOCHS + 1,
        resume_from=str(tmp_path),
        fast_forward=True,
    )
    assert_same(again, longer)

"""Claims about preprocessing that draws random numbers, as masks of tokens."""

import math
import random

import numpy as np
import pytest
from quickest import RUN_EAGERLY
from raw import LABELS, TEXTS, Reader, count_letters

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.any_backend


class Drawing(Reader):
    """Forgets some texts, and adds noise to how often letters are in others."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        kept = [text if random.random() < 0.8 else b"" for text in x]
        counts = count_letters(kept)
        counts += np.random.normal(size=counts.shape).astype("float32")
        self.seen.append(counts)
        return keras.utils.pack_x_y_sample_weight(counts, y, sample_weight)


def make_trainer(size=2, *, seed=0, tail=None, **options):
    accumulation = Accumulation(micro_batch_size=size)
    if tail is not None:
        accumulation = Accumulation(steps=2, tail=tail)
    return Trainer(
        Drawing(),
        optimizer=keras.optimizers.Adam(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        accumulation=accumulation,
        run_eagerly=RUN_EAGERLY,
        seed=seed,
        **options,
    )


def assert_same_weights(one, other, **tolerances):
    pairs = zip(one.model.weights, other.model.weights, strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, **{"rtol": 0, "atol": 0} | tolerances)


def draws_of(trainer):
    """Take what was made of loader batches since this was asked last."""
    seen, trainer.model.seen = trainer.model.seen, []
    return seen


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(2 * index, 2 * index + 2)
        return TEXTS[rows], LABELS[rows]


def list_batches():
    return [Batches()[i] for i in range(5)]


def fit_arrays(trainer, **options):
    return trainer.fit(TEXTS, LABELS, **{"batch_size": 3} | options)


def fit_parts_of_arrays(trainer, **options):
    return fit_arrays(trainer, steps_per_epoch=2, **options)


def fit_dataset(trainer, **options):
    return trainer.fit(Batches(), **options)


def fit_list(trainer, **options):
    return trainer.fit(list_batches(), **options)


def fit_parts_of_list(trainer, **options):
    return trainer.fit(list_batches(), steps_per_epoch=3, **options)


def fit_generator(trainer, **options):
    batches = (batch for _ in range(3) for batch in list_batches())
    options |= {"steps_per_epoch": 5, "fast_forward": True}
    return trainer.fit(batches, **options)


FITS = [
    fit_arrays,
    fit_parts_of_arrays,
    fit_dataset,
    fit_list,
    fit_parts_of_list,
    fit_generator,
]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("tail", ["flush", "carry"])
def test_a_run_in_pieces_draws_what_it_would_have_drawn(fit, tail, tmp_path):
    options = {
        "epochs": 3,
        "verbose": 0,
        "validation_data": (TEXTS[:5], LABELS[:5]),
    }
    whole = make_trainer(tail=tail)
    history = fit(whole, **options)
    total = whole.progress.updates
    for updates in (math.ceil(total / 2), total - 1, None):
        pieces = make_trainer(tail=tail)
        last = fit(
            pieces,
            callbacks=[Checkpoint(tmp_path, Every(1, "updates"))],
            max_updates=updates,
            resume_from="auto",
            **options,
        )
    assert pieces.progress.updates == total
    assert_same_weights(pieces, whole)
    np.testing.assert_equal(last.history, history.history)


@pytest.mark.parametrize("fit", FITS[:4])
def test_a_second_fit_in_pieces_draws_what_it_would_have(fit, tmp_path):
    whole, stopped, resumed = (make_trainer() for _ in range(3))
    for trainer in (whole, stopped):
        fit(trainer, verbose=0)
    fit(whole, epochs=2, verbose=0)
    options = {"epochs": 2, "verbose": 0, "callbacks": [Checkpoint(tmp_path)]}
    fit(stopped, max_updates=2, **options)
    fit(resumed, resume_from=tmp_path, **options)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("fit", FITS[:4])
def test_every_epoch_and_every_fit_draws_anew(fit):
    trainer, other = make_trainer(), make_trainer(seed=1)
    for _ in range(2):
        fit(trainer, epochs=2, shuffle=False, verbose=0)
    fit(other, epochs=2, shuffle=False, verbose=0)
    firsts = [made[:2] for made in draws_of(trainer) + draws_of(other)]
    assert len({made.tobytes() for made in firsts}) == len(firsts)


def test_batches_given_by_hand_draw_anew():
    trainer = make_trainer()
    for _ in range(3):
        trainer.train_on_batch(TEXTS, LABELS)
    one, two, three = draws_of(trainer)
    assert (one != two).any() and (two != three).any()


def test_validations_of_one_run_see_the_same():
    trainer = make_trainer()
    data = (TEXTS[:4], LABELS[:4])
    options = {"validation_data": data, "epochs": 2, "verbose": 0}
    fit_arrays(trainer, batch_size=10, **options)
    validated = [made for made in draws_of(trainer) if len(made) == 4]
    assert len(validated) == 2 and (validated[0] == validated[1]).all()


def test_micro_batches_are_cut_of_what_was_drawn_for_the_big_batch():
    big, small = make_trainer(10), make_trainer(2)
    for trainer in (big, small):
        fit_arrays(trainer, batch_size=10, epochs=2, verbose=0)
    assert_same_weights(small, big, atol=1e-6)
    assert small.check_equivalence((TEXTS, LABELS))


def test_what_the_user_draws_is_left_alone():
    def draw():
        return random.random(), np.random.random()

    random.seed(3)
    np.random.seed(3)
    expected = [draw() for _ in range(2)]
    trainer = make_trainer()
    random.seed(3)
    np.random.seed(3)
    found = [draw()]
    fit_arrays(trainer, verbose=0)
    assert [*found, draw()] == expected

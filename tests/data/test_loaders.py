"""Claims about data from elsewhere: what other libraries load, `fit` takes."""

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.data.sources import make_source
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.usefixtures("without_xla")

SAMPLES, BATCH_SIZE = 20, 4


@pytest.fixture
def arrays(rng):
    """Give features and targets, float32."""
    x = rng.normal(size=[SAMPLES, 3]).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def batches_of(arrays):
    """Cut arrays into a list of batches, in order."""
    return [
        tuple(array[start : start + BATCH_SIZE] for array in arrays)
        for start in range(0, SAMPLES, BATCH_SIZE)
    ]


def samples_of(arrays):
    """List the samples one by one."""
    return list(zip(*arrays, strict=True))


def trained_weights(*data, **options):
    """Train for 6 updates; those of 2 epochs, the last of each a tail."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="adam", loss="mse", accumulation=2)
    trainer.fit(*data, **({"epochs": 2, "verbose": 0} | options))
    assert trainer.progress.updates == 6
    return model.get_weights()


def assert_trains_like_numpy(arrays, *data, **options):
    """Compare with training on a list of NumPy batches."""
    expected = trained_weights(batches_of(arrays))
    received = trained_weights(*data, **options)
    for one, other in zip(expected, received, strict=True):
        np.testing.assert_array_equal(one, other)


class FillsTheSameArrays:
    """Yields the same two arrays again and again, with other contents."""

    def __init__(self, arrays):
        self._batches = batches_of(arrays)
        self._own = tuple(np.empty_like(part) for part in self._batches[0])

    def __iter__(self):
        for batch in self._batches:
            for array, part in zip(self._own, batch, strict=True):
                array[:] = part
            yield self._own


class FillsTheSameItem(keras.utils.PyDataset):
    """Has the same two arrays for every index, with other contents."""

    def __init__(self, arrays):
        super().__init__()
        self._batches = batches_of(arrays)
        self._own = tuple(np.empty_like(part) for part in self._batches[0])

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        for array, part in zip(self._own, self._batches[index], strict=True):
            array[:] = part
        return self._own


def test_loader_may_fill_the_same_arrays_again(arrays):
    assert_trains_like_numpy(arrays, FillsTheSameArrays(arrays))


def test_pydataset_may_fill_the_same_arrays_again(arrays):
    assert_trains_like_numpy(arrays, FillsTheSameItem(arrays), shuffle=False)


@pytest.mark.skipif(BACKEND != "jax", reason="is about arrays of JAX")
def test_arrays_of_jax_train_like_numpy_and_are_left_alone(arrays):
    import jax

    on_device = [jax.device_put(array) for array in arrays]
    assert_trains_like_numpy(
        arrays, *on_device, batch_size=BATCH_SIZE, shuffle=False
    )
    batches = [tuple(map(jax.device_put, b)) for b in batches_of(arrays)]
    assert_trains_like_numpy(arrays, batches)
    for array, kept in zip(arrays, on_device, strict=True):
        np.testing.assert_array_equal(array, np.asarray(kept))


@pytest.mark.skipif(BACKEND != "jax", reason="is about arrays of JAX")
def test_batch_already_on_the_device_is_not_taken_away(arrays):
    import jax

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="adam", loss="mse")
    x, y = map(jax.device_put, arrays)
    trainer.train_on_batch(x, y)
    trainer.train_on_batch(x, y)
    assert not x.is_deleted() and not y.is_deleted()


def test_torch_data_loader_trains_like_numpy(arrays):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    data = torch.utils.data
    dataset = data.TensorDataset(*map(torch.from_numpy, arrays))
    loader = data.DataLoader(dataset, batch_size=BATCH_SIZE)
    assert_trains_like_numpy(arrays, loader)


@pytest.fixture
def grain():
    """Give the library Grain, or skip."""
    return pytest.importorskip("grain", reason="grain is not installed")


def test_grain_map_dataset_trains_like_numpy(arrays, grain):
    dataset = grain.MapDataset.source(samples_of(arrays)).batch(BATCH_SIZE)
    assert_trains_like_numpy(arrays, dataset)


def test_grain_map_dataset_that_repeats_has_no_length(arrays, grain):
    dataset = grain.MapDataset.source(samples_of(arrays)).repeat()
    dataset = dataset.batch(BATCH_SIZE)
    assert make_source(dataset).batches_per_epoch is None
    assert_trains_like_numpy(arrays, dataset, steps_per_epoch=5)
    endless = trained_weights(dataset, epochs=None, max_updates=6)
    assert all(np.isfinite(weight).all() for weight in endless)


def test_grain_iter_dataset_trains_like_numpy(arrays, grain):
    dataset = grain.MapDataset.source(samples_of(arrays)).to_iter_dataset()
    assert_trains_like_numpy(arrays, dataset.batch(BATCH_SIZE))


def test_grain_data_loader_trains_like_numpy(arrays, grain):
    loader = grain.DataLoader(
        data_source=samples_of(arrays),
        sampler=grain.samplers.SequentialSampler(SAMPLES),
        operations=[grain.transforms.Batch(BATCH_SIZE)],
        worker_count=0,
    )
    assert_trains_like_numpy(arrays, loader)

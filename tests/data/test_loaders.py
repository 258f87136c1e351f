"""Claims about data from elsewhere: what other libraries load, `fit` takes."""

import contextlib
import functools

import numpy as np
import pytest
from sourced import epoch_of

from accumtrainer import Trainer
from accumtrainer.data.batches import ALIGNMENT, WORTH_ALIGNING
from accumtrainer.data.sources import make_source
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.usefixtures("without_xla")

SAMPLES, BATCH_SIZE = 20, 4


def trained_on(loader, **options):
    """Train a small model on a loader; return its Trainer."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="adam", loss="mse")
    trainer.fit(loader, verbose=0, **options)
    return trainer


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


class ShowsTheSameArrays:
    """Yields something that looks at the same two arrays, filled anew.

    Args:
        arrays: the data.
        show: function from an array to what looks at it.
    """

    def __init__(self, arrays, show):
        self._source = FillsTheSameArrays(arrays)
        self._show = show

    def __iter__(self):
        for batch in self._source:
            yield tuple(map(self._show, batch))


def read_only(array):
    """Return a view through which nobody can write."""
    view = array.view()
    view.flags.writeable = False
    return view


def read_only_buffer(array):
    """Return an array over a read-only window on the memory of another."""
    memory = memoryview(array).toreadonly()
    return np.frombuffer(memory, array.dtype).reshape(array.shape)


def window_over_windows(array):
    """Return views of views, none of which can be written through."""
    return np.lib.stride_tricks.sliding_window_view(array, array.shape)[0, 0]


@pytest.mark.parametrize(
    "show",
    [
        read_only,
        read_only_buffer,
        window_over_windows,
        lambda array: np.broadcast_to(array, array.shape),
        lambda array: read_only(read_only(array)),
    ],
    ids=["view", "buffer", "sliding", "broadcast", "views"],
)
def test_loader_may_show_the_same_arrays_again_read_only(arrays, show):
    assert not show(arrays[0]).flags.writeable
    assert_trains_like_numpy(arrays, ShowsTheSameArrays(arrays, show))


def test_loader_may_forbid_writing_until_it_fills_the_same_arrays(arrays):
    class LocksTheSameArrays(FillsTheSameArrays):
        def __iter__(self):
            for batch in super().__iter__():
                for array in batch:
                    array.flags.writeable = False
                yield batch
                for array in batch:
                    array.flags.writeable = True

    assert_trains_like_numpy(arrays, LocksTheSameArrays(arrays))


@pytest.mark.skipif(BACKEND != "jax", reason="is about arrays of JAX")
def test_loader_may_yield_arrays_of_jax_that_share_memory_it_fills(arrays):
    import jax

    from accumtrainer.data.batches import empty_for_device

    loader = FillsTheSameArrays(arrays)
    loader._own = tuple(
        empty_for_device(array.shape, array.dtype) for array in loader._own
    )
    shown = [jax.device_put(array) for array in loader._own]
    loader._own[0][:] = 7
    assert (np.asarray(shown[0]) == 7).all(), "JAX shares no memory any more"

    class Shows:
        def __iter__(self):
            return (tuple(map(jax.device_put, batch)) for batch in loader)

    assert_trains_like_numpy(arrays, Shows())


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


class LikeTorch:
    """A tensor as torch has it in bfloat16, which NumPy cannot read."""

    __module__ = "torch"

    def __init__(self, array, *, itemsize=2):
        self._array, self._itemsize = array, itemsize

    def __array__(self, dtype=None, copy=None):
        if self._itemsize < 4:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array

    def __len__(self):
        return len(self._array)

    def is_floating_point(self):
        return True

    def element_size(self):
        return self._itemsize

    def float(self):
        return LikeTorch(self._array, itemsize=4)

    def numpy(self, *, force):
        assert force
        return self.__array__()


def test_tensors_that_numpy_cannot_read_train_like_numpy(arrays):
    batches = [tuple(map(LikeTorch, batch)) for batch in batches_of(arrays)]
    assert_trains_like_numpy(arrays, batches)
    assert_trains_like_numpy(
        arrays,
        *map(LikeTorch, arrays),
        batch_size=BATCH_SIZE,
        shuffle=False,
    )


def test_torch_tensors_in_bfloat16_train_like_their_values(arrays):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = [torch.from_numpy(array).bfloat16() for array in arrays]
    tensors[0].requires_grad_()
    values = [tensor.detach().float().numpy() for tensor in tensors]
    batches = [
        tuple(tensor[start : start + BATCH_SIZE] for tensor in tensors)
        for start in range(0, SAMPLES, BATCH_SIZE)
    ]
    assert_trains_like_numpy(values, batches)
    assert_trains_like_numpy(
        values, *tensors, batch_size=BATCH_SIZE, shuffle=False
    )


def test_torch_tensor_that_is_only_marked_as_negative_is_read(arrays):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    complex_ones = torch.complex(*map(torch.from_numpy, [arrays[0]] * 2))
    negative = torch.imag(complex_ones.conj())
    assert negative.is_neg()
    batches = batches_of((negative, arrays[1]))
    assert_trains_like_numpy((-arrays[0], arrays[1]), batches)


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


def test_large_batches_begin_where_devices_want_them_to():
    # Where they do not, each is copied again on its way to the device.
    x = np.zeros([WORTH_ALIGNING // 4 + 3, 1], "float32")
    source = make_source([(x[i:], x[i:]) for i in range(3)])
    for batch in source.iterate(0):
        for array in (batch.x, batch.y):
            assert array.ctypes.data % ALIGNMENT == 0


class BeginsAgain:
    """An iterator that goes on after its end, as those of NVIDIA's DALI."""

    def __init__(self, arrays):
        self.batches = batches_of(arrays)
        self.place = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self):
            self.place = 0
            raise StopIteration
        self.place += 1
        return self.batches[self.place - 1]


@pytest.mark.parametrize("steps", [None, 5])
def test_iterator_that_begins_again_serves_all_epochs(arrays, steps):
    ours = trained_on(BeginsAgain(arrays), epochs=3, steps_per_epoch=steps)
    expected = trained_on(batches_of(arrays), epochs=3)
    assert ours.progress.updates == expected.progress.updates == 15
    for one, other in zip(
        ours.model.get_weights(), expected.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


class Longer:
    """Says that it has 3 batches, and yields on."""

    def __init__(self, batches):
        self.batches = batches
        self.taken = 0

    def __len__(self):
        return 3

    def __iter__(self):
        for batch in self.batches:
            self.taken += 1
            yield batch


def test_epoch_ends_where_the_length_of_a_loader_says(arrays):
    loader = Longer(batches_of(arrays))
    trainer = trained_on(loader, epochs=2)
    assert trainer.progress.updates == 6
    assert loader.taken == 6
    assert len(trainer.predict(loader, verbose=0)) == 3 * BATCH_SIZE


class Scaled(keras.utils.PyDataset):
    """Batches of numbers that a callback chooses; notes what it is told."""

    def __init__(self, arrays, **options):
        super().__init__(**options)
        self.batches = batches_of(arrays)
        self.scale = 1.0

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        x, y = self.batches[index]
        return x * self.scale, y


class Scales(keras.callbacks.Callback):
    """Chooses other numbers for every epoch, in a dataset and in an array."""

    def __init__(self, dataset, array):
        super().__init__()
        self.dataset, self.array = dataset, array
        self.original = array.copy()

    def on_epoch_begin(self, epoch, logs=None):
        self.dataset.scale = epoch + 2.0
        self.array[:] = self.original * (epoch + 2.0)


@pytest.mark.parametrize(
    "kind", ["arrays", "float64", "first of arrays", "dataset"]
)
def test_data_that_a_callback_changes_as_an_epoch_begins_are_read_then(
    arrays, kind
):
    def fit(train, *, is_ours=False):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        dtype = "float64" if kind == "float64" else "float32"
        x = arrays[0].astype(dtype)
        dataset = Scaled(arrays)
        # On TensorFlow, Keras reads arrays of its own.
        is_dataset = kind == "dataset" or not is_ours
        data = (dataset,) if is_dataset else (x, arrays[1])
        size = {} if is_dataset else {"batch_size": BATCH_SIZE}
        train(model)(
            *data,
            **size,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Scales(dataset, x)],
        )
        return model.get_weights()

    # All of the batches are the first ones, too.
    first = {"overfit_batches": 100} if kind == "first of arrays" else {}
    ours = fit(
        lambda model: functools.partial(Trainer(model).fit, **first),
        is_ours=True,
    )
    of_keras = fit(lambda model: model.fit)
    for one, other in zip(ours, of_keras, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class Batches(keras.utils.PyDataset):
    """A list of batches of inputs alone."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return (self.batches[index],)


@pytest.mark.parametrize(
    ("size", "sizes", "differs"),
    [
        (2, [2, 2], False),
        (2, [2, 1, 2], False),  # shuffled, the last may come earlier
        (2, [2, 1, 2, 1], False),  # of two rounds
        (9, [5], False),
        (2, [2, 3], True),
        (9, [5, 5], True),
    ],
)
@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_batches_of_loaders_stay_as_they_are(kind, size, sizes, differs):
    batches = [np.arange(n) for n in sizes]
    x = Batches(batches)
    if kind == "loader":
        x = [(one,) for one in batches]
    source = make_source(x, batch_size=size, shuffle=False)
    warns = pytest.warns(UserWarning, match=f"batch_size={size}, and a batch")
    with warns if differs else contextlib.nullcontext():
        assert epoch_of(source, 0) == [one.tolist() for one in batches]
    assert epoch_of(source, 1) == [one.tolist() for one in batches]

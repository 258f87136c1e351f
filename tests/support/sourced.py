"""Sources of loader batches, and the rows that they yield."""

import threading
import time

import numpy as np

from accumtrainer.keras_api import keras


def epoch_of(source, epoch):
    """List the first rows of every loader batch of one epoch."""
    items = source.iterate(epoch)
    return [source.window([item], None).split()[0].x.tolist() for item in items]


class Rows(keras.utils.PyDataset):
    """Batches `[2i, 2i + 1]`; slower at the start; remembers its epochs."""

    def __init__(self, length, **options):
        super().__init__(**options)
        self.length = length
        self.calls = []
        self.loading, self.most_loading = 0, 0
        self.lock = threading.Lock()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self.lock:
            self.loading += 1
            self.most_loading = max(self.most_loading, self.loading)
        time.sleep(0.01 if index < 2 else 0.001)
        with self.lock:
            self.loading -= 1
        return (np.array([2 * index, 2 * index + 1]),)

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Unmeasured:
    """Yields so many batches, by a generator of its own each time."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for index in range(self.batches):
            yield (np.array([index]),)

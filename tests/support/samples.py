"""A few samples for tests of what is recorded, and how they are trained on."""

import numpy as np

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")
HOW = {"batch_size": 12, "verbose": 0}

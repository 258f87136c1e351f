"""The ways in which a callback is copied, as tuners and joblib copy it."""

import copy
import pickle

import pytest

in_every_way = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))],
    ids=["deepcopy", "pickle"],
)

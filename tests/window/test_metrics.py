"""Claims about metrics: their variables are sums, which replicas add up."""

import numpy as np
import pytest

from accumtrainer.keras_api import keras, ops

# One of Keras's metrics for each way of updating the variables they have.
METRICS = {
    "Sum": {},
    "Mean": {},
    "MeanAbsoluteError": {},
    "RootMeanSquaredError": {},
    "R2Score": {},
    "AUC": {},
    "FalsePositives": {},
    "Precision": {},
    "Recall": {},
    "PrecisionAtRecall": {"recall": 0.5},
    "FBetaScore": {},
    "MeanIoU": {"num_classes": 2},
    "BinaryIoU": {},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
}


def test_no_metric_of_keras_updates_in_another_way():
    updates = {
        metric.update_state
        for metric in vars(keras.metrics).values()
        if isinstance(metric, type) and issubclass(metric, keras.metrics.Metric)
    }
    known = {getattr(keras.metrics, name).update_state for name in METRICS}
    assert updates - known == {keras.metrics.Metric.update_state}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_metric_of_keras_adds_to_its_variables(rng, name):
    parts = []
    for _ in range(2):
        truth = np.eye(3)[rng.integers(3, size=4)].astype("float32")
        guess = rng.uniform(size=[4, 3]).astype("float32")
        if name == "MeanIoU":
            guess = guess.round()
        parts.append([truth] if name in ("Sum", "Mean") else [truth, guess])
    metric = getattr(keras.metrics, name)(**METRICS[name])

    def added_by(*updates):
        metric.reset_state()
        for update in updates:
            metric.update_state(*update)
        return [ops.convert_to_numpy(v) for v in metric.variables]

    both, *each = added_by(*parts), *map(added_by, parts)
    for whole, one, other in zip(both, *each, strict=True):
        np.testing.assert_allclose(whole, one + other, rtol=1e-5)

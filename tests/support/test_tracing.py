"""What the tests leave out of TensorFlow is left out."""

import pytest

from accumtrainer.keras_api import BACKEND


def test_operations_do_not_say_where_they_were_made():
    if BACKEND != "tensorflow":
        reason = "only TensorFlow notes it for every operation"
        print(f"Not run on {BACKEND}: {reason}.")
        pytest.skip(reason)
    import tensorflow as tf

    with tf.Graph().as_default():
        one = tf.constant(1.0).op
        other = tf.constant(2.0).op
    assert one.traceback == other.traceback

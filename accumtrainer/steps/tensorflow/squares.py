"""The sum of the squares of a large tensor, as XLA adds it up fast."""

import tensorflow as tf

from accumtrainer.keras_api.types import Tensor

# How many squares are added up side by side, and from how many rows on.
ROW = 12_800
ROWS_WORTH_A_LOOP = 20


def is_worth_a_loop(tensor: Tensor) -> bool:
    """Whether a tensor is so large that `sum_in_rows` is faster."""
    return tensor.shape.num_elements() // ROW >= ROWS_WORTH_A_LOOP


def sum_in_rows(gradient: Tensor) -> Tensor:
    """Add up the squares of a tensor, rows to one row.

    On a CPU, XLA writes the squares of a large tensor to memory, and adds them
    up window by window; rows that are added to one row stay near.
    """
    rows = gradient.shape.num_elements() // ROW
    flat = tf.reshape(gradient, [-1])
    table = tf.reshape(flat[: rows * ROW], [rows, ROW])
    _, total = tf.while_loop(
        lambda row, total: row < rows,
        lambda row, total: (row + 1, total + tf.square(table[row])),
        [tf.constant(0), tf.zeros([ROW])],
    )
    rest = tf.square(flat[rows * ROW :])
    return tf.reduce_sum(total) + tf.reduce_sum(rest)

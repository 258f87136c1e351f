"""Claims about sparse and ragged data, which are refused."""

import numpy as np
import pytest

from accumtrainer.data.sources import (
    make_source,
    recognize,
)


def test_sparse_data_are_refused_with_the_remedy():
    sparse = type("SparseTensor", (), {"__iter__": lambda self: iter(())})()
    with pytest.raises(TypeError, match="SparseTensor. Make it dense"):
        make_source(sparse)


def sparse_of(library):
    """Make what a library has of a sparse array `[4, 3]`, and is installed."""
    dense = np.eye(4, 3, dtype="float32")
    if library == "scipy":
        scipy = pytest.importorskip("scipy.sparse")
        return scipy.csr_matrix(dense)
    if library == "jax":
        return pytest.importorskip("jax.experimental.sparse").BCOO.fromdense(
            dense
        )
    tf = pytest.importorskip("tensorflow")
    if library == "ragged":
        return tf.RaggedTensor.from_tensor(dense)
    return tf.sparse.from_dense(dense)


@pytest.mark.parametrize("library", ["scipy", "jax", "tensorflow", "ragged"])
def test_sparse_data_are_refused_wherever_they_are(library):
    sparse, dense = sparse_of(library), np.zeros([4, 3])
    for name, arguments in {
        "x": (sparse, dense),
        "y": (dense, sparse),
        "sample_weight": (dense, dense, sparse),
    }.items():
        message = f"^{name} must hold dense arrays"
        with pytest.raises(TypeError, match=message):
            make_source(*arguments)
        with pytest.raises(TypeError, match=message):
            next(make_source(iter([arguments])).iterate(0))
        with pytest.raises(TypeError, match=message):
            recognize(*arguments).split(0.5)
    for nest in (sparse, {"a": sparse}, [dense, sparse]):
        with pytest.raises(TypeError, match="^x must hold dense arrays"):
            make_source(nest, dense)
        with pytest.raises(TypeError, match="^x must hold dense arrays"):
            make_source(nest)

"""Count how often an update of two replicas adds something up over them.

    python tests/window/reductions_run.py 8

Prints the dtypes that an update of 8 micro-batches reduces, each as often as
it does.
"""

import contextlib
import re
import sys

import numpy as np

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

REDUCED = []

if BACKEND == "jax":
    import jax

    from accumtrainer.steps.jax.programs import Compiled

    jax.config.update("jax_num_cpu_devices", 2)
else:
    import tensorflow as tf

    from accumtrainer.steps.tensorflow.programs import Compiled

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )


def two_replicas():
    """Make a scope in which models have two replicas."""
    if BACKEND == "jax":
        return keras.distribution.DataParallel(
            devices=["cpu:0", "cpu:1"]
        ).scope()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


def watch_programs():
    """Note in `REDUCED` what every program reduces that is compiled."""
    trace = Compiled._trace

    def watch(self, leaves, *arguments):
        with reads_noted():
            program = trace(self, leaves, *arguments)
        REDUCED.extend(reductions(self, program, leaves))
        return program

    Compiled._trace = watch


@contextlib.contextmanager
def reads_noted():
    """Note, too, what TensorFlow adds up because somebody reads a variable.

    In one process that is no collective operation, but it is between several.
    """
    if BACKEND == "jax":
        yield
        return
    reduce = tf.distribute.MirroredStrategy.reduce

    def note(self, kind, value, axis):
        REDUCED.append(value.dtype.name)
        return reduce(self, kind, value, axis)

    tf.distribute.MirroredStrategy.reduce = note
    yield
    tf.distribute.MirroredStrategy.reduce = reduce


def reductions(compiled, program, leaves):
    """List the dtypes that a program reduces over replicas."""
    if BACKEND == "tensorflow":
        definition = program.graph.as_graph_def()
        nodes = [*definition.node]
        for function in definition.library.function:
            nodes += function.node_def
        found = [node for node in nodes if node.op.startswith("Collective")]
        # A node for each device.
        return [tf.as_dtype(n.attr["T"].type).name for n in found[::2]]
    run, changed, kept = program
    arrays = compiled._holder.arrays
    text = run.lower(
        [arrays[position] for position in changed],
        [arrays[position] for position in kept],
        leaves,
    )
    found = re.findall(r"= (.*) all-reduce\(", text.compile().as_text())
    return [re.search("[a-z]+[0-9]+", shapes)[0] for shapes in found]


def main(micro_batches):
    """Make an update."""
    with two_replicas():
        model = keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        trainer = Trainer(
            model,
            optimizer=keras.optimizers.AdamW(clipnorm=1.0),
            loss="mse",
            metrics=["mae"],
            accumulation=Accumulation(micro_batch_size=3),
        )
    watch_programs()
    rng = np.random.default_rng(0)
    samples = 2 * 3 * micro_batches
    trainer.train_on_batch(
        rng.normal(size=[samples, 6]).astype("float32"),
        rng.normal(size=[samples, 2]).astype("float32"),
    )
    print(*sorted(REDUCED))


if __name__ == "__main__":
    main(int(sys.argv[1]))

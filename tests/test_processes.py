"""Claims about several processes: they train as one, and stop together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from accumtrainer.keras_api import keras

EXAMPLE = Path(__file__).parent.parent / "examples" / "distributed.py"

# Until others notice that a process is gone; that is no limit on the test's
# own time, but what the claim is about.
BOUND_SECS = 200


def free_port():
    """Find a port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("localhost", port + 1))
                return port


def start(count, *arguments):
    """Start the example in so many processes, each with a log of its own."""
    # The example runs as users run it.
    strict = {"JAX_NUMPY_DTYPE_PROMOTION", "XLA_FLAGS"}
    environment = {k: v for k, v in os.environ.items() if k not in strict}
    port = free_port()
    return [
        subprocess.Popen(
            [
                *(sys.executable, EXAMPLE, "--processes", str(count)),
                *("--process", str(index), "--port", str(port), *arguments),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def finish(processes):
    """Wait for processes, and return their exit codes and what they said."""
    outputs = [process.communicate()[0] for process in processes]
    return [process.returncode for process in processes], outputs


def run(count, *arguments):
    codes, outputs = finish(start(count, *arguments))
    assert not any(codes), outputs
    return outputs


def wait_for(condition, processes):
    """Wait until something has happened, or a process has ended."""
    while not condition():
        assert all(process.poll() is None for process in processes), finish(
            processes
        )
        time.sleep(0.05)


def weights(path):
    model = keras.saving.load_model(path)
    return [keras.ops.convert_to_numpy(v) for v in model.weights]


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Give the weights that one process trains."""
    path = tmp_path_factory.mktemp("alone") / "digits.keras"
    run(1, "--epochs", "3", "--save", str(path))
    return weights(path)


def test_two_processes_train_as_one(tmp_path, alone):
    path = tmp_path / "digits.keras"
    chief, other = run(2, "--epochs", "3", "--save", str(path))
    assert_close(weights(path), alone)
    assert "shared out among 2 replicas; 11 updates per epoch" in chief
    assert "Epoch 3/3" in chief and "test accuracy" in chief
    assert "Epoch" not in other and "accuracy" not in other


def test_signal_to_one_stops_all(tmp_path):
    folder = tmp_path / "run"
    processes = start(2, "--epochs", "100000", "--checkpoints", str(folder))
    wait_for(lambda: any(folder.glob("*")), processes)
    processes[1].send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)
    assert codes == [143, 143], outputs
    assert any(folder.glob("*"))


def test_killed_process_stops_the_others_and_the_run_goes_on(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "digits.keras"
    arguments = ("--checkpoints", str(folder), "--epochs")
    run(2, *arguments, "1")
    processes = start(2, *arguments, "100000")
    wait_for(lambda: len(list(folder.glob("0*"))) > 1, processes)
    processes[1].kill()
    begun = time.monotonic()
    codes, outputs = finish(processes)
    assert time.monotonic() - begun < BOUND_SECS
    assert codes[0] != 0, outputs
    newest = sorted(folder.glob("0*"))[-1].name
    epochs = str(int(newest.rpartition("-")[2]) // 11 + 1)
    (chief, _) = run(2, *arguments, epochs, "--save", str(path))
    assert f"Epoch {epochs}/{epochs}" in chief
    assert f"Epoch {int(epochs) - 1}/{epochs}" not in chief
    run(1, "--epochs", epochs, "--save", str(tmp_path / "alone.keras"))
    assert_close(weights(path), weights(tmp_path / "alone.keras"))

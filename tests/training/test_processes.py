"""Claims about several processes: they train as one, and stop together."""

import contextlib
import functools
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import environments
import forked
import numpy as np
import pytest
import shares_run

from accumtrainer import Accumulation, errors
from accumtrainer.keras_api import BACKEND, keras

SHARES = Path(__file__).with_name("shares_run.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"

EPOCHS = 3

# Until others notice that a process is gone; that is no limit on the test's
# own time, but what the claim is about.
BOUND_SECS = 200

# After which processes that wait for each other are given up.
HANGING_SECS = 600


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
    return start_script(EXAMPLE, count, "--processes", str(count), *arguments)


def start_script(script, count, *arguments):
    """Start a script in so many processes, and tell each which it is."""
    # In the example, dtypes are as users have them.
    left_out = {"JAX_NUMPY_DTYPE_PROMOTION"} if script == EXAMPLE else ()
    environment = environments.of_one_backend(left_out)
    port = free_port()
    return [
        forked.Process(
            [
                *(script, *arguments),
                *("--process", str(index), "--port", str(port)),
            ],
            environment,
        )
        for index in range(count)
    ]


def finish(processes, timeout_secs=None):
    """Wait for processes, and return their exit codes and what they said."""
    outputs = []
    for process in processes:
        try:
            output = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            output = process.communicate()
        outputs.append("".join(output))
    return [process.returncode for process in processes], outputs


def in_full(outputs):
    """Join what processes said, since pytest shortens lists."""
    return "\n".join(outputs)


def run(count, *arguments):
    codes, outputs = finish(start(count, *arguments))
    assert not any(codes), in_full(outputs)
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
    """Give the weights that one process trains in so many epochs."""

    @functools.cache
    def train(epochs):
        path = tmp_path_factory.mktemp("alone") / "digits.keras"
        run(1, "--epochs", str(epochs), "--save", str(path))
        return weights(path)

    return train


def test_two_processes_train_as_one(tmp_path, alone):
    path = tmp_path / "digits.keras"
    chief, other = run(2, "--epochs", str(EPOCHS), "--save", str(path))
    assert_close(weights(path), alone(EPOCHS))
    assert "shared out among 2 replicas; 11 updates per epoch" in chief
    assert f"Epoch {EPOCHS}/{EPOCHS}" in chief and "test accuracy" in chief
    assert "Epoch" not in other and "accuracy" not in other


def test_signal_to_one_stops_all(tmp_path):
    folder = tmp_path / "run"
    processes = start(2, "--epochs", "100000", "--checkpoints", str(folder))
    wait_for(lambda: any(folder.glob("*")), processes)
    processes[1].send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)
    assert codes == [143, 143], in_full(outputs)
    assert any(folder.glob("*"))


def test_killed_process_stops_the_others_and_the_run_goes_on(tmp_path, alone):
    folder, path = tmp_path / "run", tmp_path / "digits.keras"
    arguments = ("--checkpoints", str(folder), "--epochs")
    processes = start(2, *arguments, "100000")
    wait_for(lambda: any(folder.glob("0*")), processes)
    processes[1].kill()
    begun = time.monotonic()
    codes, outputs = finish(processes)
    assert time.monotonic() - begun < BOUND_SECS
    assert codes[0] != 0, outputs
    newest = sorted(folder.glob("0*"))[-1].name
    finished = int(newest.rpartition("-")[2]) // 11
    epochs = max(EPOCHS, finished + 1)
    (chief, _) = run(2, *arguments, str(epochs), "--save", str(path))
    assert f"Epoch {epochs}/{epochs}" in chief
    assert f"Epoch {finished}/{epochs}" not in chief
    assert_close(weights(path), alone(epochs))


# --- Loaders that yield a share. ---


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    """Give the folder in which two processes left what they ended with."""
    folder = tmp_path_factory.mktemp("shares")
    processes = start_script(SHARES, shares_run.PROCESSES, str(folder))
    codes, outputs = finish(processes, HANGING_SECS)
    assert not any(codes), in_full(outputs)
    return folder


@pytest.mark.parametrize("case", shares_run.TRAINED)
def test_loaders_of_shares_make_the_updates_of_one_device(
    shares, tmp_path, case
):
    with np.load(shares / f"{case}.npz") as file:
        ours = list(file.values())
    assert_close(ours, shares_run.train_alone(case, tmp_path))


ENDED = r"2 micro-batches of 8 samples in process 0, nothing more in process 1"
SIZES = r"batches of 8 samples in process 0, .* of 6 samples in process 1"
ELSEWHERE = r"DataError: .* an error in process 1"


@pytest.mark.parametrize(
    ("case", "chief", "other"),
    [
        ("unequal_length", ENDED, ENDED),
        ("unequal_sizes", SIZES, SIZES),
        ("failure", ELSEWHERE, "OSError: the disk is gone"),
        ("number", ELSEWHERE, "DataError: x must be finite .*: nan in row 1"),
        ("share_of_validation", *["must yield the same in every process"] * 2),
        ("carried", *["a tail that is carried on"] * 2),
        ("undivided", *["among its 2 devices.* Received: 3 samples"] * 2),
        ("replica_of_processes", *["ValueError: x must be arrays where"] * 2),
    ],
)
def test_what_one_process_cannot_do_alone_is_an_error_in_all(
    shares, case, chief, other
):
    if case in shares_run.NEED_TWO_DEVICES and not shares_run.TWO_DEVICES:
        reason = f"a process has one device of {BACKEND} where are no GPUs"
        print(f"Not run: {reason}.")
        pytest.skip(reason)
    assert re.search(chief, (shares / f"{case}-0.txt").read_text())
    assert re.search(other, (shares / f"{case}-1.txt").read_text())


def test_shares_go_on_in_as_many_processes(shares):
    trainer = shares_run.make_trainer(
        contextlib.nullcontext, accumulation=Accumulation(steps=2)
    )
    with pytest.raises(errors.DataError, match="among 1, and among 2 when"):
        trainer.fit(
            shares_run.Loader([8] * 6),
            epochs=4,
            verbose=0,
            resume_from=str(shares / "saved"),
        )

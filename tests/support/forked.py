"""Processes of Python that begin with Keras and its backend imported.

Importing TensorFlow takes four seconds, and dozens of the tests' processes need
it. So they are forked from one that has imported Keras and never uses it, which
`multiprocessing` calls a fork server. On JAX none of them finds TensorFlow. A
process that is about imports is none for this file.
"""

import atexit
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

import environments
import tracing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["keras"])
OUTPUTS = {1: "stdout", 2: "stderr"}


class Process:
    """Run Python, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: what would follow `python` in a command: any number of
            `-W` and a filter, then a script or `-c` and code, then what it
            finds in `sys.argv`.
        env: dict, the environment; it has this process's backend.
        cwd: the folder it begins in, by default this process's.
    """

    def __init__(self, arguments, env, cwd=None):
        self._folder = tempfile.TemporaryDirectory()
        for name in OUTPUTS.values():
            Path(self._folder.name, name).touch()
        self._process = SERVER.Process(
            target=_run,
            args=(
                [os.fspath(argument) for argument in arguments],
                dict(env),
                os.fspath(cwd or Path.cwd()),
                self._folder.name,
            ),
        )
        with mock.patch.dict(os.environ, _of_server(), clear=True):
            self._process.start()

    @property
    def returncode(self):
        """The exit code, minus a signal's number, or `None` as it runs."""
        return self._process.exitcode

    def poll(self):
        """Return the exit code, or `None` as it runs."""
        return self.returncode

    def send_signal(self, number):
        """Send a signal."""
        os.kill(self._process.pid, number)

    def kill(self):
        """End it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """Wait for the end; to be called once.

        Args:
            timeout: seconds after which to wait no longer.

        Returns:
            Pair of str: what went to standard output and to standard error.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("python", timeout)
        with self._folder as folder:
            return tuple(
                Path(folder, name).read_text(encoding="utf-8")
                for name in OUTPUTS.values()
            )


def run(arguments, env, cwd=None):
    """Run Python to its end; see `Process`.

    Returns:
        `subprocess.CompletedProcess`.
    """
    process = Process(arguments, env, cwd)
    outputs = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, *outputs)


def _of_server():
    """Return the environment to import Keras in; JAX's options come later."""
    environment = environments.of_one_backend()
    return {k: v for k, v in environment.items() if not k.startswith("JAX_")}


def _run(arguments, env, folder, outputs):
    """Do what `python` with these arguments does; runs in the new process."""
    for number, name in OUTPUTS.items():
        os.dup2(os.open(Path(outputs, name), os.O_WRONLY), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if env["KERAS_BACKEND"] == "jax":
        _configure_jax(env)
    elif env["KERAS_BACKEND"] == "tensorflow":
        tracing.leave_out_stacks()
    while arguments[0] == "-W":
        _, text, *arguments = arguments
        _filter_warnings(text)
    script, *sys.argv[1:] = arguments
    try:
        if script == "-c":
            sys.argv[0], code = script, sys.argv.pop(1)
            sys.path = [folder, *_paths(env)]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv[0] = script
            sys.path = [str(Path(script).parent), *_paths(env)]
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        # `multiprocessing` leaves them out. Python has no public name for it.
        atexit._run_exitfuncs()


def _paths(env):
    """List where Python looks, without what pytest and others have added."""
    told = env.get("PYTHONPATH", "").split(os.pathsep)
    installed = [
        path
        for path in sys.path
        if path.startswith((sys.prefix, sys.base_prefix))
        and not path.endswith("_vendor")  # which setuptools adds
    ]
    return [*filter(None, told), *installed]


def _configure_jax(env):
    """Tell JAX what it would have read from the environment."""
    import jax

    for name, text in env.items():
        option = name.lower()
        if name.startswith("JAX_") and hasattr(jax.config, option):
            try:
                value = json.loads(text.lower())
            except ValueError:
                value = text
            jax.config.update(option, value)


def _filter_warnings(text):
    """Do what Python does with `-W action:start of the message`."""
    action, _, message = text.partition(":")
    warnings.filterwarnings(action, re.escape(message))

"""Forked processes are what a command would have started, but for imports."""

import json
import os
import subprocess
import sys

import forked
import pytest

from accumtrainer.keras_api import BACKEND

ABOUT = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.getcwd(), sys.path, dict(os.environ)]))
"""


def about(start, folder):
    """Return what a program finds, as `start` starts it."""
    script = folder / "about.py"
    script.write_text(ABOUT)
    env = {k: v for k, v in os.environ.items() if k != "HOME"} | {"MINE": "1"}
    done = start([str(script), "--flag", "a b"], env, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def start_fresh(arguments, env, cwd):
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_program_finds_what_a_fresh_one_finds(tmp_path):
    assert about(forked.run, tmp_path) == about(start_fresh, tmp_path)


def test_keras_is_there_and_the_package_is_not():
    code = """if True:
        import sys
        print("keras" in sys.modules, "accumtrainer" in sys.modules)
    """
    assert forked.run(["-c", code], os.environ).stdout == "True False\n"


def test_warnings_are_errors_where_they_shall_be():
    code = "import sys, warnings; warnings.warn(sys.argv[1])"
    filters = ("-W", "error", "-W", "ignore:(harm")
    bad = forked.run([*filters, "-c", code, "harmful"], os.environ)
    assert bad.returncode == 1
    assert "UserWarning: harmful" in bad.stderr
    assert (
        forked.run([*filters, "-c", code, "(harmless)"], os.environ).stderr
        == ""
    )


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_is_kept_and_what_waits_for_the_exit_runs(code):
    program = f"""if True:
        import atexit, sys
        atexit.register(print, "at last")
        sys.exit({code})
    """
    done = forked.run(["-c", program], os.environ)
    assert (done.returncode, done.stdout) == (code, "at last\n")


def test_killed_process_says_so():
    process = forked.Process(["-c", "import time; time.sleep(600)"], os.environ)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert process.returncode == -9


# Only JAX is told its options again, as it has read them when it was imported.
@pytest.mark.skipif(
    BACKEND != "jax", reason="is about options that JAX reads when imported"
)
@pytest.mark.parametrize("promotion", ["strict", None])
def test_jax_reads_its_options_from_the_environment(promotion, tmp_path):
    names = {
        "JAX_NUMPY_DTYPE_PROMOTION": promotion,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "Cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2.5",
    }
    others = {k: v for k, v in os.environ.items() if k not in names}
    told = {k: v for k, v in names.items() if v is not None}
    code = f"""if True:
        import jax
        print(*(getattr(jax.config, name.lower()) for name in {list(names)}))
    """
    done = forked.run(["-c", code], others | told)
    expected = [promotion or "standard", False, tmp_path / "Cache", 2.5]
    assert done.stdout.split() == list(map(str, expected)), done.stderr

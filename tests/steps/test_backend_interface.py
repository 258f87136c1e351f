"""One written interface, and backends that are no more and no less."""

import ast
import inspect
from pathlib import Path

import pytest

from accumtrainer import steps
from accumtrainer.steps import Backend, make_backend

FOLDER = Path(steps.__file__).parent
FILES = sorted(FOLDER.glob("*/backend.py"))


def methods_of(file):
    """List the methods of the backend that a file defines."""
    (backend,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
        and [ast.unparse(base) for base in node.bases] == ["Backend"]
    )
    return [node for node in backend.body if isinstance(node, ast.FunctionDef)]


def is_public(name):
    return not name.startswith("_")


def test_backend_in_use_has_all_of_the_interface():
    backend = make_backend()
    names = [*filter(is_public, dir(Backend)), *Backend.__annotations__]
    assert not [name for name in names if not hasattr(backend, name)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_backend_has_no_method_that_the_interface_does_not_know(file):
    added = {method.name for method in methods_of(file)} - set(dir(Backend))
    assert not set(filter(is_public, added))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_backend_does_not_tell_again_what_the_interface_tells(file):
    told = [
        method.name
        for method in methods_of(file)
        if is_public(method.name) and ast.get_docstring(method)
    ]
    assert not told


def test_every_verb_of_the_interface_is_typed_and_documented():
    verbs = [f for n, f in inspect.getmembers(Backend) if is_public(n)]
    for verb in filter(inspect.isfunction, verbs):
        parameters = list(inspect.signature(verb).parameters.values())[1:]
        kinds = [p.annotation for p in parameters]
        kinds.append(inspect.signature(verb).return_annotation)
        assert inspect.getdoc(verb) and inspect.Signature.empty not in kinds


@pytest.mark.parametrize("name", ["check", "write_back"])
def test_backend_that_forgets_what_would_do_wrong_in_silence_is_told(name):
    of_interface = {name: getattr(Backend, name)}
    forgetful = type("Forgetful", (type(make_backend()),), of_interface)
    with pytest.raises(TypeError, match=f"abstract method '?{name}"):
        forgetful(None, run_eagerly=False, jit_compile="auto")

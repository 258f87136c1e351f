"""What the house style asks of the whole repository, read from its files."""

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import accumtrainer
from accumtrainer import keras_api

pytestmark = pytest.mark.any_backend

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "accumtrainer"
CALLBACKS = ROOT / "callbacks"

# The wings of the package, from the ground up. Each imports only from those
# below it; those of one floor know nothing of each other. A new file goes into
# the wing of its subject, and a new wing where its imports allow.
FLOORS = (
    ("errors", "checks", "notebook", "plain_options", "progress"),
    ("config",),
    ("keras_api",),
    ("layers",),
    ("data", "observers"),
    ("window", "saving"),
    ("steps",),
    ("diagnosis",),
    ("training",),
    ("trainer",),
    ("window_losses", "window_loss_trainer"),
    ("inside_fit",),
    ("__init__",),
)
FLOOR_OF = {wing: i for i, floor in enumerate(FLOORS) for wing in floor}

# The files that decide which Keras is used, and know its private names.
KERAS_FILES = sorted((PACKAGE / "keras_api").glob("*.py"))

BACKENDS = {"tensorflow", "jax", "torch"}
OPTIONAL_TOOLS = {
    "IPython",
    "PIL",
    "matplotlib",
    "mlflow",
    "tensorboard",
    "trackio",
    "wandb",
}

# Named tuples spell their public methods with an underscore.
PUBLIC_DESPITE_UNDERSCORE = {"_asdict", "_fields", "_make", "_replace"}


def python_files(*folders):
    """List the Python files below folders, sorted."""
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


PACKAGE_FILES = python_files(PACKAGE)
CALLBACK_FILES = python_files(CALLBACKS)
SHIPPED_FILES = PACKAGE_FILES + CALLBACK_FILES
ALL_FILES = SHIPPED_FILES + python_files(
    ROOT / "tests", ROOT / "examples", ROOT / "benchmarks"
)


def each(files):
    """Parametrize a test by files, named as they stand in the repository."""
    return pytest.mark.parametrize(
        "file", files, ids=[str(file.relative_to(ROOT)) for file in files]
    )


@functools.cache
def read_tree(file):
    """Parse a file, once for all tests."""
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def imported_names(file):
    """List every name a file imports, anywhere in it, with its full path.

    Example: `from accumtrainer.keras_api import ops` gives
    `accumtrainer.keras_api.ops`; `from . import errors` in the package gives
    `accumtrainer.errors`.
    """
    names = []
    for node in ast.walk(read_tree(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            origin = origin_of(node, file)
            names += [f"{origin}.{alias.name}" for alias in node.names]
    return names


def origin_of(node, file):
    """Name the module a `from` import reads, with leading dots resolved."""
    if node.level == 0:
        return node.module
    folders = file.relative_to(ROOT).parts[:-1]
    if folders[0] == "callbacks":
        folders = ("accumtrainer", *folders)
    above = folders[: len(folders) - (node.level - 1)]
    return ".".join([*above, node.module] if node.module else above)


def wing_of(file):
    """Name the wing of a package's file."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def refused_import(wing, name):
    """Return whether `wing` of the package may not import `name`."""
    package, _, rest = name.partition(".")
    target = rest.partition(".")[0]
    if package != "accumtrainer" or wing == target:
        return False
    return FLOOR_OF[target] >= FLOOR_OF[wing]


def imported_files(file):
    """List the package's files that a file of the package imports."""
    found = set()
    for name in imported_names(file):
        place = ROOT.joinpath(*name.split("."))
        modules = (place, place.parent)
        candidates = [m.with_suffix(".py") for m in modules]
        candidates += [m / "__init__.py" for m in modules]
        found.update(c for c in candidates if c in PACKAGE_FILES)
    return found - {file, PACKAGE / "__init__.py"}


class PrivateName(NamedTuple):
    """A private name that a file takes from an object not its own."""

    name: str
    line: int


@functools.cache
def defined_names(file):
    """Collect the methods and attributes that the classes of a file define."""
    names = set()
    for node in ast.walk(read_tree(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.Attribute) and is_own(node.value):
            is_assigned = isinstance(node.ctx, ast.Store)
            names.update({node.attr} if is_assigned else set())
    return names


def private_names(file):
    """List the private names of other objects that a file reaches for."""
    return [
        PrivateName(name, node.lineno)
        for node in ast.walk(read_tree(file))
        for name in [reached_name(node)]
        if is_private(name)
    ]


def reached_name(node):
    """Name what a node takes from an object that is not its own, or ''."""
    if isinstance(node, ast.Attribute) and not is_own(node.value):
        return node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        attribute = node.args[1]
        return attribute.value if isinstance(attribute, ast.Constant) else ""
    return ""


def is_own(node):
    """Return whether a node stands for the object or class being defined."""
    return ast.unparse(node) in ("self", "cls", "super()")


def is_private(name):
    """Return whether a name asks not to be used from outside."""
    magic = name.startswith("__") and name.endswith("__")
    return (
        name.startswith("_")
        and not magic
        and name not in PUBLIC_DESPITE_UNDERSCORE
    )


def is_public_name(name):
    """Return whether a callback may import `name` from the package."""
    module, _, attribute = name.rpartition(".")
    if module.startswith("accumtrainer.callbacks"):
        return not attribute.startswith("_")
    public = {
        "accumtrainer": [*accumtrainer.__all__, "callbacks"],
        "accumtrainer.keras_api": keras_api.__all__,
    }
    return attribute in public.get(module, [])


def run_python(code):
    """Run code in a fresh interpreter and return what it printed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KERAS_BACKEND": keras_api.BACKEND},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


def test_importing_loads_no_tool_and_no_backend_that_keras_had_not_loaded():
    printed = run_python(
        f"""if True:
        import sys, {keras_api.KERAS_NAME}
        before = set(sys.modules)
        import accumtrainer, accumtrainer.callbacks
        heavy = {BACKENDS | OPTIONAL_TOOLS}
        print(heavy.intersection(set(sys.modules) - before))
        """
    )
    assert printed == "set()"


@pytest.mark.skipif(
    keras_api.BACKEND == "torch", reason="PyTorch looks for others itself"
)
def test_importing_works_without_the_tools_and_the_other_backends():
    absent = (BACKENDS | OPTIONAL_TOOLS) - {keras_api.BACKEND}
    printed = run_python(
        f"""if True:
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name in {absent}:
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Absent())
        import accumtrainer, accumtrainer.callbacks
        print("imported")
        """
    )
    assert printed == "imported"


@each(SHIPPED_FILES)
def test_only_the_backend_files_in_steps_import_a_backend(file):
    imported = {name.partition(".")[0] for name in imported_names(file)}
    is_backend = file.parent.parent == PACKAGE / "steps"
    allowed = {file.parent.name} if is_backend else set()
    assert not (imported & BACKENDS) - allowed


@each([file for file in SHIPPED_FILES if file not in KERAS_FILES])
def test_keras_is_imported_through_keras_api(file):
    imported = {name.partition(".")[0] for name in imported_names(file)}
    assert not imported & {"keras", "keras_core"}


@each(PACKAGE_FILES)
def test_package_file_is_in_a_known_wing(file):
    assert wing_of(file) in FLOOR_OF, (
        f"{wing_of(file)!r} has no place in FLOORS of this test. Put the file "
        "into the wing of its subject, or add a wing above all it imports."
    )


@each([file for file in PACKAGE_FILES if wing_of(file) in FLOOR_OF])
def test_package_file_imports_only_wings_below_its_own(file):
    wing = wing_of(file)
    refused = [
        name for name in imported_names(file) if refused_import(wing, name)
    ]
    assert not refused, (
        f"{wing} may import only what stands below it in FLOORS. Received: "
        f"{refused}. Move the code that both need further down."
    )


def test_no_file_of_the_package_imports_itself_by_way_of_others():
    # Front pages aside, which gather what their wings have.
    files = [file for file in PACKAGE_FILES if file.name != "__init__.py"]
    left = {file: imported_files(file).intersection(files) for file in files}
    while free := [file for file, needed in left.items() if not needed]:
        left = {k: v.difference(free) for k, v in left.items() if v}
    assert not left, f"These import each other: {sorted(left)}."


@each(CALLBACK_FILES)
def test_callback_file_imports_only_public_names(file):
    refused = [
        name
        for name in imported_names(file)
        if name.partition(".")[0] == "accumtrainer" and not is_public_name(name)
    ]
    assert not refused


@each([file for file in PACKAGE_FILES if file not in KERAS_FILES])
def test_private_names_of_other_libraries_are_left_alone(file):
    ours = set().union(*map(defined_names, PACKAGE_FILES))
    assert not [
        found for found in private_names(file) if found.name not in ours
    ]


@each(CALLBACK_FILES)
def test_callback_file_leaves_private_names_of_others_alone(file):
    assert not private_names(file)


@each([file for file in ALL_FILES if file not in KERAS_FILES])
def test_keras_src_is_left_alone(file):
    assert not re.search(r"\bkeras(_core)?\.s" + r"rc\b", file.read_text())


@each(ALL_FILES)
def test_file_leaves_nothing_to_do(file):
    found = re.findall(r"\b(?:TO" + r"DO|FIX" + r"ME)\b", file.read_text())
    assert not found


@each(SHIPPED_FILES)
def test_file_has_a_module_docstring(file):
    assert ast.get_docstring(read_tree(file))


@each(ALL_FILES)
def test_file_tells_one_story(file):
    lines = len(file.read_text().splitlines())
    reason = ast.get_docstring(read_tree(file)) or ""
    assert lines <= 500 or "It is long" in reason


@each(ALL_FILES)
def test_functions_fit_on_a_screen(file):
    tree = read_tree(file)
    long = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and lines_of_body(node) > 60
    }
    assert not long


def lines_of_body(function):
    """Count the lines of a function below its signature and docstring."""
    body = function.body[bool(ast.get_docstring(function)) :]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_every_folder_of_the_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {file.parent.relative_to(ROOT) for file in PACKAGE_FILES}
    names = {".".join(folder.parts) for folder in folders}
    installed = project["tool"]["setuptools"]["packages"]
    assert set(installed) == names | {"accumtrainer.callbacks"}


def test_no_two_messages_have_one_name():
    files = sorted((PACKAGE / "errors").glob("*.py"))
    names = [
        name
        for file in files
        for name in re.findall("^([A-Z_]+) =", file.read_text(), re.MULTILINE)
    ]
    assert len(names) > 100 and sorted(set(names)) == sorted(names)


def test_changelog_leads_with_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changelog, flags=re.MULTILINE)
    assert newest and newest[1] == accumtrainer.__version__


def test_constraints_are_exact_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    wrong = [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==\S+", pin)]
    assert pins and not wrong


def test_pre_commit_formats_as_make_lint_does():
    pins = (ROOT / "constraints.txt").read_text()
    (pin,) = re.findall(r"^ruff==\S+$", pins, flags=re.MULTILINE)
    used = re.findall(
        r"\[(ruff==\S+)\]", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert set(used) == {pin}

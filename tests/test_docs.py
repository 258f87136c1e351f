"""Claims about docs/: its numbers are measured, its code runs, links lead."""

import json
import re

import pytest
from test_examples import EXAMPLES, ROOT, code_blocks, run_python

import accumtrainer
from accumtrainer import callbacks
from accumtrainer.keras_api import BACKEND

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SITE = ROOT / "mkdocs.yml"
WITHOUT_CODE = (
    "architecture.md",
    "examples.md",
    "guarantees.md",
    "installing.md",
)

# What each line of docs/keras_differences.py shows: Keras's number, and ours.
DIFFERENCES = (
    (
        "rates of a schedule step + 1, 4 batches an update",
        "4, 8, 12",
        "1, 2, 3",
    ),
    ("batches of 4 and 1, as one batch -2", "-3.5", "-2"),
    ("updates made of 6 batches, 4 an update", "1", "2"),
    ("use_ema, momentum 0.5, after weights -1, -2, -3", "-2.46875", "-2.25"),
    ("row twice in a batch, Adam, dense -0.2895", "-0.3909", "-0.2895"),
    ("weight after batches of 1, NaN; 1, 1", "nan", "-1"),
    ("float16: loss scale after 200 batches of NaN", "0", "1"),
    ("float16: weight after them and a gradient of 1", "nan", "-1"),
    (
        "float16: what 200 batches of NaN raise",
        "nothing",
        "NonFiniteError",
    ),
)


def links_of(markdown):
    """List the files that a Markdown text links to, without its code."""
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    paths = [target.partition("#")[0] for target in targets]
    return [p for p in paths if p and not p.startswith(("http:", "https:"))]


def test_differences_from_keras_are_as_printed(tmp_path):
    if BACKEND != "tensorflow":
        reason = "the numbers are those of Keras on TensorFlow"
        print(f"Not run on {BACKEND}: {reason}.")
        pytest.skip(reason)
    printed = run_python(DOCS / "keras_differences.py", folder=tmp_path)
    lines = printed.splitlines()[1:]
    assert [tuple(re.split(r" {2,}", line)) for line in lines] == [
        *DIFFERENCES
    ], printed
    page = (DOCS / "exactness.md").read_text(encoding="utf-8")
    assert f"```text\n{printed}```" in page


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in WITHOUT_CODE],
    ids=lambda page: page.name,
)
def test_code_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    blocks = code_blocks(page.read_text(encoding="utf-8"))
    assert blocks
    program = tmp_path / "page.py"
    program.write_text(
        f"blocks, names = {blocks!r}, {{'__name__': '__main__'}}\n"
        "for block in blocks:\n"
        f"    exec(compile(block, {page.name!r}, 'exec'), names)\n",
        encoding="utf-8",
    )
    run_python(program, folder=tmp_path)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name
)
def test_links_lead_to_files(page):
    links = links_of(page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_readme_links_to_every_page():
    links = links_of((ROOT / "README.md").read_text(encoding="utf-8"))
    assert {f"docs/{page.name}" for page in PAGES} <= set(links)


def test_site_has_every_page_and_example():
    # What the site is made of; MkDocs itself, which is strict about links, is
    # installed for `make docs` alone.
    listed = re.findall(r"([\w/]+\.md)$", SITE.read_text("utf-8"), re.M)
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    pages |= {f"examples/{file.stem}.md" for file in EXAMPLES}
    assert pages <= set(listed)


def test_every_public_name_is_in_the_reference():
    pages = "".join(p.read_text("utf-8") for p in DOCS.glob("api/*.md"))
    named = set(re.findall(r"^::: (?:\w+\.)+(\w+)$", pages, re.M))
    assert {*accumtrainer.__all__, *callbacks.__all__} <= named


def test_speed_in_the_readme_is_what_was_measured():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "benchmarks/measured.json").read_text())
    cells = {
        "MLP": "mlp 32x8",
        "convolutions": "conv 8x8",
        "text classifier": "text 16x8",
        "GPT, 4 layers": "gpt 4x8",
        "VGG-16": "vgg16 1x16",
    }
    for title, cell in cells.items():
        size, count = re.search(r"(\d+)x(\d+)$", cell).groups()
        ratios = [
            next(
                each["advantage"][0]
                for name, each in measured[backend][cell]["times"][
                    "contenders"
                ].items()
                if name.startswith("Keras fit, accumulating")
            )
            for backend in ("tensorflow", "jax", "torch")
        ]
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        assert f"| {title} | {count} x {size} | {shown} |" in page


def test_architecture_names_files_that_are_there():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page))
    places = (ROOT / "accumtrainer", ROOT)
    missing = {
        name
        for name in named
        if not any((place / name).exists() for place in places)
    }
    assert len(named) > 20 and not missing


def test_architecture_names_every_folder_of_the_package():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    folders = {
        file.parent.name
        for file in (ROOT / "accumtrainer").glob("*/__init__.py")
    }
    assert not [name for name in folders if f"\n  {name}/ " not in page]

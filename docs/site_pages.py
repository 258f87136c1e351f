"""Make the site's pages of what is elsewhere in the repository.

MkDocs knows `docs/` alone. README, changelog, examples and what was measured
are written once, where people look for them in the repository; `mkdocs.yml`
names this file as a hook, which brings them into the site, and turns links
between files of the repository into links between pages.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "benchmarks/RESULTS-GPU.md": "benchmarks/results-gpu.md",
    "benchmarks/NOTES.md": "benchmarks/notes.md",
}
PICTURES = ("benchmarks/*.png",)

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files, config):
    """Add what is not in `docs/`."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for example in sorted((ROOT / "examples").glob("*.py")):
        page = page_of(f"examples/{example.name}")
        text = page_of_example(example)
        files.append(File.generated(config, page, content=text))
    for pattern in PICTURES:
        for picture in ROOT.glob(pattern):
            path = picture.relative_to(ROOT).as_posix()
            files.append(
                File.generated(config, path, abs_src_path=str(picture))
            )
    return files


def on_page_markdown(markdown, page, **_):
    """Turn links to files into links to pages, outside of code."""
    here = page.file.src_uri
    source = next((s for s, p in PAGES.items() if p == here), f"docs/{here}")

    def to_page(found):
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(source), found[1])
        )
        return posixpath.relpath(page_of(target), posixpath.dirname(here))

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(to_page, part) for part in parts[::2]]
    return "".join(parts)


def page_of(path):
    """Return where on the site a file of the repository is."""
    if path.startswith("examples/"):
        return path.replace(".py", ".md")
    return PAGES.get(path, path.removeprefix("docs/"))


def page_of_example(path):
    """Write the page of an example: what it says of itself, and its code."""
    source = path.read_text(encoding="utf-8")
    told = ast.get_docstring(ast.parse(source))
    title, _, rest = told.partition("\n")
    code = source.split('"""', 2)[2].lstrip("\n")
    lines = [f"# {path.name}", title, rest.strip(), f"```python\n{code}```"]
    return "\n\n".join(lines) + "\n"

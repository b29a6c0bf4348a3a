"""What the site takes from outside of docs/: files that pages link to, and a page of the API for each public module.

README.md is the first page. Links of a document are written as they work in a checkout, `../benchmarks/results/x.json`.
On the site the file lies under `more/`; examples and Markdown files are pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RESULTS = ("benchmarks/results/*", "benchmarks/results/designs/*")
MORE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/*", *RESULTS)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)([^)]*\))")
PICTURE = re.compile(r"^(!\[[^\]]*\]\()([^)\s]+\.svg)(\))$", re.MULTILINE)
TITLE = "Mixed-precision operators for LLM inference"
"""Of the first page, whose heading is the site's name."""
FIGURE = ("## Figures\n", "## Figures\n\n![Perplexity added and speed, by format](docs/choosing.svg)\n")
"""README has one picture and a table; the first page begins its figures with a plot."""
MODULE = re.compile(r"^\| `(terrazzo[\w.]*)` \|", re.MULTILINE)


def modules() -> list[str]:
    """The public modules, as docs/reference/index.md lists them."""
    return MODULE.findall((ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8"))


def place(name: str) -> str:
    """Where a file of the repository lies on the site."""
    return f"more/{name}.md" if name.startswith("examples/") else f"more/{name}"


def on_config(config: Any) -> Any:
    (api,) = (part["API"] for part in config.nav if "API" in part)
    if len(api) == 1:
        api.extend({name: f"reference/{name}.md"} for name in modules())
    return config


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(path for pattern in MORE for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        if path.parent.name == "examples":
            kind = "python" if path.suffix == ".py" else "dockerfile"
            content = f"# {name}\n\n```{kind}\n{path.read_text(encoding='utf-8')}\n```\n"
            files.append(File.generated(config, place(name), content=content))
        else:
            files.append(File.generated(config, place(name), abs_src_path=str(path)))
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for name in modules():
        text = f"# {name}\n\n::: {name}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links that leave docs/, in the page's own words, lead to `place`."""
    site = page.file.src_uri
    if site == "reference/index.md":
        return MODULE.sub(lambda found: f"| [`{found[1]}`]({found[1]}{'.md'}) |", markdown)
    name = site.removeprefix("more/") if site.startswith("more/") else f"docs/{site}"
    name = "README.md" if site == "index.md" else name

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[2]))
        there = target.removeprefix("docs/") if target.startswith("docs/") else place(target)
        return f"{found[1]}{posixpath.relpath(there, posixpath.dirname(site) or '.')}{found[3]}"

    if site == "index.md":
        page.meta["title"] = TITLE
        markdown = markdown.replace(*FIGURE, 1)
    pictures = PICTURE.sub(r"[\1\2\3](\2)", markdown)  # a picture leads to itself alone, where it can be enlarged
    return LINK.sub(moved, pictures)

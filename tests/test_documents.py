"""What readers meet: sentences of a length that one reads at once, links that lead somewhere, examples that run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from document_code import GIVEN, examples, run
from prose import sentences, too_long, words
from test_public_names import NEEDS, PUBLIC, literal_all

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
READ = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *PAGES]
named = lambda path: path.relative_to(ROOT).as_posix()


def test_sentences_are_counted_as_they_are_read():
    text = (
        "# No sentence\n\nOne `a b c d` [two three](README.md#y)\nfour. Five (i.e. six 1.5 x).\n\n"
        "- Seven\n- eight: nine\n\n| ten | `b` eleven |\n|---|---|\n\n    code is none\n\n"
        "```python\nnor this\n```\n\n1. Twelve!\n"
        "<!-- generated: part -->\n\nNothing of this counts.\n\n<!-- end: part -->\n"
    )
    read = [(line, words(it)) for line, it in sentences(text) if words(it)]
    assert read == [(3, 5), (3, 5), (6, 1), (7, 2), (9, 1), (9, 2), (18, 1)]
    assert too_long("word " * 26) and not too_long("word " * 25)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    own = re.sub(r"<!-- generated: (\S+) -->.*?<!-- end: \1 -->", "", text, flags=re.DOTALL)
    assert len(own.splitlines()) < 120 and len(text.splitlines()) < 230
    assert text.count("![") == 1 and text.count("<!-- generated:") == 2
    assert "make demo " in text and "make test " in text


@pytest.mark.parametrize("path", [*READ, ROOT / "CHANGELOG.md"], ids=named)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text(encoding="utf-8")):
        there = path.parent / target if target else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            made = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", it).strip().lower()) for it in headings}
            assert anchor in made, f"{target}#{anchor}"


def test_every_page_is_in_the_site_once():
    listed = re.findall(r"^      - (?:[\w ]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *(path.relative_to(DOCS).as_posix() for path in PAGES)])


def test_the_reference_has_every_public_module():
    text = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(terrazzo[\w.]*)` \|", text, re.MULTILINE)) == set(PUBLIC)


NO_MODULES = ("terrazzo.kernels",)
"""Words of documents that begin like a module: a group of entry points."""


@pytest.mark.parametrize("path", [*READ, ROOT / "CHANGELOG.md"], ids=named)
def test_names_that_readers_meet_are_in_the_reference(path):
    """Files and changes of our own tree, which a page for contributors has, name what they like."""
    text = re.sub(r"```(diff|python title=).*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    words = re.findall(r"`(terrazzo(?:\.\w+)+)", text)
    for module, names in re.findall(r"from (terrazzo[\w.]*) import ([\w, ]+)", text):
        words += [f"{module}.{name.split()[0]}" for name in names.split(",")]
    lost = []
    for word in sorted(set(words) - {*PUBLIC, *NO_MODULES}):
        owner = max((name for name in PUBLIC if word.startswith(f"{name}.")), key=len)
        listed = literal_all(ast.parse(Path(importlib.util.find_spec(owner).origin).read_text(encoding="utf-8")))
        lost += [word] * (word.removeprefix(f"{owner}.").split(".")[0] not in listed)
    assert not lost


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_shipped_table_has_as_many_records_as_the_page_says(gpu):
    text = (DOCS / "tuning.md").read_text(encoding="utf-8")
    section = text.split(f"{gpu.upper()}\n\n", 1)[1]
    stated = int(re.search(r"has (\d+) records", section)[1])
    table = json.loads((ROOT / "schedules" / "tuned" / f"{gpu}.json").read_text())
    assert len(table["records"]) == stated


def test_what_lists_formats_lists_all():
    """A format is added in one place, `ops/products`; pages and docstrings that list formats do not follow."""
    from terrazzo.nn import Format
    from terrazzo.ops.kinds.table import KINDS
    from terrazzo.ops.products.codes import WIDE
    from terrazzo.ops.products.table import PRODUCTS, of_codes
    from terrazzo.ops.weight_only import entry
    from terrazzo.ops.weight_only.format import QuantizedWeight

    page = lambda name: (DOCS / name).read_text(encoding="utf-8")
    row = re.search(r"^\| `--op` of linear layers \|(.*)\|$", page("tuning.md"), re.MULTILINE)[1]
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(KINDS)
    table = page("operators.md").split("\n\n")[1]
    assert not {one.module.partition(".")[0] for one in PRODUCTS} - set(re.findall(r"`(\w+)`", table))
    assert {Format.parse(name).product for name in re.findall(r'"([\w-]+)"', Format.parse.__doc__)} == set(PRODUCTS)
    wide = {of_codes(name).root for name in WIDE}
    for text in (re.search(r"packed weight of (.*?)\.", entry.gemm.__doc__)[1], entry.CALLS.families):
        assert set(re.findall(r"\w+", text)) - {"or"} == wide
    floats = {f'"{name}"' for name, codes in WIDE.items() if not codes.symmetric}
    assert floats == set(re.findall(r'"\w+"', QuantizedWeight.__doc__.split("weight: ")[1].split("\n")[0]))


def test_every_promise_of_trust_names_tests_that_exist():
    text = (DOCS / "trust.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(?! ---)(.*)\|(.*)\|$", text.split("## Promises and their tests\n", 1)[1], re.MULTILINE)
    assert len(rows) > 15
    for promise, cell in rows[1:]:
        named = re.findall(r"`([^`]*)`", cell)
        assert named and re.fullmatch(r" `[^`]*`(, `[^`]*`)* ", cell), promise
        for test in named:
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE), test


WITH_CODE = [page for page in [ROOT / "README.md", *PAGES] if examples(page)]
MODELS = {"README", "generate", "quick-start"}
"""Pages that load a model: slow on a CPU."""


@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_every_example_is_python(page):
    for example in examples(page):
        compile(example.code, f"{page.name}:{example.line}", "exec")
        assert example.needs in ("", "gpu", "gpus", "server")
    assert set(GIVEN) <= {it.stem for it in WITH_CODE}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(it, id=named(it), marks=[pytest.mark.slow] * (it.stem in MODELS))
        for it in WITH_CODE
        if any(not example.needs for example in examples(it))
    ],
)
def test_examples_run(page, tmp_path):
    """Those that need no GPU, on a CPU; tests/gpu/test_documents_gpu.py has the others."""
    if page.stem in MODELS:
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert run(page, tmp_path, gpu=False)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    for need in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(need, reason=f"{need} is in the extra `docs`: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lost = []
    for name in PUBLIC:
        anchors = set(re.findall(r'id="(terrazzo[\w.]*)"', (tmp_path / "reference" / name / "index.html").read_text()))
        if name == "terrazzo.integrations":  # whose names are modules of other libraries' names
            continue
        if name in NEEDS:
            pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
        module = importlib.import_module(name)
        own = (public for public in module.__all__ if not isinstance(getattr(module, public), ModuleType))
        lost += [f"{name}.{public}" for public in own if f"{name}.{public}" not in anchors]
    assert not lost

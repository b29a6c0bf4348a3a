"""House rules that a linter does not know, and the linter itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prose import MOST_WORDS, too_long

ROOT = Path(__file__).parents[1]
LONGEST = 600
CODE = {".py", ".cu", ".cuh", ".h", ".cpp", ".md", ".toml"}
LEFT_OVERS = re.compile(r"TO" r"DO|FIX" r"ME|NotImplemented" r"Error|mark\.xf" r"ail|^\s*pass\s*(#.*)?$", re.MULTILINE)


def tracked() -> list[Path]:
    """Files of the repository: what git tracks, or, in an unpacked archive, everything that is not generated."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    hidden = {".venv", ".git", "build", "dist", ".gpu", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)]


FILES = [path for path in tracked() if path.suffix in CODE]


def test_no_file_is_longer_than_one_idea():
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {str(path): lines for path, lines in lengths.items() if lines > LONGEST}


LONGEST_FUNCTION = 150


def test_no_function_is_longer_than_one_reads_at_once():
    found = set()
    for path in FILES:
        if path.suffix == ".py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            owners = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
            for node in (node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)):
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                    found.add(f"{path.relative_to(ROOT)} {node.name}")
    assert not found, sorted(found)


def test_documents_that_are_named_exist():
    """A source that nobody can open is none: each *.md that code or a document names is in the repository."""
    known = {path.name for path in FILES if path.suffix == ".md"}
    found = {}
    for path in FILES:
        if path != Path(__file__):
            named = {
                name.rsplit("/", 1)[-1] for name in re.findall(r"[\w./-]*\w\.md\b", path.read_text(encoding="utf-8"))
            }
            if named - known:
                found[str(path.relative_to(ROOT))] = sorted(named - known)
    assert not found


def test_no_sentence_is_longer_than_one_reads_at_once():
    found = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".md" and name != "CHANGELOG.md":
            found[name] = too_long(path.read_text(encoding="utf-8"))
    assert not {name: lines for name, lines in found.items() if lines}, f"above {MOST_WORDS} words, by line"


def test_nothing_is_left_half_done():
    found = {}
    for path in FILES:
        if path.suffix == ".py":
            match = LEFT_OVERS.search(path.read_text(encoding="utf-8"))
            if match:
                found[str(path.relative_to(ROOT))] = match.group().strip()
    assert not found


def without_encoding(tree: ast.AST) -> list[int]:
    """Lines that read or write text by the locale where ruff's PLW1514 does not see what they are called on."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(it.arg in ("encoding", None) for it in node.keywords):
            name, given = getattr(node.func, "attr", ""), len(node.args)
            text = any(it.arg in ("text", "universal_newlines") for it in node.keywords)
            mode = name == "fdopen" and not (given > 1 and "b" in ast.unparse(node.args[1]))
            found += [node.lineno] * (text or mode or (name, given) in (("read_text", 0), ("write_text", 1)))
    return found


def test_text_is_read_and_written_in_utf_8_whatever_the_locale():
    assert without_encoding(ast.parse("p.read_text()\nos.fdopen(3, 'w')\nrun(c, text=True)\np.write_text('')")) == [
        1,
        2,
        3,
        4,
    ]
    assert not without_encoding(ast.parse("p.read_text(encoding='utf-8')\nos.fdopen(3, 'wb')\nread_text(p, 'x')"))
    code = [path for path in FILES if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]
    found = {str(path.relative_to(ROOT)): without_encoding(ast.parse(path.read_bytes())) for path in code}
    assert len(code) > 300 and not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff(arguments):
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "No module named ruff" in ruff.stderr:
        pytest.skip("ruff is not installed")
    assert ruff.returncode == 0, ruff.stdout[-4000:] + ruff.stderr


def test_versions_agree():
    import terrazzo

    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE).group(1) == terrazzo.__version__
    assert f"## {terrazzo.__version__}" in (ROOT / "CHANGELOG.md").read_text()

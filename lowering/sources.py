"""What a kernel is made from: the text of its builder's module and of all that this module imports, as a digest.

Imports are read from the text, those inside functions included, so that nothing is imported for it. Comments,
docstrings and blank lines do not count; text in strings, CUDA's for example, does. A package that is only passed
through on the way to one of its modules does not count either: ours bind names and do nothing else.

The digest is a promise that code under this name came from this text. A file that changed after this process started to
import may have been loaded before or after the change, so everything made from it gets a name of this process alone.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import ArgumentError

_FLOORS = ("layouts", "lowering", "ops", "schedules")  # the floors whose text can reach a kernel's code
_COMPILER = f"{__package__}.compiler"  # what makes machine code of every program
_OF_THIS_PROCESS = os.urandom(16).hex()
_MODULE_IN_STRING = re.compile(r"""["'](terrazzo(?:\.\w+)+)(?::\w+)?["']""")
_STRING_OR_COMMENT = re.compile(
    r'("""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\''  # strings of several lines
    r'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|#[^\n]*",
    re.DOTALL,
)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _find_sources() -> dict[str, tuple[Path, tuple[int, int]]]:
    """Module -> file and its stamp, for every module of the floors."""
    found = {}
    for floor in _FLOORS:
        root = Path(importlib.util.find_spec(f"terrazzo.{floor}").origin).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(("terrazzo", floor, *(parts[:-1] if parts[-1] == "__init__" else parts)))
            found[name] = path, _stamp(path)
    return found


_SOURCES = _find_sources()  # taken now: see the promise above
_known: dict[str, str] = {}  # module -> its `source_digest`, found where these same files were read before


@cache
def source_digest(module: str) -> str:
    """Digest of everything of terrazzo that decides the machine code of a builder in `module`, and of the builder's own
    file where that lies outside terrazzo.

    Raises:
        ArgumentError: no such module can be found.
    """
    if module in _known:
        return _known[module]
    digest = hashlib.sha256()
    roots = {module}
    if module not in _SOURCES:
        code, roots = _parse(_builder_outside(module))
        digest.update(code.encode())
    for name in sorted(closure({*roots, _COMPILER})):
        digest.update(f"{name}\0{_read(name)[0]}\0".encode())
    return digest.hexdigest()


@cache
def files_digest() -> str:
    """Digest of the files themselves: where it is the same, so is every `source_digest` of a module of terrazzo.

    It takes some milliseconds, and parsing what a builder imports some hundred.
    """
    digest = hashlib.sha256()
    for name, (path, stamp) in _SOURCES.items():
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
        if _stamp(path) != stamp:
            digest.update(_OF_THIS_PROCESS.encode())
    return digest.hexdigest()


def digests_of(modules: Iterable[str]) -> dict[str, Any]:
    """What `learn` takes: the digests of builders' modules of terrazzo, and of the files that they were read from."""
    return {"files": files_digest(), "modules": {name: source_digest(name) for name in modules if name in _SOURCES}}


def learn(digests: object) -> None:
    """Take digests of `digests_of` in the place of parsing, where this terrazzo has the very same files."""
    files, modules = (digests.get(key) for key in ("files", "modules")) if isinstance(digests, dict) else (None, None)
    if isinstance(modules, dict) and files == files_digest():
        _known.update({name: one for name, one in modules.items() if name in _SOURCES and isinstance(one, str)})


@cache
def package_digest() -> str:
    """Digest of everything in terrazzo that can decide the machine code of any kernel."""
    return hashlib.sha256("".join(f"{name}\0{_read(name)[0]}\0" for name in _SOURCES).encode()).hexdigest()


def closure(modules: Iterable[str]) -> set[str]:
    """These modules of terrazzo and all that they import, directly or not."""
    found: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += _read(module)[1]
    return found


def _builder_outside(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise ArgumentError(
            "entry", module, "no such module can be imported", "install it or put its folder on PYTHONPATH"
        )
    return importlib.util.decode_source(Path(spec.origin).read_bytes())  # by the encoding that it states


@cache
def _read(module: str) -> tuple[str, set[str]]:
    """Digest of a module's code, and the modules of terrazzo that it imports."""
    path, stamp = _SOURCES[module]
    code, imported = _parse(path.read_text(encoding="utf-8"))
    if _stamp(path) != stamp:
        code += _OF_THIS_PROCESS
    return hashlib.sha256(code.encode()).hexdigest(), imported


def _parse(text: str) -> tuple[str, set[str]]:
    """A source text without docstrings, comments, blank lines and trailing spaces; and the modules that it imports."""
    tree = ast.parse(text)
    lines = text.splitlines()
    for node in _docstrings(tree):
        lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    bare = _STRING_OR_COMMENT.sub(lambda match: match[1] or "", "\n".join(lines))
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip()), _imports(tree, text)


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Strings that have their lines for themselves: a function's first statement, any one of a module or a class."""
    for node in (tree, *_statements(tree.body)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            for one in node.body if isinstance(node, ast.ClassDef | ast.Module) else node.body[:1]:
                is_string = isinstance(one, ast.Expr) and isinstance(getattr(one.value, "value", None), str)
                if is_string and one.lineno > getattr(node, "lineno", 0):
                    yield one


def _statements(body: list[ast.stmt], checked: bool = True) -> Iterator[ast.stmt]:
    """All statements of a body and inside of it; without `checked`, not those for type checkers alone."""
    for node in body:
        yield node
        only_checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for field in ("body", "orelse", "finalbody"):
            if checked or not (only_checked and field == "body"):
                yield from _statements(getattr(node, field, []), checked)
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(part.body, checked)


def _imports(tree: ast.Module, text: str) -> set[str]:
    """The modules of terrazzo that a text imports or names in a string, which is how lazy imports are written."""
    names = {name for name in _MODULE_IN_STRING.findall(text) if name in _SOURCES}
    for node in _statements(tree.body, checked=False):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return set().union(*(_modules_behind(name) for name in names))


@cache
def _modules_behind(name: str) -> frozenset[str]:
    """The modules that an imported name may lead to: of a package with lazy names, all of them."""
    module = name if name in _SOURCES else name.rpartition(".")[0]
    if module not in _SOURCES:
        return frozenset()
    path = _SOURCES[module][0]
    if path.name == "__init__.py" and "__getattr__" in path.read_text(encoding="utf-8"):
        return frozenset(one for one in _SOURCES if one == module or one.startswith(f"{module}."))
    return frozenset({module})

"""Public names: what a package lists, what type checkers read and what it resolves on first use are the same names."""

from __future__ import annotations

import ast
import importlib
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ("terrazzo.lowering.errors", "terrazzo.ops.moe", "terrazzo.ops.registry", "terrazzo.ops.w4a8.fp8")
"""Modules that are public beside the packages."""
FOLDERS = sorted(path for path in (ROOT / "terrazzo").iterdir() if path.is_symlink())
PACKAGES = sorted(
    ".".join(("terrazzo", folder.name, *init.parent.relative_to(folder.resolve()).parts))
    for folder in FOLDERS
    for init in folder.resolve().rglob("__init__.py")
    if len(ast.parse(init.read_text()).body) > 1  # those of a docstring alone are not public
)
PUBLIC = ["terrazzo", *PACKAGES, *MODULES]
EAGER = ("terrazzo.layouts.converters", *MODULES)
"""Those whose names are there as soon as they are imported."""


def tree_of(module: ModuleType) -> ast.Module:
    return ast.parse(Path(module.__file__).read_text())


def literal_all(tree: ast.Module) -> list[str] | None:
    """The names of `__all__` where it is written out, as type checkers read it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return None


def test_what_public_names_lead_to_is_public():
    assert {"terrazzo.ops.w4a16", "terrazzo.nn", "terrazzo.ops.w4a8.fp8"} <= set(PUBLIC)
    for name in PUBLIC:
        module = importlib.import_module(name)
        values = (getattr(module, public) for public in module.__all__)
        found = {value.__name__ for value in values if isinstance(value, ModuleType)}
        assert found <= set(PUBLIC), name


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_shows_the_public_names_and_no_others(name):
    module = importlib.import_module(name)
    listed = literal_all(tree_of(module))
    assert listed and len(set(listed)) == len(listed) and module.__all__ == listed
    for public in listed:
        assert getattr(module, public) is not None, public
    assert dir(module) == sorted(listed)  # also now that all were resolved
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in EAGER])
def test_checkers_read_what_is_resolved(name):
    """The imports of a package under TYPE_CHECKING are its public names, and the objects that it hands out."""
    module = importlib.import_module(name)
    (block,) = (node for node in tree_of(module).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        home = importlib.import_module(statement.module)
        found |= {alias.name: (home, alias.name) for alias in statement.names}
    assert set(found) == set(module.__all__) - {"__version__"}
    for public, (home, own) in found.items():
        value = getattr(module, public)
        there = importlib.import_module(value.__name__) if isinstance(value, ModuleType) else getattr(home, own)
        assert value is there, public
        assert not isinstance(value, ModuleType) or value.__name__ == f"{home.__name__}.{own}"


def test_importing_the_root_is_cheap():
    """0.05 s is the promise, of CPU time here, which a busy machine does not lengthen; the best of five."""

    def seconds(code: str) -> float:
        used = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(used)

    own = {"terrazzo", "terrazzo.lowering", "terrazzo.lowering.lazy"}
    check = f"assert {{name for name in sys.modules if name.partition('.')[0] == 'terrazzo'}} == {own}"
    assert seconds(f"import sys, terrazzo; {check}") - seconds("import sys") < 0.05

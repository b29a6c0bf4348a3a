"""The floor itself: cheap to import, importing only downwards, readable on Python 3.10."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import terrazzo.layouts

FILES = sorted(Path(terrazzo.layouts.__file__).parent.rglob("*.py"))


def test_import_loads_neither_torch_nor_tilelang():
    modules = "heads, emulate, picture"
    code = (
        f"import sys; from terrazzo.layouts import {modules}; print(*{{'torch', 'tilelang', 'tvm'}} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_imports_go_down(path):
    text = path.read_text()
    for node in ast.walk(ast.parse(text, feature_version=(3, 10))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            floor = (name or "").split(".")
            assert floor[0] != "terrazzo" or floor[1] in ("layouts", "lowering"), name
    assert text.count("\n") <= 600


def test_public_names_exist():
    assert all(hasattr(terrazzo.layouts, name) for name in terrazzo.layouts.__all__)

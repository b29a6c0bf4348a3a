"""Names of formats stand where products, conventions and public modules are: elsewhere code reads the values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import PRODUCTS
from test_imports import FLOORS, ROOT

NAMES = {name for one in PRODUCTS for name in (one.record, one.word)} | set(WIDE)
PUBLIC = {f"ops/{one.root}.py" for one in PRODUCTS}
HOMES = ("ops/products/", "ops/checkpoints/conventions/")
TREES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*.py")
    if not str(path.relative_to(ROOT)).startswith(HOMES) and str(path.relative_to(ROOT)) not in PUBLIC
}


def named(nodes: list[ast.expr | None]) -> set[str]:
    parts = (part for node in nodes if node is not None for part in ast.walk(node))
    return {it.value for it in parts if isinstance(it, ast.Constant) and isinstance(it.value, str)} & NAMES


def places(tree: ast.AST) -> Iterator[str]:
    """Lines of literals with two names or more, and of comparisons with one; a list `__all__` may name modules."""
    public = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [getattr(it, "id", "") for it in node.targets] == ["__all__"]
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict | ast.Set | ast.Tuple | ast.List) and id(node) not in public:
            found = named(node.keys if isinstance(node, ast.Dict) else node.elts)
            if len(found) > 1:
                yield f"line {node.lineno}: a table of {', '.join(sorted(found))}"
        elif isinstance(node, ast.Compare) and (found := named([node])):
            yield f"line {node.lineno}: a comparison with {', '.join(sorted(found))}"


def test_no_table_and_no_comparison_names_a_format():
    found = {file: list(places(tree)) for file, tree in TREES.items()}
    assert not {file: said for file, said in found.items() if said}, "ask the product: its attributes say it"


def test_tables_and_comparisons_are_found():
    lines = ('{"u4": 1, "fp8": 2}', 'x == "w4a8"', '[("mxfp4", 1), "w8a8"]', 'x in ("u4",)', '["fp8", 1]', "x == y")
    assert [bool(list(places(ast.parse(line)))) for line in lines] == [True] * 4 + [False] * 2
    assert not list(places(ast.parse('__all__ = ["fp8", "w4ax"]')))

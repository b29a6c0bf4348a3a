"""Conventions are values: each is in the table, is read by a product, and names formats where nobody else does."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
from terrazzo.ops import checkpoints, stored_layers
from terrazzo.ops.checkpoints import conventions
from terrazzo.ops.checkpoints.conventions.base import GROUP, WORD
from terrazzo.ops.checkpoints.conventions.table import BY_CODES, CONVENTIONS, FORMATS, METHODS
from terrazzo.ops.products.table import PRODUCTS

FILES = [
    importlib.import_module(f"{conventions.__name__}.{it.name}") for it in pkgutil.iter_modules(conventions.__path__)
]


def test_the_table_has_what_every_file_defines():
    stored = {it.CONVENTION.name: it.CONVENTION for it in FILES if hasattr(it, "CONVENTION")}
    written = {it.METHOD.name: it.METHOD for it in FILES if hasattr(it, "METHOD")}
    assert stored == CONVENTIONS and written == METHODS
    assert set(FORMATS.values()) | {"int_quantized"} == set(CONVENTIONS)


def test_products_read_every_convention_and_no_other():
    assert {name for one in PRODUCTS for name in one.conventions} == set(CONVENTIONS)
    for one in PRODUCTS:
        if one.direct:
            assert all(CONVENTIONS[name].direct is not None for name in one.conventions)
    assert {name for family in stored_layers.FAMILIES.values() for name in family.readers} == set(CONVENTIONS)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_tensors_of_a_convention_have_axes_that_a_rank_can_cut(name):
    one = CONVENTIONS[name]
    codes = [leaf for leaf in one.leaves if leaf.name in one.codes]
    assert codes and all((leaf.n is not None or leaf.k is None) and not leaf.optional for leaf in codes)
    assert all(one in BY_CODES[leaf] for leaf in one.codes)
    assert all(leaf.instead == "" or one.leaf(leaf.instead).instead == leaf.name for leaf in one.leaves)
    if one.rows > 1 or one.leaves[0].n is None:
        return  # blocks of several rows, or all in one row: read whole
    assert all(leaf.k is not None for leaf in codes) and (one.group or one.scales.k[1] == GROUP)
    for leaf in one.leaves:
        axes = [place[0] for place in (leaf.n, leaf.k) if place is not None]
        assert len(set(axes)) == len(axes)
        assert all(place is None or place[1] in (1, 2, WORD, GROUP) for place in (leaf.n, leaf.k))


def test_names_of_conventions_and_methods_stand_in_their_own_files():
    names, found = {*CONVENTIONS, *METHODS, *FORMATS}, {}
    for path in sorted(Path(checkpoints.__file__).parent.glob("*.py")):
        constants = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        found[path.name] = [node.lineno for node in constants if isinstance(node.value, str) and node.value in names]
    assert not {name: lines for name, lines in found.items() if lines}

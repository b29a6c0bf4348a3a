"""All products, and the one that somebody means: by its record, by its word, or by its codes."""

from __future__ import annotations

from terrazzo.ops.products import converted, direct, mixed, wide
from terrazzo.ops.products.codes import Codes
from terrazzo.ops.products.product import Product

_ROOMS = (wide, converted, direct, mixed)
PRODUCTS: tuple[Product, ...] = tuple(one for room in _ROOMS for one in vars(room).values() if isinstance(one, Product))
"""All that stand in a room, in its order."""
BY_RECORD: dict[str, Product] = {one.record: one for one in PRODUCTS}
BY_WORD: dict[str, Product] = {one.word: one for one in PRODUCTS}
_BY_CODES = {one.codes.name: one for one in PRODUCTS}


def of_codes(codes: str | Codes) -> Product:
    """The product of a weight's codes: each has codes of its own."""
    return _BY_CODES[codes if isinstance(codes, str) else codes.name]


def asked_for(root: str, dequantization: str = "auto") -> Product:
    """The product of a module of terrazzo.ops; a dequantization "e4m3" asks for the one on such activations."""
    alike = [one for one in PRODUCTS if one.root == root]
    return next((one for one in alike if one.x.quant == dequantization), alike[0])

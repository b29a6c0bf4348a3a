"""All products, and the one that somebody means: by its record, by its word, or by its codes."""

from __future__ import annotations

from terrazzo.ops.products import converted, direct, mixed, wide
from terrazzo.ops.products.codes import Codes
from terrazzo.ops.products.product import Product

PRODUCTS: tuple[Product, ...] = (
    wide.W4A16,
    wide.MXFP4,
    wide.NVFP4,
    wide.W8A16,
    wide.FP8,
    converted.W4A8,
    converted.W4A8_FP8,
    converted.MXFP4_FP8,
    direct.W8A8,
    direct.W8A8_FP8,
    mixed.W4AX,
)
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

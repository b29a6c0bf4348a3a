"""The kind of each product."""

from __future__ import annotations

from terrazzo.ops.kinds.base import Kind
from terrazzo.ops.kinds.converted import Converted
from terrazzo.ops.kinds.direct import Direct
from terrazzo.ops.kinds.mixed import Mixed
from terrazzo.ops.kinds.wide import Wide
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import PRODUCTS


def _class_of(product: Product) -> type[Kind]:
    if product.wide:
        return Wide
    return Direct if product.direct else Converted if product.converted else Mixed


KINDS: dict[str, Kind] = {one.record: _class_of(one)(one) for one in PRODUCTS}
"""Record -> kind."""

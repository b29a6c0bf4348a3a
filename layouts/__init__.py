"""Linear maps over bits, fragments, converters and the derivation of packed layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "CONVERTERS",
    "INSTANCES",
    "Converter",
    "Fragment",
    "Instance",
    "LinearMap",
    "PackedLayout",
    "Proof",
    "RowLayout",
    "derive",
    "derive_rows",
    "get_converter",
    "get_instance",
]

if TYPE_CHECKING:
    from terrazzo.layouts.converters import CONVERTERS, Converter, get_converter
    from terrazzo.layouts.fragment import Fragment
    from terrazzo.layouts.instances import INSTANCES, Instance, get_instance
    from terrazzo.layouts.linear import LinearMap
    from terrazzo.layouts.packed import PackedLayout, derive
    from terrazzo.layouts.proof import Proof
    from terrazzo.layouts.rows import RowLayout, derive_rows
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "converters": "CONVERTERS Converter get_converter",
            "fragment": "Fragment",
            "instances": "INSTANCES Instance get_instance",
            "linear": "LinearMap",
            "packed": "PackedLayout derive",
            "proof": "Proof",
            "rows": "RowLayout derive_rows",
        },
    )

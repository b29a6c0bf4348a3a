"""Linear maps over bits, fragments, converters and the derivation of packed layouts."""

from terrazzo.layouts.converters import CONVERTERS, Converter, get_converter
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.instances import INSTANCES, Instance, get_instance
from terrazzo.layouts.linear import LinearMap
from terrazzo.layouts.packed import PackedLayout, derive
from terrazzo.layouts.proof import Proof
from terrazzo.layouts.rows import RowLayout, derive_rows

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

"""Names of what macros take and give. TileLang has the types; nothing is imported for them where programs run."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from terrazzo.ops.tiles.language import T

Macro: TypeAlias = Callable[..., None]
if TYPE_CHECKING:
    from tilelang.language import BufferLoad
    from tvm.tirx import Buffer, PrimExpr, PrimFunc

    Expr: TypeAlias = PrimExpr | int | float
    Place: TypeAlias = Buffer | BufferLoad | PrimExpr
else:
    Buffer = Expr = Place = PrimExpr = PrimFunc = object
Call: TypeAlias = Callable[..., Expr]
Scalar: TypeAlias = int | float | str | bool | None


class Buffers:
    """Buffers by the names that macros know them by: `name=(elements, dtype)` is a new one of each thread."""

    def __init__(self, **buffers: tuple[int, str] | Buffer | None) -> None:
        for name, it in buffers.items():
            setattr(self, name, T.alloc_local(it[:1], it[1]) if isinstance(it, tuple) else it)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Buffer: ...


def scalars(*names: str) -> Buffers:
    """Runtime int32 state of a program, one local buffer for each name."""
    return Buffers(**dict.fromkeys(names, (1, "int32")))

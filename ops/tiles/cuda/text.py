"""The CUDA text of all tile programs: named primitives where TileLang 0.1.15 has no form of its own.

Each is a few lines long and says in `why` what TileLang cannot express. A program asks for the ones it uses with
`prelude(...)` and calls them with ``T.call_extern``. Pointers are ``void *`` because TileLang types a shared buffer by
its pool, not by its element. What converts packed words is in layouts/converters.
"""

from __future__ import annotations

from terrazzo.ops.tiles.cuda import exchange, memory, operands, row_passes

_ADDRESS = """\
__device__ __forceinline__ unsigned tz_smem(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
"""

_ALL = (*memory.TABLE, *exchange.TABLE, *operands.TABLE, *row_passes.TABLE)

PRIMITIVES = {p.name: p for p in _ALL}


def prelude(*names: str, extra: tuple[str, ...] = ()) -> str:
    """CUDA text holding the named primitives, in the order of the table, followed by `extra` sources."""
    wanted = set(names)
    unknown = wanted - PRIMITIVES.keys()
    if unknown:
        raise KeyError(f"unknown primitives {sorted(unknown)}; known: {sorted(PRIMITIVES)}")
    return "\n".join([_ADDRESS, *(p.source for p in _ALL if p.name in wanted), *extra])

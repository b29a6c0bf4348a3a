"""The named primitives (ops/tiles/primitives.py) as functions of TileLang expressions, for the macros of tile programs.

A function has its primitive's name without `tz_`. Where a primitive takes an address, the function takes the element
that lies there, `Ws[stage, i]` or a whole buffer for its first one, or an address that another call has made. What is
written comes first. Functions that only do something are statements of a macro; the others are expressions.
"""

from typing import Any


def address(place: Any, access: str, nbytes: int) -> Any:
    """Address of the element `place`, from where on `nbytes` bytes are "r" (read), "w" (written) or "rw"; an address
    stays what it is."""
    import tilelang.language as T
    from tvm.tirx import Buffer

    if not isinstance(place, Buffer | T.BufferLoad):
        return place
    return T.access_ptr(place, access, max(nbytes * 8 // place.dtype.bits, 1))


def _call(name: str, *arguments: Any, returns: str = "handle") -> Any:
    import tilelang.language as T

    return T.call_extern(returns, f"tz_{name}", *arguments)


# copies from global to shared memory


def cp_async(to: Any, at: Any, nbytes: Any = 16) -> Any:
    """16 bytes, of which those past the first `nbytes` become zero, by the cp.async group that is open."""
    return _call("cp_async", address(to, "w", 16), address(at, "r", 16), nbytes)


def cp_commit() -> Any:
    """The open cp.async group is complete."""
    return _call("cp_commit")


def cp_wait(newer: int) -> Any:
    """The warp sees all of its cp.async groups but the `newer` newest."""
    return _call(f"cp_wait<{newer}>")


def bulk(to: Any, at: Any, nbytes: Any, barrier: Any, cluster: int = 1) -> Any:
    """`nbytes` bytes, a multiple of 16, by a bulk copy that `barrier` counts; in a cluster of several CTAs to the same
    place of each, counted by the barrier of each."""
    parts = address(to, "w", 16), address(at, "r", 16), nbytes, address(barrier, "rw", 8)
    return _call("bulk_multicast", *parts, (1 << cluster) - 1) if cluster > 1 else _call("bulk", *parts)


def bulk_at(to: Any, matrix: Any, at: Any, nbytes: Any, barrier: Any) -> Any:
    """`bulk` from `at` times 16 bytes behind the first element of a matrix of three dimensions."""
    import tilelang.language as T

    base = T.access_ptr(matrix[0, 0, 0], "r", 1)
    return _call("bulk_at", address(to, "w", 16), base, at, nbytes, address(barrier, "rw", 8))


def tile_boxes(rows: int) -> list[int]:
    """Heights of the copies that fetch a tile of `rows` rows, the lowest first: its quarters, where they are 16 rows or
    more. Fewer, and the copies take no longer whatever they hold."""
    return [rows * quarter // 4 for quarter in (1, 2, 3, 4)] if rows % 32 == 0 and rows >= 64 else [rows]


def tma_tile(to: Any, stage: Any, matrix: Any, row: Any, column: Any, barrier: Any, end: Any = None) -> Any:
    """By a warp: the tile of a matrix in global memory that begins at (row, column) and ends before row `end` (None:
    the matrix's), to stage `stage` of a buffer [stages, rows, columns], whose layout says how it is swizzled; `barrier`
    counts it. Rows that the tile does not have are zeros or left as they are: the lowest box that holds the others is
    fetched, as the copy engine takes longer for rows that the matrix does not have (docs/designs.md)."""
    import tilelang.language as T

    _, rows, columns = map(int, to.shape)
    count = (matrix.shape[0] if end is None else end) - row

    def fetch(box):
        part = matrix[row : row + box, column : column + columns]
        return T.tma_copy(part, to[stage, 0:box, :], barrier=barrier, leader_scope_threads=32)

    def fetch_one_of(boxes):
        *lower, box = boxes
        if not lower:
            return fetch(box)

        @T.macro
        def choose():
            if count > lower[-1]:
                fetch(box)
            else:
                fetch_one_of(lower)

        return choose()

    return fetch_one_of(tile_boxes(rows))


# between the CTAs of a cluster


def send16(to: Any, rank: Any, at: Any, barrier: Any) -> Any:
    """Sixteen bytes of registers to where CTA `rank` of the cluster has what this one has at `to`, counted by that
    CTA's `barrier`."""
    return _call("send16", address(to, "w", 16), rank, address(at, "r", 16), address(barrier, "rw", 8))


def wait_together(barrier: Any, parity: Any) -> Any:
    """`wait` by a whole warp, outside of loops that are short of instructions."""
    return _call("wait_together", barrier, parity)


def arrive_at(barrier: Any, rank: Any) -> Any:
    """At the mbarrier of CTA `rank` of the cluster that is this one's `barrier` there; earlier reads come before."""
    return _call("arrive_at", address(barrier, "rw", 8), rank)


def past(to: Any, nbytes: Any) -> Any:
    """The address `nbytes` bytes behind an element that is written."""
    return _call("past", address(to, "w", 1), nbytes)


# between memory and registers


def lds32(at: Any) -> Any:
    """The uint32 at an address."""
    return _call("lds32", address(at, "r", 4), returns="uint32")


def prefetch(at: Any) -> Any:
    """The line of an element in global memory to L2."""
    return _call("prefetch_line", address(at, "r", 4))


def lds16(at: Any) -> Any:
    """The 16-bit word at a `place`, as a uint32."""
    return _call("lds16", at, returns="uint32")


def lds16_at(at: Any, index: Any, nbytes: int) -> Any:
    """The 16-bit word `index` of the `nbytes` bytes from `at` on, as a uint32."""
    return _call("lds16_at", address(at, "r", nbytes), index, returns="uint32")


def lds64(to: Any, at: Any) -> Any:
    """Eight bytes to registers, from an element or a `place`."""
    return _call("lds64", address(to, "w", 8), address(at, "r", 8))


def lds128(to: Any, at: Any) -> Any:
    """Sixteen bytes to registers."""
    return _call("lds128", address(to, "w", 16), address(at, "r", 16))


def copy16(to: Any, at: Any) -> Any:
    """Sixteen bytes."""
    return _call("copy16", address(to, "w", 16), address(at, "r", 16))


def zero16(to: Any) -> Any:
    """Sixteen bytes of zeros."""
    return _call("zero16", address(to, "w", 16))


def ldmatrix4(to: Any, row: Any) -> Any:
    """Four 8x8 matrices of 16-bit values to four registers; lane l names row l % 8 of matrix l / 8."""
    return _call("ldmatrix4", address(to, "w", 16), address(row, "r", 16))


def stmatrix4(row: Any, words: Any) -> Any:
    """Four registers, `words` the first of them, to four 8x8 matrices; lane l names row l % 8 of matrix l / 8."""
    return _call("stmatrix4", address(row, "w", 16), address(words, "r", 16))


def stmatrix4_trans(row: Any, *words: Any) -> Any:
    """Four words to four 8x8 matrices, each transposed; lane l names row l % 8 of matrix l / 8."""
    return _call("stmatrix4_trans", address(row, "w", 16), *words)


def store_row(dtype: str, whole: bool, matrix: Any, row: Any, pitch: int, column: Any, at: Any) -> Any:
    """16 bytes to row `row` of a matrix [rows, pitch] in global memory, elements of 16 or 32 bits. whole: its rows are
    multiples of 16 bytes; else what is past their end is left out."""
    import tilelang.language as T

    word = "unsigned" if dtype in ("float32", "int32") else "unsigned short"
    name = f"store_row<{word}, {str(whole).lower()}>"
    return _call(name, T.access_ptr(matrix[0, 0], "w", 1), row, pitch, column, address(at, "r", 16))


def ldcg4(to: Any, at: Any) -> Any:
    """Four 32-bit sums of another CTA, past L1."""
    return _call("ldcg4", address(to, "w", 16), address(at, "r", 16))


def addcg4(to: Any, at: Any, dtype: str = "float32") -> Any:
    """Four sums of another CTA, float32 or int32, join those at `to`."""
    name = {"float32": "addcg4", "int32": "addcg4i"}[dtype]
    return _call(name, address(to, "rw", 16), address(at, "r", 16))


# tensor cores, which TileLang has by name


def mma_kind(dtype: str) -> str:
    """The name of float16 or bfloat16 operands in `mma` and `wgmma`."""
    return {"float16": "fp16", "bfloat16": "bf16"}[dtype]


def mma(kind: str, sums: Any, to: Any, a: Any, at: Any, b: Any, b_at: Any) -> Any:
    """mma.sync m16n8k16 on "fp16" or "bf16", m16n8k32 on "int8": four sums from sums[to] on += four registers of A from
    a[at] on times two of B from b[b_at] on."""
    import tilelang.language as T

    shape, of = ("m16n8k32", "int32") if kind == "int8" else ("m16n8k16", "fp32")
    dtype = "int32" if kind == "int8" else "float32"
    return T.ptx_mma(dtype, shape, "row", "col", kind, kind, of, a.data, at, b.data, b_at, sums.data, to, T.bool(False))


def wgmma(
    tokens: int,
    kinds: tuple[str, str],
    sums: Any,
    to: Any,
    a: Any,
    at: Any,
    x: Any,
    offset: Any,
    add: Any = True,
    k_major: bool = True,
) -> Any:
    """wgmma of 64 rows, four registers from a[at] on, by `tokens` tokens in shared memory, 16 bytes * `offset` behind
    what the descriptor x names. kinds: of A and B, "fp16" or "bf16" (k16), "int8", "uint8" or "e4m3" (k32). The sums
    from sums[to] on are added to where `add` is true, else they start anew. x: a descriptor, or a name bound to a sum
    with what `matrix` returns, of a matrix [tokens, k], or [k, tokens] of 16-bit values if not `k_major`."""
    import tilelang.language as T

    wide = kinds[1] in ("fp16", "bf16")
    dtype = "int32" if kinds[1] == "int8" else "float32"
    return T.ptx_wgmma_rs(
        dtype, f"m64n{tokens}k{16 if wide else 32}", k_major, *kinds, "fp32" if wide else dtype, a.data, at,
        getattr(x, "data", x), offset, sums.data, to, T.bool(add), 1, 1,
    )  # fmt: skip


# 16-bit values


def pack2(low: Any, high: Any, *, bf16: bool) -> Any:
    """Two floats as the halves of a uint32."""
    return _call(f"pack2<{str(bf16).lower()}>", low, high, returns="uint32")


def unpack(half: int, word: Any, *, bf16: bool) -> Any:
    """The low (0) or high (1) half of a uint32 as a float."""
    return _call(f"unpack<{str(bf16).lower()}, {half}>", word, returns="float32")


def byte_perm(low: Any, high: Any, selector: int) -> Any:
    """Four bytes of two uint32 words, each named by a digit of the selector, the lowest byte by the last one: 0 to 3 of
    `low`, 4 to 7 of `high`."""
    import tilelang.language as T

    return T.call_extern("uint32", "__byte_perm", low, high, T.uint32(selector))


# order


def syncwarp() -> Any:
    """A barrier of the warp."""
    return _call("syncwarp")


def wg_sync(warpgroup: Any) -> Any:
    """A barrier of the threads of warpgroup `warpgroup` of the CTA."""
    return _call("wg_sync", warpgroup + 1)


def turn_wait(warpgroup: Any) -> Any:
    """Until the warpgroup's turn has come."""
    return _call("turn_wait", warpgroup)


def turn_pass(warpgroup: Any) -> Any:
    """It is the turn of warpgroup `warpgroup`, one other than the caller's."""
    return _call("turn_pass", warpgroup)


def wg_any(warpgroup: Any, condition: Any) -> Any:
    """Whether it holds in any thread of the warpgroup; a barrier of its threads."""
    return _call("wg_any", warpgroup + 1, condition, returns="bool")


def fence() -> Any:
    """Loads from shared memory stay behind the mbarrier that was waited for."""
    return _call("fence")


def place(at: Any, access: str = "r") -> Any:
    """uint32 address in shared memory of an element, or of the first one of a buffer, from where on the program finds
    all that it reads by adding bytes. It stays in a register; the address of an element is made anew each time."""
    import tilelang.language as T

    return _call("place", T.access_ptr(at, access, 1), returns="uint32")


def matrix(descriptor: Any) -> Any:
    """A wgmma descriptor as a uint64, to which 16-byte steps may be added."""
    return _call("matrix", descriptor.data, returns="uint64")


def wait(barrier: Any, parity: Any) -> Any:
    """The mbarrier at a `place` has completed its phase of this parity."""
    return _call("wait", barrier, parity)


def arrive(barrier: Any) -> Any:
    """At the mbarrier at a `place`."""
    return _call("arrive", barrier)


def opaque(scalar: Any) -> Any:
    """The int32 in a one-element buffer is not known to the compiler: what follows from it is computed behind this."""
    return _call("opaque", address(scalar, "rw", 4))


def uniform(x: Any) -> Any:
    """An int32 that all lanes of the warp have, known as such to the compiler."""
    return _call("uniform", x, returns="int32")


def last_arrival(semaphore: Any, count: int) -> Any:
    """Whether this CTA is the last of `count` to arrive, whose earlier stores it then sees; a barrier of the CTA."""
    return _call("last_arrival", address(semaphore, "rw", 4), count, returns="bool")


def quotient(n: Any, d: Any) -> Any:
    """n / d of int32 n >= 0 and d > 0 whose quotient is below 2^22, in a third of the time of `T.truncdiv`."""
    return _call("quotient", n, d, returns="int32")


# sums that CTAs part (ops/tiles/shares.py)


def has(units: Any, unit: Any) -> Any:
    """Whether the bit `unit` of an int32 is set."""
    return _call("has", units, unit, returns="int32") > 0

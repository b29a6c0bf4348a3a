"""The named primitives (ops/tiles/cuda) as functions of TileLang expressions, for the macros of tile programs.

A function has its primitive's name without `tz_`. Where a primitive takes an address, the function takes the element
that lies there, `Ws[stage, i]` or a whole buffer for its first one, or an address that another call has made. What is
written comes first. Functions that only do something are statements of a macro; the others are expressions.
"""

from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr, Place


def address(place: Place, access: str, nbytes: int) -> Expr:
    """Address of the element `place`, from where on `nbytes` bytes are "r" (read), "w" (written) or "rw"; an address
    stays what it is."""
    from tvm.tirx import Buffer

    if not isinstance(place, Buffer | T.BufferLoad):
        return place
    return T.access_ptr(place, access, max(nbytes * 8 // place.dtype.bits, 1))


def call(name: str, *arguments: Expr, returns: str = "handle") -> Expr:
    """The primitive `name`, without `tz_`."""
    return T.call_extern(returns, f"tz_{name}", *arguments)


# copies from global to shared memory


def cp_async(to: Place, at: Place, nbytes: Expr = 16) -> Expr:
    """16 bytes, of which those past the first `nbytes` become zero, by the cp.async group that is open."""
    return call("cp_async", address(to, "w", 16), address(at, "r", 16), nbytes)


def cp_commit() -> Expr:
    """The open cp.async group is complete."""
    return call("cp_commit")


def cp_wait(newer: int) -> Expr:
    """The warp sees all of its cp.async groups but the `newer` newest."""
    return call(f"cp_wait<{newer}>")


def bulk(to: Place, at: Place, nbytes: Expr, barrier: Place, cluster: int = 1) -> Expr:
    """`nbytes` bytes, a multiple of 16, by a bulk copy that `barrier` counts; in a cluster of several CTAs to the same
    place of each, counted by the barrier of each."""
    parts = address(to, "w", 16), address(at, "r", 16), nbytes, address(barrier, "rw", 8)
    return call("bulk_multicast", *parts, (1 << cluster) - 1) if cluster > 1 else call("bulk", *parts)


def bulk_at(to: Place, matrix: Place, at: Expr, nbytes: Expr, barrier: Place) -> Expr:
    """`bulk` from `at` times 16 bytes behind the first element of a matrix of three dimensions."""
    base = T.access_ptr(matrix[0, 0, 0], "r", 1)
    return call("bulk_at", address(to, "w", 16), base, at, nbytes, address(barrier, "rw", 8))


def tile_boxes(rows: int) -> list[int]:
    """Heights of the copies that fetch a tile of `rows` rows, the lowest first: its quarters, where they are 16 rows or
    more. Fewer, and the copies take no longer whatever they hold."""
    return [rows * quarter // 4 for quarter in (1, 2, 3, 4)] if rows % 32 == 0 and rows >= 64 else [rows]


def tma_tile(
    to: Place, stage: Expr, matrix: Place, row: Expr, column: Expr, barrier: Place, end: Expr | None = None
) -> Expr:
    """By a warp: the tile of a matrix in global memory that begins at (row, column) and ends before row `end` (None:
    the matrix's), to stage `stage` of a buffer [stages, rows, columns], whose layout says how it is swizzled; `barrier`
    counts it. Rows that the tile does not have are zeros or left as they are: the lowest box that holds the others is
    fetched, as the copy engine takes longer for rows that the matrix does not have (docs/designs.md)."""
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


def send16(to: Place, rank: Expr, at: Place, barrier: Place) -> Expr:
    """Sixteen bytes of registers to where CTA `rank` of the cluster has what this one has at `to`, counted by that
    CTA's `barrier`."""
    return call("send16", address(to, "w", 16), rank, address(at, "r", 16), address(barrier, "rw", 8))


def wait_together(barrier: Place, parity: Expr) -> Expr:
    """`wait` by a whole warp, outside of loops that are short of instructions."""
    return call("wait_together", barrier, parity)


def arrive_at(barrier: Place, rank: Expr) -> Expr:
    """At the mbarrier of CTA `rank` of the cluster that is this one's `barrier` there; earlier reads come before."""
    return call("arrive_at", address(barrier, "rw", 8), rank)


def past(to: Place, nbytes: Expr) -> Expr:
    """The address `nbytes` bytes behind an element that is written."""
    return call("past", address(to, "w", 1), nbytes)


# between memory and registers


def lds32(at: Place) -> Expr:
    """The uint32 at an address."""
    return call("lds32", address(at, "r", 4), returns="uint32")


def prefetch(at: Place) -> Expr:
    """The line of an element in global memory to L2."""
    return call("prefetch_line", address(at, "r", 4))


def lds16(at: Place) -> Expr:
    """The 16-bit word at a `place`, as a uint32."""
    return call("lds16", at, returns="uint32")


def lds16_at(at: Place, index: Expr, nbytes: int) -> Expr:
    """The 16-bit word `index` of the `nbytes` bytes from `at` on, as a uint32."""
    return call("lds16_at", address(at, "r", nbytes), index, returns="uint32")


def lds64(to: Place, at: Place) -> Expr:
    """Eight bytes to registers, from an element or a `place`."""
    return call("lds64", address(to, "w", 8), address(at, "r", 8))


def lds128(to: Place, at: Place) -> Expr:
    """Sixteen bytes to registers."""
    return call("lds128", address(to, "w", 16), address(at, "r", 16))


def copy16(to: Place, at: Place) -> Expr:
    """Sixteen bytes."""
    return call("copy16", address(to, "w", 16), address(at, "r", 16))


def zero16(to: Place) -> Expr:
    """Sixteen bytes of zeros."""
    return call("zero16", address(to, "w", 16))


def ldmatrix4(to: Place, row: Place) -> Expr:
    """Four 8x8 matrices of 16-bit values to four registers; lane l names row l % 8 of matrix l / 8."""
    return call("ldmatrix4", address(to, "w", 16), address(row, "r", 16))


def stmatrix4(row: Place, words: Place) -> Expr:
    """Four registers, `words` the first of them, to four 8x8 matrices; lane l names row l % 8 of matrix l / 8."""
    return call("stmatrix4", address(row, "w", 16), address(words, "r", 16))


def stmatrix4_trans(row: Place, *words: Place) -> Expr:
    """Four words to four 8x8 matrices, each transposed; lane l names row l % 8 of matrix l / 8."""
    return call("stmatrix4_trans", address(row, "w", 16), *words)


def store_row(dtype: str, whole: bool, matrix: Place, row: Expr, pitch: int, column: Expr, at: Place) -> Expr:
    """16 bytes to row `row` of a matrix [rows, pitch] in global memory, elements of 16 or 32 bits. whole: its rows are
    multiples of 16 bytes; else what is past their end is left out."""
    word = "unsigned" if dtype in ("float32", "int32") else "unsigned short"
    name = f"store_row<{word}, {str(whole).lower()}>"
    return call(name, T.access_ptr(matrix[0, 0], "w", 1), row, pitch, column, address(at, "r", 16))


def ldcg4(to: Place, at: Place) -> Expr:
    """Four 32-bit sums of another CTA, past L1."""
    return call("ldcg4", address(to, "w", 16), address(at, "r", 16))


def addcg4(to: Place, at: Place, dtype: str = "float32") -> Expr:
    """Four sums of another CTA, float32 or int32, join those at `to`."""
    name = {"float32": "addcg4", "int32": "addcg4i"}[dtype]
    return call(name, address(to, "rw", 16), address(at, "r", 16))


# tensor cores, which TileLang has by name


def mma_kind(dtype: str) -> str:
    """The name of float16 or bfloat16 operands in `mma` and `wgmma`."""
    return {"float16": "fp16", "bfloat16": "bf16"}[dtype]


def mma(kind: str, sums: Place, to: Expr, a: Place, at: Expr, b: Place, b_at: Expr) -> Expr:
    """mma.sync m16n8k16 on "fp16" or "bf16", m16n8k32 on "int8": four sums from sums[to] on += four registers of A from
    a[at] on times two of B from b[b_at] on."""
    shape, of = ("m16n8k32", "int32") if kind == "int8" else ("m16n8k16", "fp32")
    dtype = "int32" if kind == "int8" else "float32"
    return T.ptx_mma(dtype, shape, "row", "col", kind, kind, of, a.data, at, b.data, b_at, sums.data, to, T.bool(False))


def wgmma(
    tokens: int, kinds: tuple[str, str], sums: Place, to: Expr, a: Place, at: Expr, x: Place, offset: Expr,
    add: Expr = True, k_major: bool = True,
) -> Expr:  # fmt: skip
    """wgmma of 64 rows, four registers from a[at] on, by `tokens` tokens in shared memory, 16 bytes * `offset` behind
    what the descriptor x names. kinds: of A and B, "fp16" or "bf16" (k16), "int8", "uint8" or "e4m3" (k32). The sums
    from sums[to] on are added to where `add` is true, else they start anew. x: a descriptor, or a name bound to a sum
    with what `matrix` returns, of a matrix [tokens, k], or [k, tokens] of 16-bit values if not `k_major`."""
    wide = kinds[1] in ("fp16", "bf16")
    dtype = "int32" if kinds[1] == "int8" else "float32"
    return T.ptx_wgmma_rs(
        dtype, f"m64n{tokens}k{16 if wide else 32}", k_major, *kinds, "fp32" if wide else dtype, a.data, at,
        getattr(x, "data", x), offset, sums.data, to, T.bool(add), 1, 1,
    )  # fmt: skip


# 16-bit values


def pack2(low: Expr, high: Expr, *, bf16: bool) -> Expr:
    """Two floats as the halves of a uint32."""
    return call(f"pack2<{str(bf16).lower()}>", low, high, returns="uint32")


def unpack(half: int, word: Expr, *, bf16: bool) -> Expr:
    """The low (0) or high (1) half of a uint32 as a float."""
    return call(f"unpack<{str(bf16).lower()}, {half}>", word, returns="float32")


def byte_perm(low: Expr, high: Expr, selector: int) -> Expr:
    """Four bytes of two uint32 words, each named by a digit of the selector, the lowest byte by the last one: 0 to 3 of
    `low`, 4 to 7 of `high`."""
    return T.call_extern("uint32", "__byte_perm", low, high, T.uint32(selector))


# sums


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c of floats, rounded once."""
    return T.call_extern("float32", "__fmaf_rn", a, b, c)


def rescale(total: Expr, row: Expr, token: Expr, bias: Expr) -> Expr:
    """A sum times the scales of its row and token, plus the bias."""
    return call("rescale", total, row, token, bias, returns="float32")


# order


def syncwarp() -> Expr:
    """A barrier of the warp."""
    return call("syncwarp")


def wg_sync(warpgroup: Expr) -> Expr:
    """A barrier of the threads of warpgroup `warpgroup` of the CTA."""
    return call("wg_sync", warpgroup + 1)


def turn_wait(warpgroup: Expr) -> Expr:
    """Until the warpgroup's turn has come."""
    return call("turn_wait", warpgroup)


def turn_pass(warpgroup: Expr) -> Expr:
    """It is the turn of warpgroup `warpgroup`, one other than the caller's."""
    return call("turn_pass", warpgroup)


def wg_any(warpgroup: Expr, condition: Expr) -> Expr:
    """Whether it holds in any thread of the warpgroup; a barrier of its threads."""
    return call("wg_any", warpgroup + 1, condition, returns="bool")


def fence() -> Expr:
    """Loads from shared memory stay behind the mbarrier that was waited for."""
    return call("fence")


def place(at: Place, access: str = "r") -> Expr:
    """uint32 address in shared memory of an element, or of the first one of a buffer, from where on the program finds
    all that it reads by adding bytes. It stays in a register; the address of an element is made anew each time."""
    return call("place", T.access_ptr(at, access, 1), returns="uint32")


def matrix(descriptor: Place) -> Expr:
    """A wgmma descriptor as a uint64, to which 16-byte steps may be added."""
    return call("matrix", descriptor.data, returns="uint64")


def wait(barrier: Place, parity: Expr) -> Expr:
    """The mbarrier at a `place` has completed its phase of this parity."""
    return call("wait", barrier, parity)


def arrive(barrier: Place) -> Expr:
    """At the mbarrier at a `place`."""
    return call("arrive", barrier)


def opaque(scalar: Place) -> Expr:
    """The int32 in a one-element buffer is not known to the compiler: what follows from it is computed behind this."""
    return call("opaque", address(scalar, "rw", 4))


def uniform(x: Expr) -> Expr:
    """An int32 that all lanes of the warp have, known as such to the compiler."""
    return call("uniform", x, returns="int32")


def last_arrival(semaphore: Place, count: int) -> Expr:
    """Whether this CTA is the last of `count` to arrive, whose earlier stores it then sees; a barrier of the CTA."""
    return call("last_arrival", address(semaphore, "rw", 4), count, returns="bool")


def quotient(n: Expr, d: Expr) -> Expr:
    """n / d of int32 n >= 0 and d > 0 whose quotient is below 2^22, in a third of the time of `T.truncdiv`."""
    return call("quotient", n, d, returns="int32")


# sums that CTAs part (ops/tiles/shares.py)


def has(units: Expr, unit: Expr) -> Expr:
    """Whether the bit `unit` of an int32 is set."""
    return call("has", units, unit, returns="int32") > 0

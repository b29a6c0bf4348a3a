"""Which thread holds which element of a tensor-core operand, as linear maps (specs.md A).

One formula covers every operand: with E elements in a 32-bit register, register r and element e of value v = r*E + e,
g = lane // 4 and t = lane % 4, an A tile holds row 16*warp + g + 8*(r & 1), k = E*t + e + 4*E*(r >> 1).
Operands are written with K along the columns: A is [m, k], B is [n, k]; accumulators are [m, n].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.lowering.errors import LayoutError

OPERAND_BITS = (4, 8, 16)


@dataclass(frozen=True)
class Fragment:
    """An operand tile spread over the registers of a warp or a warpgroup.

    Attributes:
        name: stable name, part of a packed layout's identity.
        bits: width of one element; elements_per_register = 32 // bits.
        threads: 32 (warp) or 128 (warpgroup); of an operand in shared memory, pieces of 16 bytes.
        values: elements held by one thread, in register order (value = register * elements_per_register + element).
        rows, cols: extent of the tile; cols run along K for operands and along N for accumulators.
        map: LinearMap (value, thread) -> (row, col). For a tile whose extent is no power of two (accumulators of
            wgmma m64n24) the map is that of the next power of two, valid for value < values.
    """

    name: str
    bits: int
    threads: int
    values: int
    rows: int
    cols: int
    map: LinearMap

    @property
    def elements_per_register(self) -> int:
        """Elements of a 32-bit register."""
        return 32 // self.bits

    @property
    def registers(self) -> int:
        """32-bit registers of a thread."""
        return self.values // self.elements_per_register

    def __call__(self, thread, value):
        """(row, col) of a thread's value; ints or numpy arrays."""
        image = self.map(thread=thread, value=value)
        return image["row"], image["col"]

    # -- operands ------------------------------------------------------------------------------------------------------
    @classmethod
    def mma_a(cls, bits: int) -> Fragment:
        """A [16, 8E] of mma.sync m16n8k(8E): one warp, four registers."""
        return _operand_a(f"mma_a{bits}", bits, warps=1)

    @classmethod
    def wgmma_a(cls, bits: int) -> Fragment:
        """A [64, 8E] of wgmma m64nNk(8E) in registers: four warps, each as mma.sync's A on its own 16 rows."""
        if bits == 4:
            raise LayoutError("bits", bits, "wgmma has no 4-bit operands", "convert to 8 bits, or use mma_a(4)")
        return _operand_a(f"wgmma_a{bits}", bits, warps=4)

    @classmethod
    def mma_b(cls, bits: int, n: int = 8) -> Fragment:
        """B [n, 8E] ("col") of mma.sync m16n8k(8E): n / 8 instruction tiles, one after another in the registers."""
        return _operand_b(bits, n)

    @classmethod
    def wgmma_shared(cls, bits: int, rows: int = 64) -> Fragment:
        """A K-major operand [rows, 1024 / bits] of wgmma in shared memory, as a descriptor of swizzled rows reads it.

        A thread is a piece of 16 bytes, in order of addresses: eight to a row, piece p of row r at place p ^ (r % 8).
        A k32 step of bytes (k16 of 16 bits) is two pieces of each row; its descriptor starts 32 bytes further.
        """
        return _shared(_check(bits) * 4, bits, rows)

    # -- accumulators --------------------------------------------------------------------------------------------------
    @classmethod
    def mma_c(cls, n: int = 8, bits: int = 32) -> Fragment:
        """C/D [16, n] of mma.sync m16n8: f32 or s32; bits=16 for f16 pairs packed in one register."""
        return _accumulator(f"mma_c{bits}_n{n}", n, bits, warps=1)

    @classmethod
    def wgmma_c(cls, n: int, bits: int = 32) -> Fragment:
        """C/D [64, n] of wgmma m64nN, N a multiple of 8 up to 256."""
        return _accumulator(f"wgmma_c{bits}_n{n}", n, bits, warps=4)

    # -- matrix loads and stores ---------------------------------------------------------------------------------------
    @classmethod
    def ldmatrix(cls, count: int = 4, trans: bool = False) -> Fragment:
        """The b16 units that ldmatrix.x{count} delivers: [8*count, 8], matrix j as rows 8j .. 8j+7.

        Row i of this stack is the 16-byte row whose address lane i supplies; `through` composes it with addresses.
        """
        return _matrix(count, trans)

    @classmethod
    def stmatrix(cls, count: int = 4, trans: bool = False) -> Fragment:
        """The b16 units that stmatrix.x{count} takes from each lane: exactly ldmatrix read backwards."""
        return _matrix(count, trans)

    def through(self, addresses: LinearMap, bits: int = 16) -> LinearMap:
        """Where the elements of this matrix load or store lie, given what each lane addresses.

        Args:
            addresses: (lane) -> (row, col), col in b16 units and a multiple of 8 (16 bytes).
            bits: element width; one b16 unit holds 16 / bits elements.
        Returns:
            (value, thread) -> (row, col) in elements, value counting elements in register order.
        """
        pack = bits_of(16 // bits, "bits")
        lane = self.map.outs[0][1]
        place = addresses.restrict({"lane": lane}).rename(lane="row", row="to_row", col="to_col")
        units = place + LinearMap((("col", 3),), (("to_col", 3),), (1, 2, 4))
        moved = (units @ self.map).rename(to_row="row", to_col="col")
        if pack == 0:
            return moved
        inner = LinearMap.reshape({"value": pack}, {"col": pack})
        return (inner * moved).order(["value", "thread"], ["row", "col"])


def _check(bits: int) -> int:
    if bits not in OPERAND_BITS:
        raise LayoutError("bits", bits, f"operand elements have one of {OPERAND_BITS} bits", "use that width")
    return 32 // bits


@cache
def _operand_a(name: str, bits: int, warps: int) -> Fragment:
    e_per = _check(bits)

    def place(value, thread):
        e, r, g, t, warp = value % e_per, value // e_per, thread % 32 // 4, thread % 4, thread // 32
        return {"row": 16 * warp + g + 8 * (r & 1), "col": e_per * t + e + 4 * e_per * (r >> 1)}

    rows, cols, values, threads = 16 * warps, 8 * e_per, 4 * e_per, 32 * warps
    return Fragment(name, bits, threads, values, rows, cols, _linear(place, values, threads, rows, cols))


@cache
def _operand_b(bits: int, n: int) -> Fragment:
    e_per = _check(bits)
    bits_of(n // 8 if n % 8 == 0 else 0, "n")

    def place(value, thread):
        tile, inside, g, t = value // (2 * e_per), value % (2 * e_per), thread // 4, thread % 4
        return {"row": 8 * tile + g, "col": e_per * t + inside % e_per + 4 * e_per * (inside // e_per)}

    cols, values = 8 * e_per, 2 * e_per * (n // 8)
    name = f"mma_b{bits}" + (f"_n{n}" if n != 8 else "")
    return Fragment(name, bits, 32, values, n, cols, _linear(place, values, 32, n, cols))


@cache
def _shared(values: int, bits: int, rows: int) -> Fragment:
    bits_of(rows if rows % 8 == 0 else 0, "rows")

    def place(value, thread):
        row = thread // 8
        return {"row": row, "col": (thread % 8 ^ row % 8) * values + value}

    name, threads, cols = f"wgmma_shared{bits}", 8 * rows, 8 * values
    name += f"_r{rows}" if rows != 64 else ""
    return Fragment(name, bits, threads, values, rows, cols, _linear(place, values, threads, rows, cols))


@cache
def _accumulator(name: str, n: int, bits: int, warps: int) -> Fragment:
    if n % 8 or not 8 <= n <= 256:
        raise LayoutError("n", n, "accumulators have 8 .. 256 columns in steps of 8", "round N up to 8")
    if bits not in (16, 32):
        raise LayoutError("bits", bits, "accumulators have 16 or 32 bits", "use 32, or 16 for packed f16")

    def place(value, thread):
        g, t, warp = thread % 32 // 4, thread % 4, thread // 32
        return {"row": 16 * warp + g + 8 * ((value >> 1) & 1), "col": 8 * (value >> 2) + 2 * t + (value & 1)}

    rows, threads, whole = 16 * warps, 32 * warps, 1 << (n - 1).bit_length()
    return Fragment(name, bits, threads, n // 2, rows, n, _linear(place, whole // 2, threads, rows, whole))


@cache
def _matrix(count: int, trans: bool) -> Fragment:
    if count not in (1, 2, 4):
        raise LayoutError("count", count, "ldmatrix and stmatrix move 1, 2 or 4 matrices", "use one of these")

    def place(value, thread):
        matrix, h, g, t = value // 2, value % 2, thread // 4, thread % 4
        row, col = (2 * t + h, g) if trans else (g, 2 * t + h)
        return {"row": 8 * matrix + row, "col": col}

    name = f"matrix_x{count}" + ("_trans" if trans else "")
    return Fragment(name, 16, 32, 2 * count, 8 * count, 8, _linear(place, 2 * count, 32, 8 * count, 8))


def _linear(place, values: int, threads: int, rows: int, cols: int) -> LinearMap:
    ins = {"value": bits_of(values), "thread": bits_of(threads)}
    return LinearMap.from_function(place, ins, {"row": bits_of(rows), "col": bits_of(cols)})

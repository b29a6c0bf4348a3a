"""Codes that are places in a codebook of sixteen floats, to f16 and bf16 by byte permutes: NF4.

Each float is rounded to the operand's dtype once, to nearest, ties to even, when the table is made; a scale is one more
product with one rounding. PRMT takes four of eight bytes by three bits each: the low bytes of four operands, or their
high ones, are two of them, for either half of the codebook, and a choice between both. The bit that chooses lies in
front of a byte, where one more PRMT makes a mask of it: 21 instructions for 8 weights, 25 with scales.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith
from terrazzo.layouts.converters.base import Converter, asm3, mul_bf16, mul_f16, register

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""float32 values of the codes, quantiles of a normal distribution (QLoRA; bitsandbytes writes them into its files)."""
SLOTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Fields of a word in the order of its nibbles: the first four make registers 0 and 1, the others 2 and 3."""
TOPS = (7, 15, 23, 31, 3, 11, 19, 27)
"""Where the highest bit of each of them lies: in front of a byte, of the word or of the word times 16."""
BIT_MAP = tuple(at for slot in map(SLOTS.index, range(8)) for at in (4 * slot, 4 * slot + 1, 4 * slot + 2, TOPS[slot]))
PAIRS = (0x5140, 0x7362)
"""PRMT: low and high bytes of elements 0 and 1, and of 2 and 3, as the halves of a register."""


def _rounded(operand: str) -> np.ndarray:
    """uint16 bits of the codebook in the operand's dtype."""
    return np.array(NF4).astype(np.float16).view(np.uint16) if operand == "float16" else arith.to_bf16(np.array(NF4))


def _found(words, table: np.ndarray) -> list[np.ndarray]:
    def element(field):
        places = enumerate(BIT_MAP[4 * field : 4 * field + 4])
        return table[sum((words >> np.uint32(at) & np.uint32(1)) << np.uint32(bit) for bit, at in places)]

    return [element(o).astype(np.uint32) | element(o + 4).astype(np.uint32) << np.uint32(16) for o in range(4)]


def _text(table: np.ndarray) -> list[str]:
    tables = [table.view(np.uint8)[byte::2].copy().view(np.uint32) for byte in range(2)]
    lines = ["unsigned i = w & 0x77777777u, upper, a, b, low, high;"]
    for part in range(2):
        lines += ["i >>= 16;", "w <<= 4;"] * part
        lines.append(asm3("prmt.b32", "upper", "w", "w", "0xba98u") + "  // the first bit of each byte, eight times")
        for name, words in zip(("low", "high"), tables):
            halves = [f"{int(word):#010x}u" for word in words]
            lines += [asm3("prmt.b32", "a", *halves[:2], "i"), asm3("prmt.b32", "b", *halves[2:], "i")]
            lines.append(f"{name} = (a & ~upper) | (b & upper);")
        lines += [f"out[{2 * part + o}] = __byte_perm(low, high, {pair:#06x});" for o, pair in enumerate(PAIRS)]
    return lines


for _short, _operand, _mul, _mul_text in (
    ("f16", "float16", arith.hmul2, mul_f16),
    ("bf16", "bfloat16", arith.bmul2, mul_bf16),
):
    _table = _rounded(_operand)
    register(
        Converter(
            f"nf4_{_short}_words",
            "nf4",
            _operand,
            4,
            16,
            lambda w, table=_table: _found(w, table),
            "\n".join(_text(_table)),
            instructions=21,
            bit_map=BIT_MAP,
        )
    )
    register(
        Converter(
            f"nf4_{_short}_scaled",
            "nf4",
            _operand,
            4,
            16,
            lambda w, s0, s1, table=_table, mul=_mul: [mul(r, (s0, s1)[o % 2]) for o, r in enumerate(_found(w, table))],
            "\n".join(_text(_table) + [_mul_text(f"out[{o}]", f"out[{o}]", f"s{o % 2}") for o in range(4)]),
            instructions=25,
            params=("s0", "s1"),
            bit_map=BIT_MAP,
        )
    )

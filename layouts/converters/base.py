"""What a converter is, and its registry.

A converter turns one storage word of 32 / b fields into O = B / b operand registers of E = 32 / B elements. Element e
of output register o comes from field ``pos(o, e) = o + O*e``: the field order with which one shift and one mask (or one
byte permute) serve a whole register. With b = 4, B = 16 this is the nibble order 7 5 3 1 6 4 2 0 (specs.md B.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from terrazzo.layouts.linear import LinearMap, bits_of
from terrazzo.lowering.errors import LayoutError


@dataclass(frozen=True)
class Converter:
    """One storage format to one operand type, by one instruction sequence.

    Attributes:
        name: "<storage>_<operand>[_<form>]".
        storage, operand: formats, e.g. "u4" and "float16", "bfloat16", "int8", "uint8", "float8_e4m3", "int4", "uint4".
        storage_bits, operand_bits: b and B.
        emulation: (words uint32 [...], *params uint32) -> list of O uint32 arrays, bit for bit the device's.
        body: CUDA statements of the device function; they read ``w`` and the params and write ``out[0 .. O-1]``.
        params: names of the extra registers: () or ("b0", "s0", "b1", "s1") with index 0/1 for the rows of even/odd
            output registers (g, g + 8 of an A fragment); ("s01",) for both scales in one word, the first in its low
            half; ("s", "a") for a whole word in one row.
        instructions: ALU and half-precision instructions for each storage word (SASS count; the cost model's alpha).
        scale_exp2, bias: without params, output register o holds (q + bias[o]) * 2**scale_exp2[o].
        param_bias: for params forms, what b0, b1 add to the zero point (the magic number's integer), else ().
        pos_map: (register, element) -> field.
        bit_map: where bit i of a word of fields is stored, for conversions whose shifts and masks are fewer in another
            order of bits; () for fields as they are.
    """

    name: str
    storage: str
    operand: str
    storage_bits: int
    operand_bits: int
    emulation: Callable[..., list[np.ndarray]] = field(repr=False, compare=False)
    body: str = field(repr=False)
    instructions: int
    params: tuple[str, ...] = ()
    scale_exp2: tuple[int, ...] = ()
    bias: tuple[int, ...] = ()
    param_bias: tuple[int, ...] = ()
    pos_map: LinearMap | None = None
    bit_map: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        outputs = self.outputs
        if self.pos_map is None:
            object.__setattr__(self, "pos_map", interleave(self.storage_bits, self.operand_bits))
        object.__setattr__(self, "scale_exp2", self.scale_exp2 or (0,) * outputs)
        object.__setattr__(self, "bias", self.bias or (0,) * outputs)

    @property
    def outputs(self) -> int:
        """O, the operand registers made of one storage word."""
        return self.operand_bits // self.storage_bits

    @property
    def elements(self) -> int:
        """E, the elements of one operand register."""
        return 32 // self.operand_bits

    @property
    def fields(self) -> int:
        """The fields of one storage word."""
        return 32 // self.storage_bits

    @property
    def alu_per_element(self) -> float:
        """ALU instructions for each element that is converted."""
        return self.instructions / self.fields

    def pos(self, o: int, e: int) -> int:
        """The field of the storage word (0 = least significant) that becomes element e of output register o."""
        return self.pos_map(register=o, element=e)["field"]

    def emulate(self, words, *params) -> np.ndarray:
        """The exact output registers, uint32 [..., O], for uint32 words [...] and one uint32 array for each param."""
        if len(params) != len(self.params):
            raise LayoutError("params", len(params), f"{self.name} takes {self.params or 'none'}", "pass exactly these")
        words, *rest = np.broadcast_arrays(
            np.asarray(words, dtype=np.uint32), *(np.asarray(p, dtype=np.uint32) for p in params)
        )
        return np.stack([np.asarray(out, dtype=np.uint32) for out in self.emulation(words, *rest)], axis=-1)

    def stored(self, words):
        """Words of fields (uint32, in the order of `pos`) as they lie in memory."""
        return move_bits(np.asarray(words, dtype=np.uint32), self.bit_map) if self.bit_map else words

    @property
    def device_name(self) -> str:
        """Name of the CUDA device function."""
        return f"tz_{self.name}"

    @property
    def device_source(self) -> str:
        """CUDA text of one self-contained device function (no headers needed, sm_80 and later)."""
        extra = "".join(f", unsigned {name}" for name in self.params)
        head = f"__device__ __forceinline__ void {self.device_name}(unsigned w, unsigned* out{extra}) {{"
        return "\n".join([head, *("    " + line for line in self.body.strip().splitlines()), "}"]) + "\n"

    def __str__(self) -> str:
        return f"{self.name}: {self.fields} x {self.storage} -> {self.outputs} x {self.elements} {self.operand}"


def interleave(storage_bits: int, operand_bits: int) -> LinearMap:
    """(register, element) -> field with field = register + O * element, O = operand_bits / storage_bits registers.

    Raises:
        LayoutError: bits that are no powers of two, 32 at most.
    """
    dims = {"register": bits_of(operand_bits // storage_bits), "element": bits_of(32 // operand_bits)}
    return LinearMap.reshape(dims, {"field": sum(dims.values())})


def move_bits(words, bit_map: tuple[int, ...]):
    """Words (numpy uint32, or torch int32 or int64) whose bit i lies at bit bit_map[i]: a shift and a mask for each
    distance."""
    distances: dict[int, int] = {}
    for bit, to in enumerate(bit_map):
        distances[to - bit] = distances.get(to - bit, 0) | 1 << bit
    moved = words & 0
    for distance, mask in distances.items():
        part = words & (mask if mask < 1 << 31 else mask - (1 << 32)) if _signed(words) else words & np.uint32(mask)
        if distance >= 0:
            moved = moved | part << distance
        else:  # of signed words, the sign's copies are masked away
            moved = moved | part >> -distance & (mask >> -distance)
    return moved


def _signed(words) -> bool:
    return not isinstance(words, (np.ndarray, np.uint32))


CONVERTERS: dict[str, Converter] = {}
"""Name -> converter; `register` fills it."""


def register(converter: Converter) -> Converter:
    """Add a converter to the registry.

    Raises:
        LayoutError: there is one of the same name.
    """
    if converter.name in CONVERTERS:
        raise LayoutError("name", converter.name, "is already registered", "choose another name")
    CONVERTERS[converter.name] = converter
    return converter


def get_converter(name: str | Converter) -> Converter:
    """The converter of this name (a Converter passes through).

    Raises:
        LayoutError: there is none; the message lists the names that exist.
    """
    if isinstance(name, Converter):
        return name
    if name not in CONVERTERS:
        raise LayoutError("converter", name, "is not registered", f"use one of {', '.join(sorted(CONVERTERS))}")
    return CONVERTERS[name]


# -- CUDA text ---------------------------------------------------------------------------------------------------------
# Inline PTX where the compiler might choose two instructions for one, or contract a rounding away.


def lop3(out: str, a: str, mask: int, magic: int, lut: int = 0xEA) -> str:
    """out = (a & mask) | magic (0xEA) or ^ magic (0x6A): one LOP3."""
    return (
        f'asm("lop3.b32 %0, %1, %2, %3, {lut:#04x};" : "=r"({out}) : "r"({a}), "n"({mask:#010x}), "r"({magic:#010x}u));'
    )


def asm3(op: str, out: str, a: str, b: str, c: str | None = None) -> str:
    """out = op(a, b[, c]) on 32-bit registers."""
    operands = [a, b] if c is None else [a, b, c]
    slots = ", ".join(f"%{i}" for i in range(len(operands) + 1))
    return f'asm("{op} {slots};" : "=r"({out}) : ' + ", ".join(f'"r"({x})' for x in operands) + ");"


def sub_f16(out: str, a: str, b: str) -> str:
    return asm3("sub.rn.f16x2", out, a, b)


def mul_f16(out: str, a: str, b: str) -> str:
    return asm3("mul.rn.f16x2", out, a, b)


def fma_f16(out: str, a: str, b: str, c: str) -> str:
    return asm3("fma.rn.f16x2", out, a, b, c)


def fma_bf16(out: str, a: str, b: str, c: str) -> str:
    return asm3("fma.rn.bf16x2", out, a, b, c)


def sub_bf16(out: str, a: str, b: str) -> str:
    """a - b as b * -1 + a: sub.bf16x2 needs sm_90, the fused form gives the same bits from sm_80 on."""
    return fma_bf16(out, b, "0xbf80bf80u", a)


def mul_bf16(out: str, a: str, b: str) -> str:
    """a * b as a * b + -0: mul.bf16x2 needs sm_90."""
    return fma_bf16(out, a, b, "0x80008000u")


def mul_half(out: str, a: str, b: str, half: int, bf16: bool) -> str:
    """Both halves of a times half `half` of b, one instruction: ptxas reads it twice, but not what a byte permute made.
    With -0 added, as `mul_bf16`."""
    form, low = ("bf16x2" if bf16 else "f16x2"), "lh"[half]
    return (
        f'asm("{{.reg .b16 l,h; .reg .b32 s; mov.b32 {{l,h}},%2; mov.b32 s,{{{low},{low}}}; '
        f'fma.rn.{form} %0,%1,s,%3;}}" : "=r"({out}) : "r"({a}), "r"({b}), "r"(0x80008000u));'
    )

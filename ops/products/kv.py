"""How keys and values are stored: the registry of KV formats (specs.md B.5, C).

A stored value is ``(code + bias) * scale + zero``. The scaling says which values share a scale:

    none      f16 and bf16: the code is the value
    token     one (scale, zero) of f16 for each token and kv head (TurboMind, KIVI values)
    channel   one (scale, zero) of f16 for each head dimension of a group of tokens (BitDecoding KC, KIVI keys)
    static    one f32 scale for each kv head and dimension, calibrated beforehand (LiquidServe int8; fp8)

A rotated format stores H x / sqrt(D) of each token, H the Hadamard matrix, rounded to f16 and then to codes: outliers
spread over all head dimensions (QuaRot, arXiv:2404.00456). Kernels rotate queries alike, which keeps the scores, and
turn outputs of rotated values back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from terrazzo.layouts.converters import Converter, get_converter
from terrazzo.lowering.errors import ArgumentError

TILE_TOKENS = 16
"""Tokens of a packed tile: one m16 row block of keys, one k16 step of values."""
HEAD_DIMS = (64, 128, 256)
CLIP_STEPS = 48
"""Half of a token's range in the steps that its clipping is chosen with: their sums are exact in f16."""
CLIPS = tuple(range(CLIP_STEPS, CLIP_STEPS // 2 - 1, -3))
"""Halves of the ranges that a clipped format chooses from, 1 to 1/2 of the whole; the inner codes lie at a third."""


@dataclass(frozen=True)
class Storage:
    """Codes of stored values.

    Attributes:
        name: the converters' name of a code. converter: to tensor-core operands, whose powers of two kernels fold into
            scales. exact: one whose registers hold the codes themselves.
    """

    name: str
    converter: str
    exact: str


F16 = Storage("f16", "f16_f16", "f16_f16")
BF16 = Storage("bf16", "bf16_bf16", "bf16_bf16")
U8 = Storage("u8", "u8_f16_subnormal", "u8_f16")
U4 = Storage("u4", "u4_f16_subnormal", "u4_f16_magic")
U2 = Storage("u2", "u2_f16_separable", "u2_f16_magic")
E4M3 = Storage("e4m3", "e4m3_f16_moved", "e4m3_f16")
STORAGES = {one.name: one for one in (F16, BF16, U8, U4, U2, E4M3)}


@dataclass(frozen=True)
class KVFormat:
    """One way to store keys or values.

    Attributes:
        name: registry key.
        storage: the converters' name of a code: "f16", "bf16", "u8", "u4", "u2", "e4m3".
        scaling: "none", "token", "channel" or "static".
        group: tokens that share a channel-wise scale, else 0.
        bias: added to every integer code (-128 turns offset binary into signed).
        rotation: "hadamard" where tokens are rotated before they are quantized, else "". Token-wise formats only.
        clip: "mse" where the range of a token is the one of nine, from all to half of it, with the least squared
            error of codes; else "". Two bits only: more of them lose by it.
        source: who stores it like this.
    """

    name: str
    storage: str
    scaling: str
    group: int = 0
    bias: int = 0
    source: str = ""
    rotation: str = ""
    clip: str = ""

    def __post_init__(self) -> None:
        if self.rotation not in ("", "hadamard") or (self.rotation and self.scaling not in ("token", "none")):
            constraint = f"must be 'hadamard' or '', and '' for formats scaled by {self.scaling}"
            raise ArgumentError("rotation", self.rotation, constraint, "rotate a token-wise format")
        if self.clip not in ("", "mse") or (self.clip and (self.storage, self.scaling) != ("u2", "token")):
            constraint = "must be 'mse' or '', and '' but for token-wise codes of two bits"
            raise ArgumentError("clip", self.clip, constraint, "leave it out")

    @property
    def converter(self) -> Converter:
        """Storage word to tensor-core operand; its powers of two are folded into scales by the kernels."""
        return get_converter(STORAGES[self.storage].converter)

    @property
    def exact(self) -> Converter:
        """The same, and the operand holds the code itself."""
        return get_converter(STORAGES[self.storage].exact)

    @property
    def bits(self) -> int:
        """Bits of a stored value."""
        return self.converter.storage_bits

    @property
    def operand(self) -> str:
        """dtype of the tensor-core operand, "float16" or "bfloat16"."""
        return self.converter.operand

    @property
    def levels(self) -> int:
        """Largest code of an asymmetric integer format."""
        return (1 << self.bits) - 1

    @property
    def bf16(self) -> bool:
        """Whether the operand is bfloat16, not float16."""
        return self.operand == "bfloat16"

    @property
    def plain(self) -> bool:
        """Whether the code is the value."""
        return self.scaling == "none"

    @property
    def token_wise(self) -> bool:
        """Whether each token has a scale."""
        return self.scaling == "token"

    @property
    def static(self) -> bool:
        """Whether scales were calibrated beforehand."""
        return self.scaling == "static"

    @property
    def rotated(self) -> bool:
        """Whether tokens are stored in another basis."""
        return bool(self.rotation)

    @property
    def for_values(self) -> bool:
        """Channel-wise scales serve keys only: values are scaled along the sum over tokens."""
        return self.scaling != "channel"

    def __str__(self) -> str:
        return self.name


def _channel(bits: int) -> tuple[KVFormat, ...]:
    return tuple(
        KVFormat(f"int{bits}_channel{g}", f"u{bits}", "channel", group=g, source="BitDecoding KC, KIVI keys")
        for g in (32, 64, 128)
    )


FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("float16", F16.name, "none"),
        KVFormat("bfloat16", BF16.name, "none"),
        KVFormat("int8", U8.name, "token", source="TurboMind"),
        KVFormat("int4", U4.name, "token", source="TurboMind; BitDecoding KT, KIVI values"),
        KVFormat("int2", U2.name, "token", source="BitDecoding KT, KIVI values"),
        KVFormat("int4_hadamard", U4.name, "token", source="QuaRot", rotation="hadamard"),
        KVFormat("int2_hadamard", U2.name, "token", source="QuaRot", rotation="hadamard", clip="mse"),
        *_channel(4),
        *_channel(2),
        KVFormat("int8_static", U8.name, "static", bias=-128, source="LiquidServe"),
        KVFormat("fp8", E4M3.name, "static", source="e4m3, one scale for each head and dimension"),
    )
}
"""Name -> how keys or values are stored; `terrazzo ops --op attention` lists them."""

OF_NEW_TOKENS = KVFormat("float16_hadamard", F16.name, "none", rotation="hadamard")
"""Unquantized new tokens that join a rotated cache in prefill; no cache is stored like this."""


def get_format(name: str | KVFormat, role: str = "keys") -> KVFormat:
    """The format of this name, checked for its role ("keys" or "values").

    Raises:
        ArgumentError: an unknown name, or role, or a channel-wise format for values.
    """
    if role not in ("keys", "values"):
        raise ArgumentError("role", role, "must be 'keys' or 'values'", "leave it out for keys")
    found = name if isinstance(name, KVFormat) else FORMATS.get(name) if isinstance(name, str) else None
    found = OF_NEW_TOKENS if name == OF_NEW_TOKENS.name else found
    argument = {"keys": "k_format", "values": "v_format"}[role]
    if found is None:
        raise ArgumentError(argument, name, "is not a registered KV format", f"use one of {', '.join(FORMATS)}")
    if role == "values" and not found.for_values:
        constraint = "channel-wise scales serve keys only"
        raise ArgumentError(argument, found.name, constraint, "store values token-wise, for example as 'int4'")
    return found


def hadamard_scale(head_dim: int) -> float:
    """The float32 factor of a rotation, 1 / sqrt(head_dim)."""
    return float(np.float32(1 / math.sqrt(head_dim)))

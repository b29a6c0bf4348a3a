"""Scales of NVFP4: e4m3 numbers above 0 in canonical weights, a byte without sign and subnormals in packed ones.

The packed byte has five bits of exponent, with bias 21, and three of mantissa. All e4m3 numbers above 0 have one,
96..238; kernels put it in front of an operand's bits as it is. Two words hold those of two rows and 64 k, where
`PAIRED` of products/codes.py says.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.products.codes import Codes

LEAST = 1
"""Of e4m3's codes above 0: 2^-9."""
LAST = 238
"""Largest packed byte, 448."""
_SUBNORMAL = (96, 96, 104, 108, 112, 114, 116, 118)
"""Packed bytes of the e4m3 codes below 8; code 0 does not occur."""


@cache
def _bytes() -> list[int]:
    """Of the e4m3 codes 0..127."""
    return [*_SUBNORMAL, *(code + 112 for code in range(8, 128))]


def stored(scales: torch.Tensor) -> torch.Tensor:
    """uint8 packed bytes of uint8 e4m3 codes 1..126."""
    import torch

    return torch.tensor(_bytes(), dtype=torch.uint8, device=scales.device)[scales.long()]


def loaded(held: torch.Tensor) -> torch.Tensor:
    """uint8 e4m3 codes of packed bytes; bytes that `stored` does not give become the least one."""
    import torch

    table = torch.full((256,), LEAST, dtype=torch.uint8)
    for code, byte in enumerate(_bytes()[LEAST:127], LEAST):
        table[byte] = code
    return table.to(held.device)[held.long()]


def words_of(held: torch.Tensor) -> torch.Tensor:
    """uint8 [B, G / 4, 256], records of 64 k, of packed bytes uint8 [B, G, 64], in which rows g and g + 8 are
    neighbours."""
    import torch

    blocks, groups, slots = held.shape
    each = held.to(torch.int64).view(blocks, groups // 4, 2, 2, slots // 2, 2)  # word, odd, slot pair, row
    even, odd = (each[..., 0] << 4 | each[..., 1] << 20).unbind(3)
    words = (even | odd >> 8 | (odd & 0xFF) << 24).transpose(2, 3)
    return (words - (words >> 31 << 32)).to(torch.int32).contiguous().view(torch.uint8).view(blocks, groups // 4, -1)


def bytes_of(records: torch.Tensor) -> torch.Tensor:
    """Inverse of `words_of`."""
    import torch

    blocks, units, nbytes = records.shape
    words = records.contiguous().view(torch.int32).view(blocks, units, nbytes // 8, 2).transpose(2, 3)
    words = words.to(torch.int64) & 0xFFFFFFFF
    each = torch.stack([words, words << 8 | words >> 24], dim=3)
    held = torch.stack([each >> 4 & 0xFF, each >> 20 & 0xFF], dim=-1)
    return held.to(torch.uint8).reshape(blocks, 4 * units, nbytes // 4)


def signless(
    codes: torch.Tensor, scales: torch.Tensor, group_size: int, form: Codes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and uint8 scales [N, G] above 0 that mean the same.

    Raises:
        ArgumentError: another dtype or shape, another size of groups, or scales that are NaN.
    """
    import torch

    if type(group_size) is not int or group_size not in form.groups:
        raise ArgumentError("group_size", group_size, f"must be one of {form.groups}", "pass the k of a scale")
    (n, k), seen = codes.shape, weights.described(scales)
    groups = -(-k // group_size)
    if weights.dtype_name(scales) == "float8_e4m3fn":
        scales = scales.contiguous().view(torch.uint8)
    if scales.dtype != torch.uint8 or tuple(scales.shape) != (n, groups):
        constraint = f"must be float8_e4m3fn [{n}, {groups}], one for each {group_size} k"
        remedy = "pass the layer's scales, in rows: not swizzled for another kernel"
        raise ArgumentError("scales", seen, constraint, remedy)
    if bool((scales & 127 == 127).any()):
        row, group = (scales & 127 == 127).nonzero()[0].tolist()
        remedy = "export the model again: old exports write NaN for groups of zeros"
        raise ArgumentError("scales", "NaN", f"must be numbers (row {row}, group {group})", remedy)
    each = scales.repeat_interleave(group_size, dim=1)[:, :k]
    codes = torch.where(each >= 128, codes ^ 8, codes)
    codes = torch.where(each & 127 == 0, torch.zeros_like(codes), codes)
    return codes.contiguous(), (scales & 127).clamp(min=LEAST)


def factors_of(factors: torch.Tensor | None, n: int, device: torch.device) -> torch.Tensor:
    """float32 [N] of what `canonical` takes."""
    import torch

    if factors is None:
        return torch.ones(n, device=device)
    factors = weights.as_tensor("factors", factors, device)
    if not factors.dtype.is_floating_point or tuple(factors.shape) not in ((), (1,), (n,)):
        constraint = f"must be float [], [1] or [{n}]"
        raise ArgumentError("factors", weights.described(factors), constraint, "pass the scale of the tensor")
    factors = factors.float()
    if not bool((factors.isfinite() & (factors > 0)).all()):
        constraint = "must be finite and above 0"
        raise ArgumentError("factors", float(factors.min()), constraint, "the checkpoint is damaged: get it again")
    return factors.reshape(-1).expand(n).contiguous()

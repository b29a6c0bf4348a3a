"""AWQ: codes and zero points packed along N."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints.groups import exact_groups
from terrazzo.ops.checkpoints.words import check_bits, check_float, check_group, check_words, nibbles
from terrazzo.ops.grouped_codes import GroupedCodes

if TYPE_CHECKING:
    import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Column 8c + j of a row lies in nibble AWQ_ORDER[j] of word c."""


def unpack_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str = "gemm",
) -> GroupedCodes:
    """Codes of a layer; arguments and errors as of `w4a16.read_awq`."""
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ArgumentError(
            "version",
            version,
            "must be 'gemm': gemv, gemv_fast and marlin store other layouts",
            "export the model again with version='gemm'",
        )
    check_bits(bits)
    check_float("scales", scales, "[G, N]")
    n = scales.shape[1]
    if n % 8:
        raise ArgumentError(
            "scales", list(scales.shape), "AWQ packs 8 columns to a word: N must be a multiple of 8", "pad the layer"
        )
    k = check_words("qweight", qweight, (None, n // 8))[0]
    zeros = None
    if qzeros is not None:
        check_words("qzeros", qzeros, (scales.shape[0], n // 8))
        zeros = _awq_nibbles(qzeros).T
    codes = _awq_nibbles(qweight).T
    size = exact_groups(k, scales.shape[0], check_group(group_size))
    return GroupedCodes.canonical(codes, scales.T, zeros, group_size=size, bias=bias)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    values = nibbles(words)
    return values.view(values.shape[0], -1, 8)[..., list(AWQ_ORDER)].view(values.shape)

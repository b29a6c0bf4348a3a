"""GPTQ v1 and v2 (AutoGPTQ, GPTQModel, auto-round): codes packed along K, zero points along N."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints.groups import by_index
from terrazzo.ops.checkpoints.words import check_bits, check_float, check_index, check_words, nibbles, word_bytes
from terrazzo.ops.grouped_codes import GroupedCodes

if TYPE_CHECKING:
    import torch

ZERO_OVERFLOW = ("wrap", "16")


def unpack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str | None = None,
    symmetric: bool | None = None,
    desc_act: bool | None = None,
    zero_overflow: str = "wrap",
) -> GroupedCodes:
    """Codes of a layer; arguments and errors as of `w4a16.read_gptq`."""
    import torch

    if version not in (None, "gptq", "gptq_v2"):
        raise ArgumentError(
            "version",
            version,
            "must be 'gptq' or 'gptq_v2': marlin and other kernel formats are no checkpoint formats",
            "use the checkpoint before it was repacked, or export it again as gptq",
        )
    if zero_overflow not in ZERO_OVERFLOW:
        raise ArgumentError(
            "zero_overflow", zero_overflow, f"must be one of {ZERO_OVERFLOW}", "use 'wrap', as the exllama kernels do"
        )
    check_bits(bits)
    check_float("scales", scales, "[G, N]")
    groups, n = scales.shape
    rows = check_words("qweight", qweight, (None, n))[0]
    if g_idx is not None:
        check_index("g_idx", g_idx)
        if len(g_idx) and rows * 8 != len(g_idx):
            check_bits(rows * 32 / len(g_idx))
    zeros = None
    if qzeros is not None:
        check_words("qzeros", qzeros, (groups, -(-n // 8)))
        zeros = _zeros(nibbles(qzeros)[:, :n], version, symmetric, zero_overflow)
    elif symmetric is False:
        raise ArgumentError(
            "qzeros", None, "an asymmetric layer needs its zero points", "add the layer's qzeros tensor"
        )
    if symmetric and zeros is not None and not bool((zeros == 8).all()):
        seen = sorted(torch.unique(zeros).tolist())
        raise ArgumentError(
            "symmetric",
            True,
            f"the config says so, but zero points read as {version} are {seen}, not 8",
            "the layer may be of the other GPTQ version: pass version='gptq_v2' or 'gptq' (config: checkpoint_format)",
        )
    codes = word_bytes(qweight, rows, n, 4)  # nibbles along K: [K/8, N, 8] -> [N, K]
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, n, 8).permute(1, 0, 2).reshape(n, rows * 8)
    return by_index(codes, scales.T, None if zeros is None else zeros.T, g_idx, bias, group_size, desc_act)


def _zeros(stored: torch.Tensor, version: str | None, symmetric: bool | None, zero_overflow: str) -> torch.Tensor:
    """Zero points 0..16 from stored nibbles; never by word arithmetic, whose carry would spill into the next nibble."""
    if version is None:
        version = {7: "gptq", 8: "gptq_v2"}.get(int(stored[0, 0])) if bool((stored == stored[0, 0]).all()) else None
        if version is None:
            raise ArgumentError(
                "version",
                None,
                "asymmetric zero points do not tell GPTQ v1 (stored minus one) from v2",
                "pass version='gptq' or 'gptq_v2' (checkpoint_format in the config; 'gptq' when it names none)",
            )
    if version == "gptq_v2":
        return stored
    overflow = stored == 15
    if not symmetric and bool(overflow.any()):
        warnings.warn(
            f"GPTQ v1 zero points: {int(overflow.sum())} stored nibbles are 15, which readers take for zero point 0 or "
            f"16; taken for {0 if zero_overflow == 'wrap' else 16} (zero_overflow={zero_overflow!r})",
            stacklevel=5,
        )
    return (stored + 1) & 15 if zero_overflow == "wrap" else stored + 1

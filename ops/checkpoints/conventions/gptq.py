"""GPTQ v1 and v2 (AutoGPTQ, GPTQModel, auto-round): codes packed along K, zero points along N."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions import auto_round
from terrazzo.ops.checkpoints.conventions.base import (
    GROUP,
    WORD,
    Convention,
    LayerConfig,
    Leaf,
    Method,
    Tensors,
    needs_zeros,
)
from terrazzo.ops.checkpoints.groups import by_index
from terrazzo.ops.checkpoints.patterns import matches
from terrazzo.ops.checkpoints.words import (
    check_bits,
    check_float,
    check_index,
    check_words,
    codes_of,
    parts_of,
    word_bytes,
)
from terrazzo.ops.weight_only.integers import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import JSON, Stated
    from terrazzo.ops.products.product import Product

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
    code_bits: int = 4,
) -> QuantizedWeight:
    """Codes of a layer; arguments and errors as of `w4a16.read_gptq`. code_bits: what the caller reads, 4 or 8.

    Codes of 2 bits lie in the middle of those of 4: both are that much larger, codes and zero points.
    """
    import torch

    if version not in (None, "gptq", "gptq_v2"):
        constraint = "must be 'gptq' or 'gptq_v2': marlin and other kernel formats are no checkpoint formats"
        remedy = "use the checkpoint before it was repacked, or export it again as gptq"
        raise ArgumentError("version", version, constraint, remedy)
    if zero_overflow not in ZERO_OVERFLOW:
        raise ArgumentError(
            "zero_overflow", zero_overflow, f"must be one of {ZERO_OVERFLOW}", "use 'wrap', as the exllama kernels do"
        )
    if code_bits == 8 and zero_overflow != "wrap":
        constraint = "zero point 256 has no byte"
        raise ArgumentError("zero_overflow", zero_overflow, constraint, "use 'wrap'")
    stored = 2 if (bits, code_bits) == (2, 4) else code_bits
    check_bits(bits, wanted=stored)
    each, zero = 32 // stored, 1 << stored - 1
    larger = (1 << code_bits - 1) - zero
    check_float("scales", scales, "[G, N]")
    groups, n = scales.shape
    rows = check_words("qweight", qweight, (None, n))[0]
    if g_idx is not None:
        check_index("g_idx", g_idx)
        if len(g_idx) and rows * each != len(g_idx):
            check_bits(rows * 32 / len(g_idx), wanted=stored)
    zeros = None
    if qzeros is not None:
        check_words("qzeros", qzeros, (groups, -(-n // each)))
        zeros = _zeros(codes_of(qzeros, stored)[:, :n], version, symmetric, zero_overflow, stored)
    elif symmetric is False:
        raise ArgumentError(
            "qzeros", None, "an asymmetric layer needs its zero points", "add the layer's qzeros tensor"
        )
    if symmetric and zeros is not None and not bool((zeros == zero).all()):
        seen = sorted(torch.unique(zeros).tolist())[:20]
        raise ArgumentError(
            "symmetric",
            True,
            f"the config says so, but zero points read as {version} are {seen}, not {zero}",
            "the layer may be of the other GPTQ version: pass version='gptq_v2' or 'gptq' (config: checkpoint_format)",
        )
    codes = parts_of(word_bytes(qweight, rows, n, 4), stored)  # along K: [K / each, N, each] -> [N, K]
    codes = codes.permute(1, 0, 2).reshape(n, rows * each) + larger
    zeros = None if zeros is None else zeros.T + larger
    return by_index(codes, scales.T, zeros, g_idx, bias, group_size, desc_act, code_bits)


def _zeros(
    stored: torch.Tensor, version: str | None, symmetric: bool | None, zero_overflow: str, bits: int
) -> torch.Tensor:
    """Zero points 0..16 or 0..255 from stored ones; never by word arithmetic, whose carry would spill into the next."""
    zero, last = 1 << bits - 1, (1 << bits) - 1
    if version is None:
        version = (
            {zero - 1: "gptq", zero: "gptq_v2"}.get(int(stored[0, 0])) if bool((stored == stored[0, 0]).all()) else None
        )
        if version is None:
            constraint = "asymmetric zero points do not tell GPTQ v1 (stored minus one) from v2"
            remedy = "pass version='gptq' or 'gptq_v2' (checkpoint_format in the config; 'gptq' when it names none)"
            raise ArgumentError("version", None, constraint, remedy)
    if version == "gptq_v2":
        return stored
    overflow = stored == last
    if not symmetric and bool(overflow.any()):
        warnings.warn(
            f"GPTQ v1 zero points: {int(overflow.sum())} stored ones are {last}, which readers take for zero point 0 "
            f"or {last + 1}; taken for {0 if zero_overflow == 'wrap' else last + 1} (zero_overflow={zero_overflow!r})",
            stacklevel=5,
        )
    return (stored + 1) & last if zero_overflow == "wrap" else stored + 1


def _read(tensors: Tensors, config: LayerConfig, product: Product, zero_overflow: str = "wrap") -> QuantizedWeight:
    needs_zeros(tensors, "gptq", config)
    bits, version = config.bits_for(product), config.version
    facts = dict(bits=bits, code_bits=product.codes.bits, group_size=config.group_size, zero_overflow=zero_overflow)
    facts |= dict(symmetric=config.symmetric, desc_act=config.desc_act)
    facts["version"] = version if version not in (None, *CONVENTION.formats) else config.format
    return unpack_gptq(**({"qzeros": None} | tensors | facts))


CONVENTION = Convention(
    "gptq",
    (
        Leaf("qweight", n=(1, 1), k=(0, WORD)),
        Leaf("qzeros", n=(1, WORD), k=(0, GROUP), optional=True),
        Leaf("scales", n=(1, 1), k=(0, GROUP)),
        Leaf("g_idx", k=(0, 1), optional=True),
    ),
    read=_read,
    formats=("gptq", "gptq_v2"),
)

WRITTEN = """
act_group_aware auto_forward_data_parallel buffered_fwd cache_block_outputs calibration_data_device damp_auto_increment
damp_percent dense_vram_strategy dense_vram_strategy_devices device disable_exllama exllama_config fail_safe failsafe
fallback foem format_version gc_mode gptaq gptaq_alpha gptaq_memory_device hessian hessian_chunk_size hyb_act lm_head
max_input_length mock_quantization model_file_base_name model_name_or_path model_seqlen moe moe_vram_strategy
moe_vram_strategy_devices module_name_preceding_first_block modules_in_block_to_quantize mse offload_to_disk
offload_to_disk_path pack_impl pad_token_id shard_strategy static_groups tokenizer true_sequential use_cuda_fp16
use_exllama use_marlin v2 v2_alpha v2_memory_device vram_strategy wait_for_submodule_finalizers
weight_only_quant_threads
"""
"""Fields that GPTQ's writers leave in configs of others, too."""


def _rule(raw: Stated, name: str) -> tuple[str, JSON]:
    """GPTQModel's `dynamic`: the first pattern that matches a layer, and its fields; "-:" excludes it."""
    for pattern, own in (raw.get("dynamic") or {}).items():
        if matches(pattern.removeprefix("+:").removeprefix("-:"), name):
            return pattern, own
    return "", None


def _own(raw: Stated, name: str) -> Stated:
    pattern, own = _rule(raw, name)
    return own if isinstance(own, dict) and not pattern.startswith("-:") else {}


def _layer(raw: Stated, name: str) -> LayerConfig:
    facts, (pattern, _) = raw | _own(raw, name), _rule(raw, name)
    skip = f"dynamic rule {pattern!r} excludes it" if pattern.startswith("-:") else ""
    version = fields.text(facts, "checkpoint_format") or fields.text(facts, "format") or "gptq"
    version = "marlin" if facts.get("is_marlin_format") else version
    return LayerConfig(
        "gptq_v2" if version == "gptq_v2" else "gptq",
        fields.whole(facts, "bits", 4),
        fields.whole(facts, "group_size"),
        version,
        fields.flag(facts, "sym"),
        fields.flag(facts, "desc_act"),
        skip=skip,
        excluded=bool(skip),
    )


METHOD = Method(
    "gptq",
    _layer,
    read=f"{fields.SIZES} format checkpoint_format is_marlin_format dynamic sym desc_act",
    neutral=f"{auto_round.WRITTEN} {WRITTEN} modules_to_not_convert version zero_point",
    aliases=("gptqmodel",),
    own=_own,
    unnamed=lambda raw: {"desc_act", "bits"} <= set(raw),
)

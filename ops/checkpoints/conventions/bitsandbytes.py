"""NF4 as bitsandbytes publishes it: two codes in a byte, the first in its upper half, and an absmax of each 64 weights.

A weight [N, K] is one row of codes, `weight` uint8 [N * K / 2, 1]. `weight.quant_state.bitsandbytes__nf4`, JSON in
uint8, has N, K and the size of blocks. `weight.absmax` is float32; with "double quantization" it is uint8, places in
`weight.nested_quant_map`, times the `weight.nested_absmax` of each 256 of it, plus `nested_offset`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from terrazzo.layouts.converters.codebook import NF4
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Leaf, Method, Tensors
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product

STATE = "quant_state.bitsandbytes__nf4"


def unpack(weight: torch.Tensor, state: Tensors, *, bias: torch.Tensor | None = None) -> QuantizedWeight:
    """A layer; arguments and errors as of `nf4.from_bitsandbytes`."""
    import torch

    for name in ("absmax", "quant_map", STATE):
        if name not in state:
            raise ArgumentError(f"state[{name!r}]", None, "is missing", "add the layer's tensor weight." + name)
    stated = _stated(state[STATE])
    (n, k), block = stated["shape"], stated["blocksize"]
    if block != 64 or k % block:
        constraint = "must be 64, and divide the input features: other blocks lie across rows, or have no kernel"
        raise ArgumentError("blocksize", f"{block} of {k} features", constraint, "quantize it with blocksize=64")
    codes = weights.as_bytes(weight).flatten()
    if len(codes) * 2 != n * k:
        raise ArgumentError("weight", weights.described(weight), f"must have {n * k // 2} bytes", "get it again")
    table = state["quant_map"].cpu().float().flatten()
    if len(table) != len(NF4) or not torch.allclose(table, torch.tensor(NF4), rtol=0, atol=1e-6):
        constraint = "must be the sixteen values of NF4: kernels have no other codebook"
        raise ArgumentError("quant_map", weights.described(state["quant_map"]), constraint, "quantize it as nf4")
    codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(n, k)
    with weights.renamed(scales="absmax"):
        facts = dict(weight="nf4", group_size=block, bias=bias)
        return QuantizedWeight.canonical(codes, _absmax(state, stated, n * k // block).view(n, -1), **facts)


def _stated(packed: torch.Tensor) -> Stated:
    """What the JSON of a layer says: its sizes, and those of the blocks of absmax."""
    try:
        stated = json.loads(bytes(packed.flatten().tolist()))
        rows, columns = (int(extent) for extent in stated["shape"])
        found = dict(shape=(rows, columns), blocksize=int(stated["blocksize"]))
        nested = {name: stated[name] for name in ("nested_blocksize", "nested_offset") if name in stated}
        return found | {name: float(value) for name, value in nested.items()}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        constraint = f"must be JSON with shape [N, K] and blocksize ({type(error).__name__})"
        raise ArgumentError("quant_state", weights.described(packed), constraint, "get the checkpoint again") from None


def _absmax(state: Tensors, stated: Stated, count: int) -> torch.Tensor:
    """float32 [blocks]."""
    absmax = state["absmax"].flatten()
    if len(absmax) != count or weights.dtype_name(absmax) not in ("float32", "uint8"):
        constraint = f"must be float32 or uint8 [{count}], one for each block"
        raise ArgumentError("absmax", weights.described(absmax), constraint, "get the checkpoint again")
    if weights.dtype_name(absmax) == "float32":
        return absmax
    size, table, outer = (
        int(stated.get("nested_blocksize", 0)),
        state.get("nested_quant_map"),
        state.get("nested_absmax"),
    )
    fits = (
        size > 0 and table is not None and len(table) == 256 and outer is not None and len(outer) == -(-count // size)
    )
    if not fits or "nested_offset" not in stated:
        constraint = (
            "is quantized: it needs nested_quant_map [256], nested_absmax of each block of it, and nested_offset"
        )
        raise ArgumentError("absmax", "uint8", constraint, "get the checkpoint again")
    found = table.float()[absmax.long()] * outer.float().repeat_interleave(size)[:count]
    return found + stated["nested_offset"]


def _read(tensors: Tensors, config: LayerConfig, product: Product) -> QuantizedWeight:
    state = {name.removeprefix("weight."): it for name, it in tensors.items() if name.startswith("weight.")}
    return unpack(tensors["weight"], state, bias=tensors.get("bias"))


CONVENTION = Convention(
    "bitsandbytes",
    (
        Leaf("weight"),
        Leaf("weight.absmax"),
        Leaf("weight.quant_map"),
        Leaf(f"weight.{STATE}"),
        Leaf("weight.nested_absmax", optional=True),
        Leaf("weight.nested_quant_map", optional=True),
    ),
    read=_read,
    holds=lambda checkpoint, prefix, leaf: _holds(checkpoint, prefix),
    formats=("bitsandbytes",),
)


def _holds(checkpoint: Checkpoint, prefix: str) -> bool:
    """SCB are the scales of LLM.int8(), whose layers are refused by what the config says."""
    return any(checkpoint.has(prefix, leaf) for leaf in ("weight.quant_map", "weight.absmax", "SCB"))


def _layer(raw: Stated, name: str) -> LayerConfig:
    kind = fields.text(raw, "bnb_4bit_quant_type") or "fp4"
    skip = "" if kind == "nf4" else f"bnb_4bit_quant_type = {kind!r}: nf4 alone has kernels"
    if fields.flag(raw, "load_in_8bit"):
        skip = "load_in_8bit: LLM.int8() multiplies outliers of x in 16 bits, which no kernel does"
    return LayerConfig("bitsandbytes", 4, activations="", skip=skip)


METHOD = Method(
    "bitsandbytes",
    _layer,
    read="quant_method load_in_8bit load_in_4bit _load_in_8bit _load_in_4bit bnb_4bit_quant_type",
    neutral="bnb_4bit_use_double_quant bnb_4bit_compute_dtype bnb_4bit_quant_storage llm_int8_threshold "
    "llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight",
    unnamed=lambda raw: "load_in_4bit" in raw,
)

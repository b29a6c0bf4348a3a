"""NF4 as bitsandbytes publishes it: two codes in a byte, the first in its upper half, and an absmax of each 64 weights.

A weight [N, K] is one row of codes, `weight` uint8 [N * K / 2, 1]. `weight.quant_state.bitsandbytes__nf4`, JSON in
uint8, has N, K and the size of blocks. `weight.absmax` is float32; with "double quantization" it is uint8, places in
`weight.nested_quant_map`, times the `weight.nested_absmax` of each 256 of it, plus `nested_offset`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terrazzo.layouts.converters.codebook import NF4
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Leaf, Method, Tensors
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import JSON, Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product

STATE = "quant_state.bitsandbytes__nf4"


def unpack(weight: torch.Tensor, state: Tensors, *, bias: torch.Tensor | None = None) -> QuantizedWeight:
    """A layer; arguments and errors as of `nf4.from_bitsandbytes`."""
    import torch

    if not isinstance(weight, torch.Tensor):
        weight = weights.as_tensor("weight", weight)
    weights.check_dense("weight", weight)
    state = _tensors(state, weight.device)
    (n, k), block, nested = _stated(state[STATE])
    if block != 64 or k % block:
        constraint = "must be 64, and divide the input features: other blocks lie across rows, or have no kernel"
        raise ArgumentError("blocksize", f"{block} of {k} features", constraint, "quantize it with blocksize=64")
    codes = weights.as_bytes(weight.detach().flatten())
    if len(codes) * 2 != n * k:
        raise ArgumentError("weight", weights.described(weight), f"must have {n * k // 2} bytes", "get it again")
    table = state["quant_map"].cpu().float().flatten()
    if len(table) != len(NF4) or not torch.allclose(table, torch.tensor(NF4), rtol=0, atol=1e-6):
        constraint = "must be the sixteen values of NF4: kernels have no other codebook"
        raise ArgumentError("quant_map", weights.described(state["quant_map"]), constraint, "quantize it as nf4")
    codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(n, k)
    with weights.renamed(scales="absmax"):
        facts = dict(weight="nf4", group_size=block, bias=bias)
        return QuantizedWeight.canonical(codes, _absmax(state, nested, n * k // block).view(n, -1), **facts)


def _tensors(state: Tensors, device: torch.device) -> Tensors:
    """Those of a layer's state that are read, where its codes are; of floats those that must be."""
    if not isinstance(state, Mapping):
        remedy = "pass QuantState.as_dict(packed=True)"
        raise ArgumentError("state", type(state).__name__, "must be a mapping of names to tensors", remedy)
    given = {name: state.get(name) for name in ("absmax", "quant_map", STATE, "nested_absmax", "nested_quant_map")}
    found: Tensors = {}
    for name, value in given.items():
        if value is None:
            if name.startswith("nested_"):
                continue
            raise ArgumentError(f"state[{name!r}]", None, "is missing", "add the layer's tensor weight." + name)
        found[name] = weights.as_tensor(f"state[{name!r}]", value, device)
        if name not in ("absmax", STATE):
            weights.check_floats(f"state[{name!r}]", found[name], "as bitsandbytes writes it", "get the layer again")
    return found


def _stated(packed: torch.Tensor) -> tuple[list[int], int, dict[str, Any]]:
    """What the JSON of a layer says: its sizes, that of a block, and of blocks of absmax what is said of them."""
    try:
        stated = json.loads(bytes(packed.flatten().tolist()))
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong("", weights.described(packed), f"must be JSON in uint8 ({type(error).__name__})") from None
    if not isinstance(stated, dict):
        raise _wrong("", stated, "must be an object with shape and blocksize")
    count = lambda it: type(it) is int and 0 < it < 2**31
    shape, block, nested = stated.get("shape"), stated.get("blocksize"), {}
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(count, shape)):
        raise _wrong("shape", shape, "must be [N, K], two positive integers below 2^31")
    if not count(block):
        raise _wrong("blocksize", block, "must be a positive integer below 2^31")
    if "nested_blocksize" in stated:
        size = stated["nested_blocksize"]
        if not count(size):
            raise _wrong("nested_blocksize", size, "must be a positive integer below 2^31")
        nested["blocksize"] = size
    if "nested_offset" in stated:
        offset = stated["nested_offset"]
        if type(offset) not in (int, float) or not abs(offset) < 2.0**127:
            raise _wrong("nested_offset", offset, "must be a number in the range of float32")
        nested["offset"] = float(offset)
    return shape, block, nested


def _wrong(field: str, value: JSON, constraint: str) -> ArgumentError:
    where = "quant_state" + f".{field}" * bool(field)
    return ArgumentError(where, value, constraint, "get the checkpoint again")


def _absmax(state: Tensors, nested: dict[str, Any], count: int) -> torch.Tensor:
    """float32 [blocks]."""
    absmax = state["absmax"].flatten()
    if len(absmax) != count or weights.dtype_name(absmax) not in ("float32", "uint8"):
        constraint = f"must be float32 or uint8 [{count}], one for each block"
        raise ArgumentError("absmax", weights.described(absmax), constraint, "get the checkpoint again")
    if weights.dtype_name(absmax) == "float32":
        return absmax
    table, outer, size = state.get("nested_quant_map"), state.get("nested_absmax"), nested.get("blocksize")
    fits = table is not None and outer is not None and size is not None and "offset" in nested
    if not fits or tuple(table.shape) != (256,) or tuple(outer.shape) != (-(-count // size),):
        constraint = (
            "is quantized: it needs nested_quant_map [256], nested_absmax of each block of it, and nested_offset"
        )
        raise ArgumentError("absmax", "uint8", constraint, "get the checkpoint again")
    found = table.float()[absmax.long()] * outer.float().repeat_interleave(min(size, count))[:count]
    return found + nested["offset"]


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

"""FP8 weights as published: `weight` float8_e4m3fn [N, K], multiplied by `weight_scale` or `weight_scale_inv`.

compressed-tensors (float-quantized, naive-quantized) and per-tensor "fp8" files name the scales `weight_scale`: [] or
[1], [N, 1] or [N], or [ceil(N/128), ceil(K/128)]. Files with blocks of 128 x 128 (DeepSeek, Qwen) name them
`weight_scale_inv`, and mean a multiplier all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions import compressed_tensors
from terrazzo.ops.checkpoints.conventions.base import GROUP, Convention, LayerConfig, Leaf, Method, Tensors
from terrazzo.ops.checkpoints.words import static_scale
from terrazzo.ops.products.direct import W8A8_FP8
from terrazzo.ops.products.wide import FP8
from terrazzo.ops.weight_only.format import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.weight.base import AnyCanonical


def unpack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    weight_scale_inv: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """A layer; arguments and errors as of `fp8.from_checkpoint`. input_scale, of x in 8 bits, is not read."""
    if getattr(weight, "ndim", 0) != 2 or weights.dtype_name(weight) not in ("float8_e4m3fn", "uint8"):
        seen = weights.described(weight)
        remedy = "other 8-bit floats (e4m3fnuz, e5m2) have no kernels"
        raise ArgumentError("weight", seen, "must be float8_e4m3fn [N, K]", remedy)
    name = "weight_scale" if weight_scale_inv is None else "weight_scale_inv"
    scales = weight_scale if weight_scale_inv is None else weight_scale_inv
    if scales is None or (weight_scale is not None and weight_scale_inv is not None):
        constraint = "exactly one of weight_scale and weight_scale_inv is needed"
        raise ArgumentError(name, weights.described(scales), constraint, "pass the layer's scales")
    scales = _floats(scales)
    (n, k), shape = weight.shape, tuple(scales.shape)
    if len(shape) == 2 and shape != (n, 1) and shape != (1, 1) and shape != (-(-n // 128), -(-k // 128)):
        blocks = [-(-n // 128), -(-k // 128)]
        constraint = f"must be [], [1], [{n}], [{n}, 1] or {blocks} for [{n}, {k}]"
        raise ArgumentError(name, weights.described(scales), constraint, "pass the layer's scales")
    group = 128 if len(shape) == 2 and shape not in ((n, 1), (1, 1)) else k
    with weights.renamed(codes="weight", scales=name):
        scales = scales.float() if scales.dtype.is_floating_point else scales  # exact, whatever the file's dtype
        return QuantizedWeight.canonical(weight, scales, weight="fp8", group_size=group, bias=bias)


def _floats(scales: torch.Tensor) -> torch.Tensor:
    """Scales that are numbers, of such as are exponents."""
    import torch

    if weights.dtype_name(scales) != "float8_e8m0fnu":
        return scales
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.view(torch.uint8).int() - 127)


def _direct(tensors: Tensors, config: LayerConfig) -> dict[str, Any]:
    """What `w8a8.QuantizedWeight.canonical` takes, with scales of the tensor, of rows or of 128 x 128 blocks.

    A config that says nothing of activations leaves them dynamic, unless the layer has an `input_scale`.

    Raises:
        ArgumentError: codes of another type, a static scale that is announced and not there, a bound of the scales of
            activations (fbgemm's `activation_scale_ub`), such as are powers of two beside scales of rows (`scale_fmt`
            "ue8m0"), or others that no kernel makes.
    """
    import torch

    if config.inputs == "e4m3 bounded":
        constraint = "bounds the scales of activations, and no kernel of W8A8 does"
        remedy = "load it with terrazzo.ops.fp8, which multiplies 16-bit activations"
        raise ArgumentError("activation_scale_ub", "a number", constraint, remedy)
    if config.inputs == "other":
        constraint = "states activations that no kernel of W8A8 multiplies beside these weights"
        remedy = "load it with terrazzo.ops.fp8, which multiplies 16-bit activations"
        raise ArgumentError("quantization_config", "other activations", constraint, remedy)
    codes = tensors["weight"]
    codes = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    name = "weight_scale" if "weight_scale" in tensors else "weight_scale_inv"
    scales = _floats(tensors[name])
    found = static_scale(tensors, config.inputs == "e4m3 static", config.inputs is None)
    ue8m0 = config.inputs == "e4m3 ue8m0"
    if ue8m0 and codes.shape[-1] > 128 and (scales.ndim < 2 or scales.shape[-1] == 1):
        constraint = "rounds scales of blocks of 128, and this layer has none"
        remedy = "load it with terrazzo.ops.fp8, which multiplies 16-bit activations"
        raise ArgumentError("scale_fmt", "ue8m0", constraint, remedy)
    return dict(codes=codes, scales=scales, bias=tensors.get("bias"), ue8m0=ue8m0) | found


def _write(weight: AnyCanonical, block: bool) -> Tensors:
    """A scale of each row, or of each block of 128 x 128."""
    import torch

    compressed_tensors.each_group(weight)
    scales = weight.scales if weight.scales.ndim == 2 else weight.scales[:, None]
    if block:
        blocks = scales[::128]
        if not torch.equal(blocks.repeat_interleave(128, 0)[: weight.n], scales):
            constraint = "must be alike in blocks of 128 rows"
            raise ArgumentError("scales", weights.described(scales), constraint, compressed_tensors.PACKED)
        scales = blocks.contiguous()
    return {"weight": weight.codes.view(torch.float8_e4m3fn), "weight_scale": scales}


_SCALES = ("weight_scale", "weight_scale_inv")


def _holds(checkpoint: Checkpoint, prefix: str, leaf: str) -> bool:
    return any(checkpoint.has(prefix, name) for name in _SCALES) and checkpoint.stores(prefix, leaf, "F8_E4M3")


CONVENTION = Convention(
    "fp8",
    (
        Leaf("weight", n=(0, 1), k=(1, 1)),
        *(Leaf(name, n=(0, GROUP), k=(1, GROUP), instead=other) for name, other in (_SCALES, _SCALES[::-1])),
        Leaf("input_scale", optional=True),
    ),
    read=lambda tensors, config, product: unpack(**tensors),
    direct=_direct,
    holds=_holds,
    formats=("fp8",),
    within=("compressed_tensors",),
    group=128,
    writes=(FP8, W8A8_FP8),
    write=_write,
    published="float-quantized",
)


def _layer(raw: Stated, name: str) -> LayerConfig:
    excluded = fields.left_out(raw, name, "modules_to_not_convert", "ignored_layers")
    block, skip = raw.get("weight_block_size"), ""
    if block is not None and block != [128, 128]:
        skip = f"weight_block_size is {fields.shown(block)}, only blocks of 128 x 128 are read"
    if (codes := fields.word(raw, "fmt")) not in (None, "e4m3"):
        skip = f"fmt is {fields.shown(codes)!r}, only e4m3 is read"
    skip = excluded or skip
    group, stated = -1 if block is None else 128, fields.word(raw, "activation_scheme")
    bounded = raw.get("activation_scale_ub") is not None
    form = fields.word(raw, "scale_fmt")
    if form not in (None, "ue8m0"):
        skip = skip or f"scale_fmt is {fields.shown(form)!r}, only ue8m0 is known"
    if stated not in (None, "dynamic", "static"):
        skip = skip or f"activation_scheme is {fields.shown(stated)!r}, only dynamic and static are known"
    inputs = "e4m3 static" if stated == "static" else "e4m3 bounded" if bounded else "e4m3"
    inputs = "e4m3 ue8m0" if form == "ue8m0" else inputs
    if stated not in (None, "dynamic", "static") or (stated == "static" and block is not None):
        inputs = "other"
    return LayerConfig("fp8", 8, group, activations="", inputs=inputs, skip=skip, excluded=bool(excluded))


METHOD = Method(
    "fp8",
    _layer,
    read="quant_method activation_scheme activation_scale_ub fmt ignored_layers modules_to_not_convert scale_fmt "
    "weight_block_size",
    neutral="kv_cache_scheme kv_cache_quant_method",
    aliases=("fbgemm_fp8",),
)

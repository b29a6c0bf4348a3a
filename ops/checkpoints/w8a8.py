"""W8A8 layers as published: int-quantized of compressed-tensors, and fp8 files whose activations are quantized too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.config import LayerConfig


def int8_arguments(tensors: dict[str, torch.Tensor], config: LayerConfig) -> dict[str, Any]:
    """What `w8a8.QuantizedWeight.canonical` takes, of an int-quantized layer.

    Raises:
        ArgumentError: groups of scales, weights with zero points, a static scale or zero point that is announced and
            not there, or a zero point beside a config of symmetric activations.
    """
    scale, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    if config.group_size not in (None, -1) or (scale.ndim == 2 and scale.shape[1] != 1):
        constraint = "must have one column: W8A8 has scales of rows"
        raise ArgumentError("weight_scale", weights.described(scale), constraint, "load it with w8a16")
    if zeros is not None and bool((zeros != 0).any()):
        raise ArgumentError("weight_zero_point", "not 0", "W8A8 weights are symmetric", "load it with w8a16")
    stated = config.activations or ""
    found = _static(tensors, "static" in stated, config.activations is None)
    zero, asymmetric = tensors.get("input_zero_point"), "asymmetric" in stated
    if "input_scale" in found:
        if zero is None and asymmetric:
            constraint = "the config states static activations with a zero point"
            raise ArgumentError("input_zero_point", None, constraint, "get the missing shard")
        found["input_zero"] = 0 if zero is None else int(_one("input_zero_point", zero))
        if stated and found["input_zero"] and not asymmetric:
            constraint = "the config states symmetric activations"
            raise ArgumentError("input_zero_point", found["input_zero"], constraint, "get the checkpoint again")
    found["asymmetric"] = asymmetric and "input_scale" not in found
    return dict(codes=tensors["weight"], scales=scale, bias=tensors.get("bias")) | found


def fp8_arguments(tensors: dict[str, torch.Tensor], config: LayerConfig) -> dict[str, Any]:
    """The same of an fp8 layer, with scales of the tensor, of rows or of 128 x 128 blocks.

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
    scales = tensors[name]
    if weights.dtype_name(scales) == "float8_e8m0fnu":
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.view(torch.uint8).int() - 127)
    found = _static(tensors, config.inputs == "e4m3 static", config.inputs is None)
    ue8m0 = config.inputs == "e4m3 ue8m0"
    if ue8m0 and codes.shape[-1] > 128 and (scales.ndim < 2 or scales.shape[-1] == 1):
        constraint = "rounds scales of blocks of 128, and this layer has none"
        remedy = "load it with terrazzo.ops.fp8, which multiplies 16-bit activations"
        raise ArgumentError("scale_fmt", "ue8m0", constraint, remedy)
    return dict(codes=codes, scales=scales, bias=tensors.get("bias"), ue8m0=ue8m0) | found


def _static(tensors: dict[str, torch.Tensor], announced: bool, unknown: bool) -> dict[str, Any]:
    scale = tensors.get("input_scale")
    if announced and scale is None:
        raise ArgumentError("input_scale", None, "the config states static activations", "get the missing shard")
    if scale is None or not (announced or unknown):
        return {}
    return {"input_scale": _one("input_scale", scale)}


def _one(name: str, value: torch.Tensor) -> float:
    if value.numel() != 1:
        seen = weights.described(value)
        raise ArgumentError(name, seen, "must be one number for all tokens", "take the largest of joined layers")
    return float(value.float())

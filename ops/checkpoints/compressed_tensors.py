"""compressed-tensors (llm-compressor): pack-quantized words, and int8 values of int-quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints.groups import by_index
from terrazzo.ops.checkpoints.words import (
    check_bits,
    check_float,
    check_index,
    check_int8,
    check_plain,
    check_words,
    codes_of,
    shape_error,
)
from terrazzo.ops.grouped_codes import GroupedCodes, of_bits

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.config import LayerConfig


def unpack_packed(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape: torch.Tensor | tuple[int, int] | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    format: str = "pack-quantized",
    symmetric: bool | None = None,
    code_bits: int = 4,
) -> GroupedCodes:
    """Codes of a pack-quantized layer; arguments and errors as of `w4a16.read_compressed_tensors`. code_bits: what the
    caller reads, 4 or 8."""
    import torch

    if format != "pack-quantized":
        raise ArgumentError("format", format, "must be 'pack-quantized'", "export the model again with that format")
    check_bits(bits, wanted=code_bits)
    each, zero = 32 // code_bits, 1 << code_bits - 1
    check_float("weight_scale", weight_scale, "[N, G]")
    n, groups = weight_scale.shape
    columns = check_words("weight_packed", weight_packed, (n, None))[1]
    shape = (n, columns * each) if weight_shape is None else check_weight_shape(weight_shape, n)
    if columns != -(-shape[1] // each):
        check_bits(columns * 32 / shape[1], "weight_shape", code_bits)
    zeros = None
    if weight_zero_point is not None:
        check_plain("weight_zero_point", weight_zero_point)
        if getattr(weight_zero_point, "dtype", None) == torch.int8:
            if tuple(weight_zero_point.shape) != (n, groups):
                raise shape_error("weight_zero_point", weight_zero_point, f"int8 [{n}, {groups}]")
            zeros = weight_zero_point.to(torch.int16) + zero
        else:
            check_words("weight_zero_point", weight_zero_point, (-(-n // each), groups))
            zeros = codes_of(weight_zero_point.T, code_bits)[:, :n].T
    elif symmetric is False:
        raise ArgumentError(
            "weight_zero_point",
            None,
            "an asymmetric layer needs its zero points",
            "add the layer's weight_zero_point tensor",
        )
    if symmetric and zeros is not None and not bool((zeros == zero).all()):
        raise ArgumentError(
            "symmetric",
            True,
            "the config says so, but the layer has other zero points",
            "pass symmetric=None to believe the tensors",
        )
    if weight_g_idx is not None:
        check_index("weight_g_idx", weight_g_idx)
        weight_g_idx = None if bool((weight_g_idx == -1).all()) else weight_g_idx
    codes = codes_of(weight_packed, code_bits)[:, : shape[1]]
    with weights.renamed(scales="weight_scale", zeros="weight_zero_point", g_idx="weight_g_idx"):
        return by_index(codes, weight_scale, zeros, weight_g_idx, bias, group_size, None, code_bits)


def check_weight_shape(shape: torch.Tensor | tuple[int, int], n: int) -> tuple[int, int]:
    """(N, K) of a compressed-tensors layer, as integers."""
    try:
        found = tuple(int(size) for size in shape)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or len(found) != 2 or found[0] != n or found[1] < 1:
        raise ArgumentError(
            "weight_shape",
            found or shape,
            f"must be (N, K) with N = {n} scale rows",
            "pass the layer's weight_shape tensor",
        )
    return found


def unpack(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape: torch.Tensor | tuple[int, int] | None = None,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    format: str | None = None,
    symmetric: bool | None = None,
    code_bits: int = 4,
) -> GroupedCodes:
    """Codes of an int-quantized or pack-quantized layer, with free scales; arguments and errors as of
    `w4a8.read_compressed_tensors`. code_bits: what the caller reads, 4 or 8."""
    import torch

    known = {torch.int8: "int-quantized", torch.int32: "pack-quantized"}
    stored = known.get(getattr(weight, "dtype", None))
    if stored is None or format not in (None, stored):
        seen = weights.dtype_name(weight) if hasattr(weight, "dtype") else type(weight).__name__
        raise ArgumentError(
            "format",
            format,
            f"int-quantized stores int8 [N, K], pack-quantized int32 [N, K/{32 // code_bits}]; the weight is {seen}",
            "pass the layer's weight or weight_packed tensor",
        )
    check_plain("weight", weight)
    if stored == "pack-quantized":
        facts = dict(bias=bias, group_size=group_size, symmetric=symmetric, bits=code_bits, code_bits=code_bits)
        with weights.renamed(weight_packed="weight"):
            return unpack_packed(weight, weight_scale, weight_zero_point, weight_shape, **facts)
    check_int8("weight", weight, (None, None))
    zero, kind = 1 << code_bits - 1, of_bits(code_bits)
    if (value := weights.out_of_range(weight, -zero, zero - 1)) is not None:
        raise ArgumentError("weight", value, "must be in -8..7", "an 8-bit weight has no 4-bit form")
    if weight_shape is not None and check_weight_shape(weight_shape, weight.shape[0]) != tuple(weight.shape):
        constraint = f"must be that of the weight, {list(weight.shape)}"
        raise ArgumentError("weight_shape", tuple(map(int, weight_shape)), constraint, "leave it out")
    zeros = weight_zero_point
    if zeros is not None:
        check_plain("weight_zero_point", zeros)
        if not isinstance(zeros, torch.Tensor) or not weights.is_integer(zeros):
            constraint = "must be a tensor, int8 [N, G]"
            raise ArgumentError("weight_zero_point", weights.described(zeros), constraint, "add the layer's tensor")
        zeros = zeros.to(torch.int16) + zero
    codes = weight.to(torch.int16) + zero
    with weights.renamed(codes="weight", scales="weight_scale", zeros="weight_zero_point"):
        source = kind.canonical(codes, weight_scale, zeros, group_size=group_size, bias=bias)
    if symmetric and source.zeros is not None:
        raise ArgumentError("symmetric", True, "the layer has zero points", "pass symmetric=None")
    return source


def without_static(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a layer whose activations are not static; ArgumentError for another one."""
    for name in ("input_scale", "input_zero_point"):
        if name in tensors:
            constraint = "the layer's activations are static 8-bit integers, which only W8A8 multiplies"
            raise ArgumentError(name, weights.described(tensors[name]), constraint, "load it with w8a8")
    return dict(tensors)


def arguments(tensors: dict[str, torch.Tensor], config: LayerConfig) -> dict[str, Any]:
    """What `unpack` takes, from the tensors of a layer and what its config states.

    Raises:
        ArgumentError: other bits than 4, or channels that are grouped in another order (actorder "group").
    """
    check_bits(config.bits)
    found = without_static(tensors)
    order = found.pop("weight_g_idx", None)
    if order is not None:
        check_index("weight_g_idx", order)
    if config.desc_act or (order is not None and bool((order != -1).any())):
        constraint = "channels are grouped in another order (actorder 'group'), which only W4A16 serves"
        raise ArgumentError("weight_g_idx", weights.described(order), constraint, "load it with w4a16")
    if "weight_packed" in found:
        found["weight"] = found.pop("weight_packed")
    facts = {"group_size": config.group_size, "format": config.version, "symmetric": config.symmetric}
    return found | facts

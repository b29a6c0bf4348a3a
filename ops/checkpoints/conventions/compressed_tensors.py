"""compressed-tensors (llm-compressor): packed words of pack-quantized, and how its configs state layers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import fields
from terrazzo.ops.checkpoints.conventions import auto_round
from terrazzo.ops.checkpoints.conventions.base import GROUP, WORD, Convention, LayerConfig, Leaf, Method, Tensors
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
    words_of,
)
from terrazzo.ops.products import converted, wide
from terrazzo.ops.weight_only.byte_integers import of_bits
from terrazzo.ops.weight_only.integers import QuantizedWeight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import JSON, Stated
    from terrazzo.ops.products.product import Product
    from terrazzo.ops.weight.base import AnyCanonical

PACKED = "write a packed folder (--write packed)"


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
) -> QuantizedWeight:
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
        constraint = "an asymmetric layer needs its zero points"
        raise ArgumentError("weight_zero_point", None, constraint, "add the layer's weight_zero_point tensor")
    if symmetric and zeros is not None and not bool((zeros == zero).all()):
        constraint = "the config says so, but the layer has other zero points"
        raise ArgumentError("symmetric", True, constraint, "pass symmetric=None to believe the tensors")
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
        constraint = f"must be (N, K) with N = {n} scale rows"
        raise ArgumentError("weight_shape", found or shape, constraint, "pass the layer's weight_shape tensor")
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
) -> QuantizedWeight:
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


def unpack_bytes(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape: torch.Tensor | tuple[int, int] | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bits: int = 8,
    format: str | None = None,
    **facts: Any,
) -> QuantizedWeight:
    """Codes of 8 bits; arguments and errors as of `w8a16.read_compressed_tensors`."""
    import torch

    if isinstance(weight_scale, torch.Tensor) and weight_scale.ndim < 2 and getattr(weight, "ndim", 0) == 2:
        if weight_scale.numel() in (1, len(weight)):
            weight_scale = weight_scale.reshape(-1, 1).expand(len(weight), 1)
        if isinstance(weight_zero_point, torch.Tensor) and weight_zero_point.numel() == 1:
            weight_zero_point = weight_zero_point.reshape(1, 1).expand(len(weight), 1)
    tensors = weight, weight_scale, weight_zero_point, weight_shape
    if getattr(weight, "dtype", None) != torch.int8:
        own = dict(bits=bits, format=format or "pack-quantized", code_bits=8)
        return unpack_packed(*tensors, weight_g_idx, **own, **facts)
    if weight_g_idx is not None:
        constraint = "is of pack-quantized layers alone"
        raise ArgumentError("weight_g_idx", "given", constraint, "leave it out, or pass weight_packed")
    return unpack(*tensors, format=format, code_bits=8, **facts)


def read(tensors: Tensors, config: LayerConfig, product: Product, **options: Any) -> QuantizedWeight:
    """Codes of a layer, packed or not.

    Raises:
        ArgumentError: besides those of tensors: static activations or channels that are grouped in another order
            (actorder "group") that the product does not follow, or whose order is missing.
    """
    static, given, order = ("input_scale", "input_zero_point"), dict(tensors), tensors.get("weight_g_idx")
    facts = {"group_size": config.group_size, "symmetric": config.symmetric, "format": config.version}
    if not product.wide:
        check_bits(config.bits)
        for name in static:
            if name in tensors:
                constraint = "the layer's activations are static 8-bit integers, which only W8A8 multiplies"
                raise ArgumentError(name, weights.described(tensors[name]), constraint, "load it with w8a8")
        if given.pop("weight_g_idx", None) is not None:
            check_index("weight_g_idx", order)
        if config.desc_act or (order is not None and bool((order != -1).any())):
            constraint = "channels are grouped in another order (actorder 'group'), which only W4A16 serves"
            raise ArgumentError("weight_g_idx", weights.described(order), constraint, "load it with w4a16")
    elif config.desc_act and order is None and tensors["weight_scale"].shape[-1:] != (1,):
        constraint = "the config states actorder by groups, which needs the group of each channel"
        raise ArgumentError("weight_g_idx", None, constraint, "add the layer's weight_g_idx tensor")
    if product.wide and product.codes.bits == 4:
        return unpack_packed(**given, **facts | dict(bits=config.bits, format=config.version or "pack-quantized"))
    for name in static:  # of x in 8 bits: not read, x stays in 16
        given.pop(name, None)
    if "weight_packed" in given:
        given["weight"] = given.pop("weight_packed")
    return (unpack_bytes if product.wide else unpack)(**given, **facts)


def _write(weight: AnyCanonical, block: bool) -> Tensors:
    """pack-quantized: codes of integers with zero points or, signed, without."""
    import torch

    bits = weight._product.codes.bits
    each_group(weight)
    if weight.codes.dtype == torch.int8:  # factors of a row's power of two, whose product is exact
        scales, zeros = weight.scales.float() * weight.channel_scales[:, None], None
        codes = (weight.codes + (1 << bits - 1)).to(torch.uint8)
    else:
        codes, scales, zeros = weight.codes, weight.scales, weight.zeros
    made = {"weight_packed": words_of(codes, bits), "weight_scale": scales}
    made["weight_shape"] = torch.tensor([weight.n, weight.k], dtype=torch.int64)
    if zeros is not None:
        made["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    return made


def each_group(weight: AnyCanonical) -> None:
    """Raise ArgumentError for a weight with something that compressed-tensors' layers lack, or a short last group."""
    import torch

    for name in ("perm", "smooth"):
        if torch.is_tensor(getattr(weight, name, None)):
            constraint = "belongs to the weight, and layers of compressed-tensors have none"
            raise ArgumentError(name, weights.described(getattr(weight, name)), constraint, PACKED)
    if weight.k % weight.group_size:
        constraint = f"K = {weight.k} is no multiple of it, which layers of compressed-tensors need"
        raise ArgumentError("group_size", weight.group_size, constraint, f"name a smaller group, or {PACKED}")


CONVENTION = Convention(
    "compressed_tensors",
    (
        Leaf("weight_packed", n=(0, 1), k=(1, WORD)),
        Leaf("weight_scale", n=(0, 1), k=(1, GROUP)),
        Leaf("weight_zero_point", n=(0, WORD), k=(1, GROUP), optional=True),
        Leaf("weight_shape", optional=True),
        Leaf("weight_g_idx", k=(0, 1), optional=True),
    ),
    read=read,
    formats=("compressed_tensors",),
    versioned=True,
    writes=(wide.W4A16, wide.W8A16, converted.W4A8_FP8),
    write=_write,
    published="pack-quantized",
)

_PRESET = re.compile(r"(?:W(?P<weights>[2-8])A(?P<acts>4|8|16|FP8)(?P<asym>_ASYM)?|INT8|(?P<float>(?:NV|MX)?FP\w+))")
_FLOAT_PRESETS = {
    "FP8": {"num_bits": 8, "strategy": "tensor"},
    "FP8_DYNAMIC": {"num_bits": 8, "strategy": "channel"},
    "FP8_BLOCK": {"num_bits": 8, "strategy": "block"},
    "MXFP4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "MXFP4A16": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "NVFP4": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    "NVFP4A16": {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
}


def _layer(raw: Stated, name: str) -> LayerConfig:
    ignored = [entry for entry in fields.names_of(raw, "ignore") if fields.names(entry, name)]
    if ignored:
        return LayerConfig("compressed_tensors", skip=f"ignore lists {ignored[0]!r}", excluded=True)
    groups = [_group(key, value) for key, value in (raw.get("config_groups") or {}).items()]
    places = [(target, at) for at, group in enumerate(groups) for target in fields.names_of(group, "targets")]
    found = [(target.startswith("re:"), target, at) for target, at in places if fields.names(target, name)]
    found = found or [(False, target, at) for target, at in places if target == "Linear"]
    if found:  # in the writer's order: names, then patterns by their letters, then the module's class
        return _scheme(groups[min(found)[2]], raw.get("format"))
    skip = "no config group targets it" if groups else ""
    return LayerConfig("compressed_tensors", skip=skip, excluded=bool(skip))


def _group(key: str, value: JSON) -> Stated:
    """A config group; a list of targets stands for the preset that its key names."""
    if isinstance(value, (list, str)):
        preset = _PRESET.fullmatch(key.upper())
        if preset is None:
            return {"targets": value, "preset": key}
        if preset["float"]:
            stated = _FLOAT_PRESETS.get(preset["float"], {"num_bits": None})
            return {"targets": value, "weights": {"type": "float", **stated}}
        bits, acts = int(preset["weights"] or 8), preset["acts"] or "8"
        stated = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128}
        stated |= {"symmetric": not preset["asym"]}
        if not preset["weights"] or (bits, acts) == (8, "8"):
            stated |= {"strategy": "channel", "group_size": None}
        x = {"num_bits": 8 if acts == "FP8" else int(acts), "type": "float" if acts == "FP8" else "int"}
        x |= {"strategy": "token", "dynamic": True, "symmetric": True}
        return {"targets": value, "weights": stated, "input_activations": None if acts == "16" else x}
    if not isinstance(value, dict):
        raise fields.bad("config_groups", value, "must be objects, or lists of targets under a preset's name,")
    return value


_GROUP_FIELDS = {"targets", "weights", "input_activations", "output_activations", "format", "preset"}
_WEIGHT_FIELDS = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "block_structure", "dynamic", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
}  # fmt: skip


def _scheme(group: Stated, format: str | None) -> LayerConfig:
    """One group of compressed-tensors' config_groups."""
    skipped = lambda reason: LayerConfig("compressed_tensors", skip=reason)
    stated, acts = (group.get(part) or {} for part in ("weights", "input_activations"))
    if not isinstance(stated, dict) or not isinstance(acts, dict):
        raise fields.bad("config_groups", group, "weights and input_activations must be objects")
    if group.get("preset"):
        return skipped(f"config_groups: no preset {group['preset'][:80]!r} is known here")
    extra = [key for key in group if group[key] and key not in _GROUP_FIELDS]
    extra += [key for key in stated if stated[key] and key not in _WEIGHT_FIELDS]
    if extra:
        return skipped(f"config_groups: the field {extra[0][:80]!r} is not known here: it may change the layer")
    if stated.get("type", "int") == "float" and (found := _small_floats(stated, group, format)):
        return found
    if stated.get("type", "int") != "int":
        return skipped(f"weights are of type {fields.shown(stated['type'])}, not int")
    activations = _activations(acts, fields.whole(stated, "num_bits", 4) == 8)
    if activations is None and fields.whole(stated, "num_bits", 4) == 8:
        activations = "other"
    if activations is None:
        return skipped(
            f"activations are quantized too ({fields.shown(acts.get('num_bits'))}-bit {fields.shown(acts.get('type'))})"
        )
    if group.get("output_activations"):
        return skipped("the layer's output is quantized too (output_activations)")
    strategy = stated.get("strategy")
    if strategy not in (None, "group", "channel", *(["tensor"] if fields.whole(stated, "num_bits", 4) == 8 else [])):
        return skipped(f"weights have scales of strategy {fields.shown(strategy)}, not group or channel")
    if stated.get("dynamic"):
        return skipped("weights are quantized dynamically, at run time")
    order = stated.get("actorder")
    layout = fields.text(group, "format") or (None if format == "mixed-precision" else format)
    return LayerConfig(
        "compressed_tensors",
        fields.whole(stated, "num_bits", 4),
        -1 if strategy in ("channel", "tensor") else fields.whole(stated, "group_size"),
        layout,
        fields.flag(stated, "symmetric"),
        True if order is True or order in ("group", "dynamic") else None,
        activations,
    )


def _small_floats(stated: Stated, group: Stated, format: str | None) -> LayerConfig | None:
    """Weights of float-quantized, mxfp4- and nvfp4-pack-quantized; None of others, which are refused."""
    bits, strategy, size = fields.whole(stated, "num_bits"), stated.get("strategy"), fields.whole(stated, "group_size")
    if bits == 8 and strategy == "block" and stated.get("block_structure") not in (None, [128, 128], "128x128"):
        return None
    known = bits == 8 and strategy in (None, "tensor", "channel", "block")
    nvfp4 = bits == 4 and strategy in ("tensor_group", "group") and size == 16
    if stated.get("dynamic") or not (known or nvfp4 or (bits, strategy, size) == (4, "group", 32)):
        return None
    size = size if bits == 4 else 128 if strategy == "block" else -1
    usual = f"{'nvfp4' if nvfp4 else 'mxfp4'}-pack-quantized" if bits == 4 else "float-quantized"
    layout = fields.text(group, "format") or (usual if format in (None, "mixed-precision") else format)
    if bits == 4 and layout != usual:
        return None
    symmetric, inputs = fields.flag(stated, "symmetric"), _float_inputs(group.get("input_activations") or {}, strategy)
    return LayerConfig("compressed_tensors", bits, size, layout, symmetric, activations="", inputs=inputs)


def _float_inputs(acts: Stated, weights: str | None) -> str:
    """What W8A8 makes of activations beside weights of a strategy: a static scale of all tokens or a scale of each, or
    beside blocks one of 128 channels of a token; "other" of what it has no kernel for."""
    if not acts:
        return ""
    if acts.get("num_bits") != 8 or acts.get("type") != "float" or acts.get("symmetric", True) is not True:
        return "other"
    strategy, dynamic = acts.get("strategy"), acts.get("dynamic") or False
    if weights == "block":
        return "e4m3" if dynamic is True and (strategy, acts.get("group_size")) == ("group", 128) else "other"
    if dynamic is True and strategy in (None, "token"):
        return "e4m3"
    return "e4m3 static" if dynamic is False and strategy in (None, "tensor") else "other"


def _activations(acts: Stated, bytes_: bool = False) -> str | None:
    """ "int8" or "e4m3" of activations quantized for each token, "" of none, None of what no kernel here does. Those of
    8-bit weights may also be static, and have zero points."""
    if not acts:
        return ""
    if bytes_ and acts.get("num_bits") == 8 and acts.get("type", "int") == "int":
        static = acts.get("dynamic") is not True
        if acts.get("strategy") in ((None, "tensor") if static else (None, "token")):
            return "int8" + " static" * static + " asymmetric" * (acts.get("symmetric", True) is False)
    plain = acts.get("num_bits") == 8 and acts.get("dynamic") is True and acts.get("symmetric", True) is True
    if not plain or acts.get("strategy") not in (None, "token"):
        return None
    kind = acts.get("type", "int")
    return "int8" if kind == "int" else "e4m3" if kind == "float" else None


def in_blocks(product: Product, group_size: int | None) -> bool:
    """Whether scales are those of blocks of 128 x 128."""
    return bool(product.codes.values) and group_size == 128


_SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}


def scheme_of(product: Product, group_size: int | None, symmetric: bool, format: str) -> Stated:
    """The config group of linear layers of a product, which `_layer` reads as that: what a folder states, and what
    llm-compressor is asked for.

    Args:
        group_size: input features of a scale, None for one of each row. symmetric: whether there are no zero points.
        format: `Convention.published` of its layers.
    """
    codes, blocks = product.codes, in_blocks(product, group_size)
    strategy = "block" if blocks else "channel" if group_size is None else "group"
    stated: Stated = {"num_bits": codes.bits, "type": "float" if codes.values else "int", "dynamic": False}
    stated |= {"symmetric": symmetric or not codes.symmetric, "strategy": strategy, "group_size": group_size}
    if blocks:
        stated |= {"group_size": None, "block_structure": [128, 128]}
    if codes.scales == ("e4m3",):
        stated["strategy"] = "tensor_group"
    if (kept := _SCALE_DTYPES.get(codes.scales[0])) is not None:
        stated |= {"scale_dtype": kept, "zp_dtype": kept}
    x: Stated | None = None
    if product.x.quant is not None:
        x = {"num_bits": 8, "type": "float" if product.x.quant == "e4m3" else "int", "dynamic": True}
        x |= {"symmetric": True, "strategy": "token"} | ({"strategy": "group", "group_size": 128} if blocks else {})
    return {"targets": ["Linear"], "weights": stated, "input_activations": x, "format": format}


METHOD = Method(
    "compressed-tensors",
    _layer,
    read="quant_method config_groups format ignore",
    neutral=f"{auto_round.WRITTEN} compression_ratio dequantize global_compression_ratio kv_cache_scheme "
    "moe_sparsity_config quantization_status producer run_compressed use_optimized_inference version",
)

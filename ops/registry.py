"""Which operators exist, for which formats and targets, and how far each has been tried.

`terrazzo ops` and the README print it.
A new operator, format or target is one more value in `REGISTRY`; CONTRIBUTING.md lists what else it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import CAPABILITIES
from terrazzo.ops.products import converted, direct, mixed, wide
from terrazzo.ops.products.codes import HALVES
from terrazzo.ops.products.product import Product

__all__ = [
    "REGISTRY",
    "STATUS",
    "Support",
    "rows",
]


def __dir__() -> list[str]:
    return sorted(__all__)


STATUS = {
    "tested": "runs on this GPU; the three oracles hold on it",
    "ptx-tested": "its PTX passes the same tests, compiled by the driver for a newer GPU",
    "compiled": "compiles, and its machine code is checked; not run, or not by all tests",
}
"""Status of an operator on a target -> what it promises."""


@dataclass(frozen=True)
class Support:
    """One operator reading one format.

    Attributes:
        operator: name under terrazzo.ops, "w4a16".
        format: checkpoint format, or "rtn" for what quantize() makes; attention: how keys or values are stored.
        source: public function that reads it, "terrazzo.ops.w4a16.from_awq".
        groups: group sizes of the weight; "K" is one group over all input channels. Attention: what shares a scale.
        zeros: "asymmetric", "symmetric" or both.
        activations: dtypes of x and y.
        scales: dtypes of the weight's scales.
        numerics: what the operator's `numerics` argument takes besides "auto"; w4a8: `dequantization`, w8a8:
            `accumulate`, w4ax: `granularity` of the activations' scales.
        targets: architecture -> a key of STATUS.
        notes: what else a reader needs to know.
    """

    operator: str
    format: str
    source: str
    groups: tuple[int | str, ...]
    zeros: tuple[str, ...]
    activations: tuple[str, ...]
    scales: tuple[str, ...]
    numerics: tuple[str, ...]
    targets: dict[str, str] = field(hash=False)
    notes: str = ""


def _targets(sm_80: str = "ptx-tested") -> dict[str, str]:
    """Architecture -> status of what `mma.sync` and plain instructions serve everywhere, and wgmma on sm_90a."""
    ran = {"sm_80": sm_80, "sm_90a": "tested"}
    return {arch: ran.get(arch, "compiled") for arch in CAPABILITIES}


def _linear(
    product: Product, format: str, source: str, notes: str, zeros: tuple[str, ...] = (), numerics: tuple[str, ...] = ()
) -> Support:
    """zeros: other than those of the product's codes. numerics: more than the product's."""
    codes = product.codes
    return Support(
        operator=product.root,
        format=format,
        source=f"terrazzo.ops.{product.module}.{source}",
        groups=(*codes.groups, *["K"] * codes.one_group),
        zeros=zeros or ("asymmetric", "symmetric")[not codes.symmetric :],
        activations=(*[product.x.code] * (not product.wide), *HALVES),
        scales=codes.scales,
        numerics=(*product.numerics, *numerics),
        targets=product.targets,
        notes=notes,
    )


def _attention(format: str, group: int | str, zeros: str, scales: str, notes: str) -> Support:
    return Support(
        operator="attention",
        format=format,
        source="terrazzo.ops.attention.pack_cache",
        groups=(group,),
        zeros=(zeros,),
        activations=("float16", "bfloat16"),
        scales=(scales,),
        numerics=(),
        targets=_targets(),
        notes=notes,
    )


def _rows(operator: str, name: str, zeros: str, numerics: tuple[str, ...], notes: str) -> Support:
    return Support(
        operator=operator,
        format=name,
        source=f"terrazzo.ops.{operator}.{name}",
        groups=("token", 128) if zeros == "symmetric" else ("none",),
        zeros=(zeros,),
        activations=("float16", "bfloat16"),
        scales=("float32",) if zeros == "symmetric" else ("none",),
        numerics=numerics,
        targets=_targets(sm_80="compiled"),
        notes=notes,
    )


_ROWS_NUMERICS = ("fused", "model")


def _channel(bits: int, group: int) -> Support:
    note = "keys, one scale for each dimension of a group of tokens (BitDecoding, KIVI)"
    return _attention(f"int{bits}_channel{group}", group, "asymmetric", "float16", note)


REGISTRY: tuple[Support, ...] = (
    _linear(wide.W4A16, "awq", "from_awq", "version gemm; auto-round's auto_awq"),
    _linear(
        wide.W4A16,
        "gptq",
        "from_gptq",
        "4 bits, or 2 packed in 4; v1: zero points stored minus one; act-order; auto-round's auto_gptq",
    ),
    _linear(wide.W4A16, "gptq_v2", "from_gptq", "4 bits, or 2 packed in 4; act-order; auto-round's own"),
    _linear(wide.W4A16, "compressed_tensors", "from_compressed_tensors", "pack-quantized; actorder"),
    _linear(wide.W4A16, "rtn", "quantize", "float weight, round to nearest with searched clipping"),
    _linear(
        wide.W8A16, "gptq", "from_gptq", "8 bits; v1: zero points stored minus one; act-order; auto-round's auto_gptq"
    ),
    _linear(wide.W8A16, "gptq_v2", "from_gptq", "8 bits; act-order; auto-round's own"),
    _linear(
        wide.W8A16,
        "compressed_tensors",
        "from_compressed_tensors",
        "8 bits; pack-quantized, and int-quantized with x in 16 bits",
    ),
    _linear(wide.W8A16, "rtn", "quantize", "float weight, round to nearest"),
    _linear(wide.MXFP4, "gpt_oss", "from_gpt_oss", "experts; gate and up rows interleaved or not"),
    _linear(wide.MXFP4, "compressed_tensors", "from_compressed_tensors", "mxfp4-pack-quantized"),
    _linear(wide.MXFP4, "rtn", "quantize", "float weight, round to nearest, the better of two powers of two"),
    _linear(wide.NVFP4, "modelopt", "from_modelopt", "NVFP4 and W4A16_NVFP4: weight_scale_2"),
    _linear(wide.NVFP4, "compressed_tensors", "from_compressed_tensors", "nvfp4-pack-quantized"),
    _linear(wide.NVFP4, "rtn", "quantize", "float weight, round to nearest"),
    _linear(wide.NF4, "bitsandbytes", "from_bitsandbytes", "4 bits, blocks of 64, absmax quantized in its turn or not"),
    _linear(wide.NF4, "rtn", "quantize", "float weight, the nearest of the codebook"),
    _linear(wide.FP8, "compressed_tensors", "from_checkpoint", "float-quantized: tensor, channel or block scales"),
    _linear(wide.FP8, "fp8", "from_checkpoint", "quant_method fp8 and fbgemm_fp8: weight_scale, weight_scale_inv"),
    _linear(wide.FP8, "rtn", "quantize", "float weight, scales of the tensor, of rows or of blocks"),
    _linear(converted.W4A8, "qserve", "from_qserve", "per group and per channel, exact", zeros=("asymmetric",)),
    _linear(
        converted.W4A8,
        "compressed_tensors",
        "from_compressed_tensors",
        "int-quantized and pack-quantized; free group scales only with requantize=True",
        zeros=("asymmetric", "symmetric"),
    ),
    _linear(converted.W4A8, "rtn", "quantize", "float weight, two levels; smooth vectors", zeros=("asymmetric",)),
    _linear(
        converted.W4A8_FP8,
        "compressed_tensors_e4m3",
        "from_compressed_tensors",
        "pack-quantized and int-quantized, exact",
    ),
    _linear(converted.W4A8_FP8, "rtn_e4m3", "quantize", "float weight, searched scales; smooth vectors"),
    _linear(converted.MXFP4_FP8, "gpt_oss", "from_gpt_oss", "experts; gate and up rows interleaved or not"),
    _linear(converted.MXFP4_FP8, "compressed_tensors", "from_compressed_tensors", "mxfp4-pack-quantized, exact"),
    _linear(converted.MXFP4_FP8, "rtn", "quantize", "float weight, round to nearest, the better of two powers of two"),
    _linear(converted.MXFP4_MXFP8, "gpt_oss", "from_gpt_oss", "experts; gate and up rows interleaved or not"),
    _linear(converted.MXFP4_MXFP8, "compressed_tensors", "from_compressed_tensors", "mxfp4-pack-quantized, exact"),
    _linear(converted.MXFP4_MXFP8, "rtn", "quantize", "float weight; x with a power of two for each 32 channels"),
    _linear(
        direct.W8A8,
        "rtn",
        "quantize",
        "float weight, load_layer of int-quantized; x by token or static, with zero points or without",
    ),
    _linear(
        direct.W8A8_FP8,
        "rtn_e4m3",
        "quantize",
        "float weight, load_layer of fp8 files; x by token, static, or by 128 columns in blocks",
    ),
    _linear(
        mixed.W4AX,
        "rtn",
        "quantize",
        "float weight, searched clipping; two-level scales, or one for each block; FMPQ blocks of INT4 and INT8 "
        "activations; sm_90a: emulated on int8",
        numerics=("token", "static"),
    ),
    _attention("float16", "none", "none", "none", "keys and values"),
    _attention("bfloat16", "none", "none", "none", "keys and values"),
    _attention("int8", "token", "asymmetric", "float16", "keys and values (TurboMind)"),
    _attention("int4", "token", "asymmetric", "float16", "keys and values (TurboMind; BitDecoding)"),
    _attention("int2", "token", "asymmetric", "float16", "keys and values (BitDecoding, KIVI)"),
    _attention("int4_hadamard", "token", "asymmetric", "float16", "keys and values, rotated (QuaRot)"),
    _attention("int2_hadamard", "token", "asymmetric", "float16", "keys and values, rotated (QuaRot), clipped"),
    *(_channel(bits, group) for bits in (4, 2) for group in (32, 64, 128)),
    _attention(
        "int8_static", "static", "symmetric", "float32", "keys and values, a scale for each dimension (LiquidServe)"
    ),
    _attention("fp8", "static", "symmetric", "float32", "keys and values, e4m3, scaled by dimension"),
    _rows("norm", "rms_norm", "symmetric", _ROWS_NUMERICS, "RMSNorm as it is, or as int8 or e4m3 codes"),
    _rows("norm", "fused_add_rms_norm", "symmetric", _ROWS_NUMERICS, "residual sum in front; Gemma's sandwich"),
    _rows("activation", "act_and_mul", "symmetric", _ROWS_NUMERICS, "SiLU, GELU and gpt-oss's SwiGLU times up"),
    _rows("rope", "apply_rope", "none", _ROWS_NUMERICS, "q and k of a joined product; RMSNorm over heads in front"),
)
"""Every operator with every format that it reads; `rows` flattens it."""


def rows(operator: str | None = None, target: str | None = None) -> list[dict[str, object]]:
    """The registry as plain dictionaries of str and list of str: one row for each operator, format and target.

    Args:
        operator, target: keep only these.

    Raises:
        ArgumentError: an operator or target that no entry names.
    """
    for argument, value, known in (
        ("operator", operator, {s.operator for s in REGISTRY}),
        ("target", target, {arch for s in REGISTRY for arch in s.targets}),
    ):
        if value is not None and value not in known:
            raise ArgumentError(argument, value, f"must be one of {sorted(known)}", "see `terrazzo ops`")
    return [
        {
            "operator": s.operator,
            "format": s.format,
            "target": arch,
            "status": status,
            "groups": [str(group) for group in s.groups],
            "zeros": list(s.zeros),
            "activations": list(s.activations),
            "scales": list(s.scales),
            "numerics": list(s.numerics),
            "source": s.source,
            "notes": s.notes,
        }
        for s in REGISTRY
        for arch, status in s.targets.items()
        if operator in (None, s.operator) and target in (None, arch)
    ]

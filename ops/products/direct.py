"""Products of bytes by bytes, which are operands as they are: int8 by rows, e4m3 by rows or by blocks."""

from __future__ import annotations

from terrazzo.ops.products import codes, planes
from terrazzo.ops.products.product import ON_HOPPER, Product, programs
from terrazzo.ops.products.ways import E4M3, INT8

_FACTS = ("codes", "block", "input_scale", "input_zero", "asymmetric", "ue8m0")
_UNKNOWN = "no model of the table's has it"

W8A8 = Product(
    record="w8a8",
    codes=codes.S8,
    x=INT8,
    layout="w8a8",
    programs=programs("linear.bytes", INT8, ("", "")),
    planes=planes.ROWS,
    facts=_FACTS,
    version="terrazzo.w8a8/1",
    conventions={"int_quantized": 8},
    stated=("", "int8", "int8 static", "int8 asymmetric", "int8 static asymmetric"),
    ran=ON_HOPPER,
    wheel=_UNKNOWN,
)
W8A8_FP8 = Product(
    record="w8a8_fp8",
    word="w8a8-e4m3",
    module="w8a8",
    kernels="w8a8",
    codes=codes.E4M3,
    x=E4M3,
    layout="w8a8",
    programs=programs("linear.bytes", E4M3, ("", ""), {"block": ("stream_k", "direct_tokens")}),
    planes=planes.BLOCKS,
    facts=_FACTS,
    version="terrazzo.w8a8/1",
    conventions={"fp8": 8},
    ran=ON_HOPPER,
    wheel=_UNKNOWN,
    instead="multiply 16-bit activations there: terrazzo.ops.fp8 packs the same codes as weight-only",
)

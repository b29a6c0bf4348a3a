"""Products of 4-bit codes that become bytes: activations in int8 or e4m3."""

from __future__ import annotations

from terrazzo.ops.products import codes, planes
from terrazzo.ops.products.product import EVERYWHERE, ON_HOPPER, Product, programs
from terrazzo.ops.products.ways import E4M3, INT8, MXFP8

W4A8 = Product(
    record="w4a8",
    codes=codes.U4_LQQ,
    x=INT8,
    layout="w4a8_wgmma",
    programs=programs("linear.bytes", INT8, ("small_batch", "small_batch")),
    planes=planes.UNITS,
    facts=("group_size",),
    version="terrazzo.w4a8/1",
    conventions={"qserve": 4, "compressed_tensors": 4, "int_quantized": 4},
    stated=("int8", ""),
    calibration="smooth",
    ran=EVERYWHERE,
)
W4A8_FP8 = Product(
    record="w4a8_fp8",
    word="w4a8-e4m3",
    module="w4a8.fp8",
    kernels="w4a8",
    codes=codes.Z4,
    x=E4M3,
    layout="w4a8_fp8",
    programs=programs("linear.bytes", E4M3, ("", "small_batch")),
    planes=planes.UNITS,
    facts=("group_size",),
    version="terrazzo.w4a8_fp8/1",
    conventions={"compressed_tensors": 4, "int_quantized": 4},
    stated=("e4m3", ""),
    calibration="importance",
    ran=ON_HOPPER,
    instead="use int8 activations there: terrazzo.ops.w4a8.quantize and gemm",
)
MXFP4_FP8 = Product(
    record="mxfp4_fp8",
    word="mxfp4-e4m3",
    kernels="w4a8",
    codes=codes.MXFP4_UNITS,
    x=E4M3,
    layout="mxfp4_fp8",
    programs=programs("linear.bytes", E4M3, ("", "small_batch")),
    planes=planes.UNITS,
    facts=("group_size",),
    version="terrazzo.mxfp4_fp8/1",
    conventions={"mxfp4": 4},
    on_request=True,
    ran=ON_HOPPER,
    wheel="one model of the table's has it",
    instead="multiply 16-bit activations there: terrazzo.ops.mxfp4 packs the same codes as weight-only",
)
MXFP4_MXFP8 = Product(
    record="mxfp4_mxfp8",
    word="mxfp4-mxfp8",
    kernels="w4a8",
    codes=codes.MXFP4_GROUPS,
    x=MXFP8,
    layout="mxfp4_fp8",
    programs=programs("linear.bytes", MXFP8, ("", "")),
    planes=planes.UNITS,
    facts=("group_size",),
    version="terrazzo.mxfp4_mxfp8/1",
    conventions={"mxfp4": 4},
    on_request=True,
    ran=ON_HOPPER,
    wheel="no model of the table's has it",
    instead="multiply 16-bit activations there: terrazzo.ops.mxfp4 packs the same codes as weight-only",
)

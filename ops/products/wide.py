"""Products whose activations keep 16 bits: integers with scales of any float, small floats with their own scales."""

from __future__ import annotations

from terrazzo.ops.products import codes, planes
from terrazzo.ops.products.product import EVERYWHERE, Product, programs
from terrazzo.ops.products.ways import F16

_INTEGERS = ("group_size", "scale_dtype", "symmetric")
_FLOATS = ("group_size", "weight", "scale_dtype")
_PROGRAMS = programs("linear", F16, ("small_batch", "small_batch"))
_RARE = "one model of the table's has it"

W4A16 = Product(
    record="w4a16",
    codes=codes.U4,
    x=F16,
    layout="w4a16",
    programs=_PROGRAMS,
    planes=planes.ORDERED,
    facts=_INTEGERS,
    version="terrazzo.w4a16/1",
    conventions={"awq": 4, "gptq": 4, "compressed_tensors": 4},
    calibration="importance",
    named=False,
    shaped=(),
    ran=EVERYWHERE,
)
MXFP4 = Product(
    record="mxfp4",
    codes=codes.MXFP4,
    x=F16,
    layout="mxfp4",
    programs=_PROGRAMS,
    planes=planes.RECORDS,
    facts=_FLOATS,
    version="terrazzo.weight_only/1",
    conventions={"mxfp4": 4},
    ran=EVERYWHERE,
    wheel=_RARE,
)
NVFP4 = Product(
    record="nvfp4",
    codes=codes.NVFP4,
    x=F16,
    layout="nvfp4",
    programs=_PROGRAMS,
    planes=planes.RECORDS,
    facts=_FLOATS,
    version="terrazzo.weight_only/1",
    conventions={"nvfp4": 4},
    ran=EVERYWHERE,
    wheel=_RARE,
)
W8A16 = Product(
    record="w8a16",
    codes=codes.U8,
    x=F16,
    layout="w8a16",
    programs=_PROGRAMS,
    planes=planes.ORDERED,
    facts=_INTEGERS,
    version="terrazzo.w8a16/1",
    conventions={"gptq": 8, "compressed_tensors": 8, "int_quantized": 8},
    stated=("", "e4m3", "int8", "int8 static", "int8 asymmetric", "int8 static asymmetric", "other"),
    ran=EVERYWHERE,
    wheel=_RARE,
)
FP8 = Product(
    record="fp8",
    codes=codes.FP8,
    x=F16,
    layout="fp8",
    programs=_PROGRAMS,
    planes=planes.RECORDS,
    facts=_FLOATS,
    version="terrazzo.weight_only/1",
    conventions={"fp8": 8},
    shaped=(3,),  # took 1 %, up to 8 %, others 4 % at most (H100)
    ran=EVERYWHERE,
)
NF4 = Product(
    record="nf4",
    codes=codes.NF4,
    x=F16,
    layout="nf4",
    programs=_PROGRAMS,
    planes=planes.RECORDS,
    facts=_FLOATS,
    version="terrazzo.weight_only/1",
    conventions={"bitsandbytes": 4},
    ran=EVERYWHERE,
    wheel="no model of the table's has it",
)

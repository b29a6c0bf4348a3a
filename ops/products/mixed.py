"""Products whose activations are int4 in some blocks of 128 channels, and int8 in the others."""

from __future__ import annotations

from terrazzo.ops.products import codes, planes
from terrazzo.ops.products.product import EVERYWHERE, Product, Programs
from terrazzo.ops.products.ways import MIXED

_INTEGER = ("terrazzo.ops.linear.mixed.integer:build",)

W4AX = Product(
    record="w4ax",
    codes=codes.S4,
    x=MIXED,
    layout="w4a8_wgmma",
    programs=(
        Programs("mma.s4", (), ("terrazzo.ops.linear.mixed.persistent:build",), layout="w4a4_mma"),
        Programs(
            "wgmma.s8",
            ("terrazzo.ops.linear.mixed.small_batch:build",),
            _INTEGER,
            _INTEGER,
            {"block": ("terrazzo.ops.linear.mixed.stream_k:build",)},
        ),
    ),
    planes=planes.MIXED,
    facts=("blocks8", "order"),
    version="terrazzo.w4ax/2",
    calibration="plan",
    ran=EVERYWHERE,
    wheel="research: its activations are mixed in a layer's own proportion",
)

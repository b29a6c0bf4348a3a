"""Products whose activations are int4 in some blocks of 128 channels, and int8 in the others."""

from __future__ import annotations

from terrazzo.ops.products import codes, planes
from terrazzo.ops.products.product import EVERYWHERE, Product, Programs
from terrazzo.ops.products.ways import MIXED

_INTEGER = ("terrazzo.ops.w4ax.integer:build",)

W4AX = Product(
    record="w4ax",
    codes=codes.S4,
    x=MIXED,
    layout="w4a8_wgmma",
    programs=(
        Programs("mma.s4", (), ("terrazzo.ops.w4ax.persistent:build",), layout="w4a4_mma"),
        Programs(
            "wgmma.s8",
            ("terrazzo.ops.w4ax.small_batch:build",),
            _INTEGER,
            _INTEGER,
            {"block": ("terrazzo.ops.w4ax.stream_k:build",)},
        ),
    ),
    planes=planes.MIXED,
    facts=("blocks8", "order"),
    version="terrazzo.w4ax/2",
    ran=EVERYWHERE,
    wheel="research: its activations are mixed in a layer's own proportion",
)

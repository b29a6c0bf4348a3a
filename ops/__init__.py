"""Operator families and their registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "activation",
    "attention",
    "checkpoints",
    "fp8",
    "moe",
    "mxfp4",
    "mxfp4_fp8",
    "mxfp4_mxfp8",
    "nf4",
    "norm",
    "nvfp4",
    "registry",
    "rope",
    "w4a8",
    "w4a16",
    "w4ax",
    "w8a8",
    "w8a16",
]

if TYPE_CHECKING:
    from terrazzo.ops import (
        activation,
        attention,
        checkpoints,
        fp8,
        moe,
        mxfp4,
        mxfp4_fp8,
        mxfp4_mxfp8,
        nf4,
        norm,
        nvfp4,
        registry,
        rope,
        w4a8,
        w4a16,
        w4ax,
        w8a8,
        w8a16,
    )
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {name: name for name in __all__},
    )

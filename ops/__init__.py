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
        {
            "activation": "activation",
            "attention": "attention",
            "checkpoints": "checkpoints",
            "fp8": "fp8",
            "moe": "moe",
            "mxfp4": "mxfp4",
            "mxfp4_fp8": "mxfp4_fp8",
            "norm": "norm",
            "nvfp4": "nvfp4",
            "registry": "registry",
            "rope": "rope",
            "w4a16": "w4a16",
            "w4a8": "w4a8",
            "w4ax": "w4ax",
            "w8a16": "w8a16",
            "w8a8": "w8a8",
        },
    )

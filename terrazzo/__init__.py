"""Terrazzo: mixed-precision operators for LLM inference, with layouts derived from tensor-core fragments.

    import terrazzo
    w = terrazzo.ops.w4a16.load_layer("model/", "model.layers.0.mlp.down_proj").to("cuda")
    y = terrazzo.ops.w4a16.gemm(x, w)

Names are resolved on first use: importing terrazzo imports neither torch nor tilelang.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "Bundle": "terrazzo.lowering.bundle",
    "KernelRequest": "terrazzo.lowering.request",
    "Target": "terrazzo.lowering.targets",
    "compile_many": "terrazzo.lowering.parallel",
    "environment_report": "terrazzo.lowering.environment",
    "forget": "terrazzo.ops.derived",
    "get_instance": "terrazzo.layouts.instances",
    "load_bundle": "terrazzo.lowering.bundle",
    "write_bundle": "terrazzo.lowering.bundle",
}
_MODULES = {
    "autotune": "terrazzo.autotune",
    "errors": "terrazzo.lowering.errors",
    "layouts": "terrazzo.layouts",
    "lowering": "terrazzo.lowering",
    "nn": "terrazzo.nn",
    "ops": "terrazzo.ops",
    "schedules": "terrazzo.schedules",
}

__all__ = ["__version__", *_HOME, *_MODULES]


def __getattr__(name: str) -> object:
    if name in _HOME:
        value: object = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})

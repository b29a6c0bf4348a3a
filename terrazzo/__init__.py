"""Terrazzo: mixed-precision operators for LLM inference, with layouts derived from tensor-core fragments.

    import terrazzo
    w = terrazzo.ops.w4a16.load_layer("model/", "model.layers.0.mlp.down_proj").to("cuda")
    y = terrazzo.ops.w4a16.gemm(x, w)

Names are resolved on first use: importing terrazzo imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__version__ = "0.2.0"
"""Version of the package, as in pyproject.toml."""

__all__ = [
    "Bundle",
    "KernelRequest",
    "Target",
    "__version__",
    "autotune",
    "compile_many",
    "environment_report",
    "errors",
    "forget",
    "generate",
    "get_instance",
    "layouts",
    "load",
    "load_bundle",
    "lowering",
    "nn",
    "ops",
    "prepare",
    "schedules",
    "write_bundle",
]

if TYPE_CHECKING:
    from terrazzo import autotune, layouts, lowering, nn, ops, schedules
    from terrazzo.layouts.instances import get_instance
    from terrazzo.lowering import errors
    from terrazzo.lowering.bundle import Bundle, load_bundle, write_bundle
    from terrazzo.lowering.environment import environment_report
    from terrazzo.lowering.parallel import compile_many
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.nn.loading import load
    from terrazzo.nn.text import generate
    from terrazzo.ops.derived import forget
    from terrazzo.preparing import prepare
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "autotune": "autotune",
            "layouts": "layouts",
            "layouts.instances": "get_instance",
            "lowering": "lowering",
            "lowering.bundle": "Bundle load_bundle write_bundle",
            "lowering.environment": "environment_report",
            "lowering.errors": "errors",
            "lowering.parallel": "compile_many",
            "lowering.request": "KernelRequest",
            "lowering.targets": "Target",
            "nn": "nn",
            "nn.loading": "load",
            "nn.text": "generate",
            "ops": "ops",
            "ops.derived": "forget",
            "preparing": "prepare",
            "schedules": "schedules",
        },
    )

"""Ground floor: GPU targets, tile program -> CUDA -> cubin, kernel cache, bundles, launch, errors.

Names are resolved on first use; importing this package imports neither torch nor tilelang nor tvm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "CAPABILITIES",
    "TARGET_NAMES",
    "Bundle",
    "Kernel",
    "KernelReport",
    "KernelRequest",
    "Target",
    "cache_root",
    "clear",
    "compile_many",
    "compile_request",
    "environment_report",
    "get_kernel",
    "is_ready",
    "list_entries",
    "load_bundle",
    "verify",
    "write_bundle",
]

if TYPE_CHECKING:
    from terrazzo.lowering.bundle import Bundle, load_bundle, write_bundle
    from terrazzo.lowering.cache import cache_root, clear, list_entries, verify
    from terrazzo.lowering.environment import environment_report
    from terrazzo.lowering.kernels import compile_request, get_kernel, is_ready
    from terrazzo.lowering.parallel import compile_many
    from terrazzo.lowering.report import KernelReport
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.runtime import Kernel
    from terrazzo.lowering.targets import CAPABILITIES, TARGET_NAMES, Target
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "bundle": "Bundle load_bundle write_bundle",
            "cache": "cache_root clear list_entries verify",
            "environment": "environment_report",
            "kernels": "compile_request get_kernel is_ready",
            "parallel": "compile_many",
            "report": "KernelReport",
            "request": "KernelRequest",
            "runtime": "Kernel",
            "targets": "CAPABILITIES TARGET_NAMES Target",
        },
    )

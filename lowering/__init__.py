"""Ground floor: GPU targets, tile program -> CUDA -> cubin, kernel cache, bundles, launch, errors.

Names are resolved on first use; importing this package imports neither torch nor tilelang nor tvm.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "targets": ("CAPABILITIES", "TARGET_NAMES", "Target"),
    "request": ("KernelRequest",),
    "report": ("KernelReport",),
    "runtime": ("Kernel",),
    "kernels": ("compile_request", "get_kernel", "is_ready"),
    "parallel": ("compile_many",),
    "bundle": ("Bundle", "load_bundle", "write_bundle"),
    "environment": ("environment_report",),
    "cache": ("cache_root", "clear", "list_entries", "verify"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)

"""From a request to a kernel: memory, loaded bundles, disk cache, compiler, in this order."""

from __future__ import annotations

import threading
from pathlib import Path

from terrazzo.lowering import cache
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.runtime import Kernel
from terrazzo.lowering.toolchain import require_compiler, toolchain

_lock = threading.RLock()
_kernels: dict[KernelRequest, Kernel] = {}
_bundled: dict[str, Path] = {}  # identity -> folder of a verified bundle


def register_bundled(folders: dict[str, Path]) -> None:
    """Let `get_kernel` find the kernels of a verified bundle, by identity."""
    with _lock:
        _bundled.update(folders)


def forget_kernels() -> None:
    """Drop loaded kernels and bundles from this process's memory; the disk cache stays."""
    with _lock:
        _kernels.clear()
        _bundled.clear()


def compile_request(request: KernelRequest) -> Path:
    """Folder of the compiled kernel in the cache, compiled now if it is not there. Needs no GPU.

    Raises:
        ToolchainError: a compiler is missing; the message says which and how to get it.
        CompileError: the builder, the lowering or nvcc failed.
        CacheError: the cache folder cannot be found or written.
    """
    tools = toolchain()
    key = request.cache_key(tools)
    entry = cache.lookup(key)
    if entry is not None:
        return entry
    require_compiler(str(request))

    def build(folder: Path) -> None:
        from terrazzo.lowering.compiler import compile_into

        compile_into(request, folder)

    meta = {"identity": request.identity(), "request": request.as_dict(), "toolchain": tools.as_dict()}
    return cache.get_or_build(key, meta, build)


def find_compiled(request: KernelRequest) -> Path | None:
    """Folder of the compiled kernel in a loaded bundle or in the cache, or None."""
    return _bundled.get(request.identity()) or cache.lookup(request.cache_key(toolchain()))


def is_ready(request: KernelRequest) -> bool:
    """Whether `get_kernel` would answer without compiling."""
    return request in _kernels or find_compiled(request) is not None


def get_kernel(request: KernelRequest) -> Kernel:
    """The kernel of a request, loaded into this process and, if need be, compiled.

    Raises:
        ToolchainError, CompileError, CacheError: see `compile_request`.
        CacheError, BundleError: what was compiled cannot be loaded into this process.
    """
    kernel = _kernels.get(request)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(request)
            if kernel is None:
                bundled = _bundled.get(request.identity())
                kernel = Kernel(str(request), bundled or compile_request(request), bundled is not None)
                _kernels[request] = kernel
    return kernel

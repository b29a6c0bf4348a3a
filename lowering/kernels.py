"""From a request to a kernel: memory, loaded bundles, installed wheels, disk cache, compiler, in this order."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from terrazzo.lowering import cache, folders, wheels, worker
from terrazzo.lowering.bundled import BundledKernel
from terrazzo.lowering.compilers import compiler, header_entry, toolchain
from terrazzo.lowering.errors import BundleError, CacheError, ToolchainError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.runtime import Kernel
from terrazzo.lowering.toolchain import Toolchain

_lock = threading.RLock()
_forked_in_a_compilation = False  # then nobody in this process will ever release what that compilation holds
_kernels: dict[KernelRequest, Kernel] = {}
_bundled: dict[str, BundledKernel] = {}  # by identity
_strict: list[Path] = []  # bundles loaded with strict=True: from then on nothing is compiled for a launch


def register_bundled(kernels: Mapping[str, BundledKernel], strict: Path | None = None) -> None:
    """Let `get_kernel` find the kernels of a verified bundle, by identity; with `strict`, its folder, no others."""
    with _lock:
        _bundled.update(kernels)
        if strict is not None:
            _strict.append(strict)


def forget_kernels() -> None:
    """Drop loaded kernels and bundles from this process's memory; the disk cache stays."""
    with _lock:
        _kernels.clear()
        _bundled.clear()
        _strict.clear()
        wheels.forget()


def _meta(request: KernelRequest, tools: Toolchain) -> dict[str, Any]:
    """What the cache's entry of a request says of itself."""
    return {"identity": request.identity(), "request": request.as_dict(), "toolchain": tools.as_dict()}


def compile_request(request: KernelRequest, count: bool = True) -> Path:
    """Folder in the cache of the kernel of `request`, compiled now if it is not there. Needs no GPU.

    Args:
        request: what to compile.
        count: whether the instructions in its machine code are counted now, or when its report is read.

    Raises:
        ToolchainError: a compiler is missing; the message says which and how to get it.
        CompileError: the builder, the lowering or nvcc failed.
        CacheError: the cache folder cannot be found or written, or must not be trusted.
    """
    found = compiler()
    key, meta = request.cache_key(found.toolchain), _meta(request, found.toolchain)
    entry = cache.lookup(key, meta)
    if entry is not None:
        return entry
    found.require(str(request))
    if found.python is not None or _forked_in_a_compilation or header_entry():
        return _compile_elsewhere(request, key, found.python, count)

    def build(folder: Path) -> None:
        from terrazzo.lowering.compiler import compile_into

        compile_into(request, folder, count)

    return cache.get_or_build(key, meta, build)


def _compile_elsewhere(request: KernelRequest, key: str, python: str | None, count: bool) -> Path:
    made = worker.compile_elsewhere(request, python, count)
    if made.name != key:
        raise ToolchainError(
            f"compiler {python} makes {request} from other sources of terrazzo, or its tools changed since this "
            "process started; install the same terrazzo there and here, and start again"
        )
    return made


def find_compiled(request: KernelRequest) -> Path | None:
    """Folder of the compiled kernel in a loaded bundle, an installed wheel or the cache, or None."""
    bundled = _find_bundled(request)
    if bundled is not None:
        return bundled.folder
    tools = toolchain()
    return cache.lookup(request.cache_key(tools), _meta(request, tools))


def _find_bundled(request: KernelRequest) -> BundledKernel | None:
    """The kernel of a request in a loaded bundle or, unless one is strict, an installed wheel.

    Raises:
        BundleError: the kernel of this identity is of another request there.
    """
    bundled = _bundled.get(request.identity()) if _bundled else None  # wheels know digests that identities need
    if bundled is None and not _strict:
        bundled = wheels.find(request)
    if bundled is not None and bundled.request != request:
        raise BundleError(
            f"bundle {bundled.bundle} has kernel {bundled.request} in the place of {request}; "
            "make it again with `terrazzo compile`"
        )
    return bundled


def is_ready(request: KernelRequest) -> bool:
    """Whether `get_kernel` would answer without compiling."""
    return request in _kernels or (_find_bundled(request) if _strict else find_compiled(request)) is not None


def loaded(request: KernelRequest) -> Kernel | None:
    """The kernel of a request, where `get_kernel` has given it in this process."""
    return _kernels.get(request)


def may_have(request: KernelRequest) -> bool:
    """Whether `get_kernel` would answer or compile; with a strict bundle it does not compile."""
    return not _strict or is_ready(request)


def get_kernel(request: KernelRequest) -> Kernel:
    """The kernel of a request, loaded into this process and, if need be, compiled.

    Raises:
        ToolchainError, CompileError, CacheError: see `compile_request`.
        CacheError, BundleError: what was compiled cannot be loaded into this process.
        BundleError: a bundle was loaded with strict=True, and no loaded bundle has this kernel.
    """
    kernel = _kernels.get(request)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(request)
            if kernel is None:
                kernel = _load(request)
                _kernels[request] = kernel
    return kernel


def _load(request: KernelRequest) -> Kernel:
    bundled = _find_bundled(request)
    if bundled is None and _strict:
        raise BundleError(
            f"kernel {request} is in no loaded bundle, and {_strict[0]} was loaded with strict=True, so that nothing "
            "is compiled; make the bundle again with this kernel (`terrazzo compile`), or load it without strict"
        )
    if bundled is not None:
        folder, code, error = bundled.folder, bundled.code(), BundleError
    else:
        try:
            (folder, code), error = _cached_code(request), CacheError
        except ToolchainError as missing:
            raise ToolchainError("; ".join([str(missing), *wheels.refusals()])) from missing
    try:
        with folders.private_copy(code, _places()) as library:
            return Kernel(str(request), folder, bundled is not None, library)
    except OSError as failure:
        raise error(
            f"kernel {request} cannot be loaded: {failure.strerror}; "
            "set TMPDIR to a folder with free space where code may be run"
        ) from failure


def _cached_code(request: KernelRequest) -> tuple[Path, bytes]:
    """Folder and kernel.so of the cache's entry, compiled again where that is cleared or damaged at this moment."""
    for last in (False, True):
        entry = compile_request(request, count=False)
        try:
            return entry, cache.read_entry(entry, {"identity": request.identity()})[1][folders.LIBRARY]
        except ValueError as error:
            if last:
                raise CacheError(f"{entry} changes while it is read: {error}; remove it") from error
    raise AssertionError


def _places() -> Iterator[Path]:
    """Where a copy may lie while it is loaded: some hosts allow no code in /tmp, some have no writable cache."""
    with contextlib.suppress(OSError):
        yield Path(tempfile.gettempdir())
    with contextlib.suppress(CacheError):
        yield cache.room(cache.VERSION, "loading")
    yield Path("/dev/shm")


def _after_fork() -> None:
    global _lock, _forked_in_a_compilation
    _lock = threading.RLock()  # another thread of the parent may have held it, and is not here
    compiling = sys.modules.get("terrazzo.lowering.compiler")
    _forked_in_a_compilation |= compiling is not None and compiling.in_use()


os.register_at_fork(after_in_child=_after_fork)

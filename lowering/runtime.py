"""Loads a compiled kernel and launches it. Needs tvm-ffi and a TVM runtime library, neither a compiler nor tilelang."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import ArgumentError, CaptureError, ToolchainError
from terrazzo.lowering.report import KernelReport
from terrazzo.lowering.tensor_map import LIBRARY as TENSOR_MAP_LIBRARY
from terrazzo.lowering.toolchain import package_folder, package_version

_LOADER = "ffi.Module.load_from_bytes.cuda"
_lock = threading.Lock()


def load_runtime() -> None:
    """Make sure that this process has a TVM runtime with CUDA: one that is loaded already, TileLang's, or Apache TVM's.

    Raises:
        ToolchainError: no runtime is installed, or it cannot be loaded.
    """
    import torch  # noqa: F401  tvm-ffi exchanges tensors and streams with it; its wheels also bring libcudart
    import tvm_ffi

    with _lock:
        if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is not None:
            return
        for library in _runtime_libraries():
            try:
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
            except OSError as error:
                raise ToolchainError(f"the TVM runtime library {library} cannot be loaded: {error}") from error
        if tvm_ffi.get_global_func(_LOADER, allow_missing=True) is None:
            raise ToolchainError("the installed TVM runtime has no CUDA support; pip install 'terrazzo[runtime]'")


def _runtime_libraries() -> list[Path]:
    """The libraries to load, in order."""
    tilelang = package_folder("tilelang")
    if tilelang is not None:
        return [tilelang / "lib" / "libtvm_runtime.so"]
    tvm = package_folder("tvm") if package_version("apache-tvm") else None
    if tvm is None:
        raise ToolchainError("no TVM runtime is installed; pip install 'terrazzo[runtime]' to run bundles, or tilelang")
    # Apache's CUDA runtime links to libcudart.so.13, which lies in a wheel that the dynamic loader does not search.
    nvidia = package_folder("nvidia")
    cudart = sorted(nvidia.glob("cu13/lib/libcudart.so.13")) if nvidia else []
    return [*cudart, tvm / "lib" / "libtvm_runtime.so", tvm / "lib" / "libtvm_runtime_cuda.so"]


class Kernel:
    """A compiled kernel, ready to launch on the current torch stream.

    Calling it passes its arguments straight to the generated host function: torch tensors (outputs included) and ints, the
    first one a tensor. The first call on a device loads the machine code there, which a CUDA graph cannot capture.
    """

    def __init__(self, name: str, folder: Path) -> None:
        import tvm_ffi

        load_runtime()
        self.name = name
        self.folder = folder
        module = tvm_ffi.load_module(str(folder / "kernel.so"))
        if (folder / TENSOR_MAP_LIBRARY).exists():
            module.import_module(tvm_ffi.load_module(str(folder / TENSOR_MAP_LIBRARY)))
        self._function = module["main"]
        self._warm: set[int] = set()

    def __call__(self, *args: Any) -> None:
        """Launch. Raises ArgumentError for arguments that the kernel was not built for, CaptureError when cold."""
        if not self._warm or args[0].get_device() not in self._warm:
            self._first_launch(args)
            return
        try:
            self._function(*args)
        except RuntimeError as error:
            raise _explain(self.name, args, error) from error

    def _first_launch(self, args: tuple[Any, ...]) -> None:
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"kernel {self.name} has never been launched on this device, and a CUDA graph is being captured; "
                "call the operator once with the same shapes before the capture"
            )
        try:
            self._function(*args)
        except RuntimeError as error:
            raise _explain(self.name, args, error) from error
        self._warm.add(args[0].get_device())

    @property
    def warm(self) -> bool:
        """Whether the kernel was launched on any device; if not, it must not be captured in a CUDA graph."""
        return bool(self._warm)

    @cached_property
    def report(self) -> KernelReport:
        return KernelReport.read(self.folder / "report.json")

    @property
    def source(self) -> str:
        """The CUDA text."""
        return (self.folder / "kernel.cu").read_text()

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {'warm' if self.warm else 'cold'})"


# The host function's own checks: "kernel main input A shape[0] violates packed ABI constraint; expected: 512, got: 1024".
# TileLang swaps the two words: the first number was passed, the second one is required.
_CHECK = re.compile(r"main(?: input |\.)(\w+) (.*?)(?:; expected: (\S+), got: (\S+))?$", re.DOTALL)
_COUNT = re.compile(r"num_args should be (\d+)")


def _explain(kernel: str, args: tuple[Any, ...], error: RuntimeError) -> Exception:
    """An ArgumentError for a refused argument; any other error unchanged."""
    count = _COUNT.search(str(error))
    if count:
        return ArgumentError(
            "args", len(args), f"kernel {kernel} takes {count.group(1)} arguments", "pass every tensor and size"
        )
    found = _CHECK.search(str(error))
    if not found:
        return error
    name, what, passed, required = found.groups()
    what = f"{what.split()[0]} must be {required}, {passed} was passed" if "violates" in what else what
    seen = ", ".join(
        f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if hasattr(a, "shape") else repr(a) for a in args
    )
    return ArgumentError(
        name, f"({seen})", f"kernel {kernel}: {what}", "pass the tensors that the kernel was compiled for"
    )

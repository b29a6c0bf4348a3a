"""Loads a compiled kernel and launches it. Needs torch, tvm-ffi and the CUDA driver, no TVM and no compiler."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from terrazzo.lowering import graphs
from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError, BundleError, CacheError, CaptureError, TargetError
from terrazzo.lowering.report import KernelReport

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Kernel:
    """A compiled kernel, ready to launch on the current torch stream.

    Calling it passes its arguments straight to the generated host function: torch tensors (outputs included) and
    scalars, the first one a tensor. The first call on a device loads the machine code there, which a CUDA graph cannot
    capture.

    Args:
        name: for reports and errors. folder: what `compile_request` gives. bundled: whether it is a bundle's.
        library: the copy of kernel.so to load, which may go afterwards (default: the folder's own).

    Raises:
        CacheError, BundleError (bundled): kernel.so cannot be loaded; it is gone, damaged or of another machine.
    """

    def __init__(self, name: str, folder: Path, bundled: bool = False, library: Path | None = None) -> None:
        import torch  # noqa: F401  before tvm-ffi, which then exchanges tensors and streams with it
        import tvm_ffi

        self.name = name
        self.folder = folder
        try:
            self._function = tvm_ffi.load_module(str(library or folder / "kernel.so"))["main"]
        except (RuntimeError, AttributeError, OSError) as error:
            said = f"{folder / 'kernel.so'}, kernel {name}, cannot be loaded here: {error}"
            if bundled:
                raise BundleError(f"{said}; make the bundle again with `terrazzo compile` for this machine") from error
            raise CacheError(f"{said}; remove {folder}, and the kernel is compiled again") from error
        self._warm: set[int] = set()

    def __call__(self, *args: object) -> None:
        """Launch. Raises ArgumentError for arguments that the kernel was not built for, CaptureError when cold."""
        try:
            cold = args[0].get_device() not in self._warm
        except (AttributeError, IndexError):
            cold = True  # no tensor there: the first launch says what is wrong
        if cold:
            return self._first_launch(args)
        try:
            self._function(*args)
        except RuntimeError as error:
            self.explain(args, error)

    def launcher(self, index: int) -> Callable[..., None]:
        """What to call for a launch on CUDA device `index`: the bare function once the kernel is warm there.

        Its RuntimeErrors are for `explain`.
        """
        return self._function if index in self._warm else self

    def explain(self, args: tuple[Any, ...], error: RuntimeError) -> NoReturn:
        """Raise ArgumentError for a refused argument, TargetError for another GPU's machine code, else `error`."""
        found = _explain(self.name, args, error)
        if found is error:
            raise error
        raise found from error

    def _first_launch(self, args: tuple[Any, ...]) -> None:
        import torch

        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cuda"))
        if torch.cuda.is_available() and capturing(device):
            raise CaptureError(
                f"kernel {self.name} has never been launched on this device, and a CUDA graph is being captured; "
                "call the operator once with the same shapes before the capture"
            )
        try:
            with graphs.lock:  # what the driver does to load code may wait for all streams, that of a capture, too
                self._function(*args)
        except RuntimeError as error:
            self.explain(args, error)
        self._warm.add(args[0].get_device())

    @property
    def warm(self) -> bool:
        """Whether the kernel was launched on any device."""
        return bool(self._warm)

    def warm_on(self, device: torch.device) -> bool:
        """Whether the kernel was launched on a device; if not, it must not be captured there in a CUDA graph."""
        return device.index in self._warm if device.index is not None else self.warm

    @cached_property
    def report(self) -> KernelReport:
        """What was recorded when the kernel was compiled: registers, shared memory, spills, instructions."""
        return KernelReport.read(self.folder / "report.json")

    @property
    def source(self) -> str:
        """The CUDA text. Raises BundleError for a kernel of a wheel, which has none."""
        try:
            return (self.folder / "kernel.cu").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise BundleError(
                f"{self.folder}, kernel {self.name}, has no CUDA text, as wheels leave it out; uninstall the wheel, "
                "and the kernel is compiled with its text"
            ) from error

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, {'warm' if self.warm else 'cold'})"


# The host function's own checks: "kernel main input A shape[0] violates packed ABI constraint; expected: 512, got: 9".
# TileLang swaps the two words: the first number was passed, the second one is required.
_CHECK = re.compile(r"main(?: input |\.)(\w+) (.*?)(?:; expected: (\S+), got: (\S+))?$", re.DOTALL)
_COUNT = re.compile(r"num_args should be (\d+)")


def _explain(kernel: str, args: tuple[Any, ...], error: RuntimeError) -> Exception:
    """ArgumentError for a refused argument, TargetError for machine code of another GPU, any other error unchanged."""
    if "NO_BINARY_FOR_GPU" in str(error):
        import torch

        device = torch.cuda.get_device_name(args[0].device)
        return TargetError(
            "target", device, f"kernel {kernel} has no machine code for this device", "compile it for Target.detect()"
        )
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

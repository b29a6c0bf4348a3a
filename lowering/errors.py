"""Every error that Terrazzo raises on purpose. Each message names what was seen, what is required and the remedy."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BundleError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "LayoutError",
    "LayoutMismatchError",
    "TargetError",
    "TerrazzoError",
    "ToolchainError",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_SHOWN = 250  # characters of a value at each end of what a message shows


class TerrazzoError(Exception):
    """Root of all errors raised by Terrazzo."""


class ArgumentError(TerrazzoError, ValueError):
    """An argument that an operator, layout or target cannot accept.

    Args:
        argument: name of the argument as the caller wrote it.
        value: what was seen (its repr appears in the message, the middle of a long one left out).
        constraint: what must hold.
        remedy: what to do instead.
    """

    def __init__(self, argument: str, value: object, constraint: str, remedy: str) -> None:
        self.argument, self.value, self.constraint, self.remedy = argument, value, constraint, remedy
        super().__init__(f"{argument} = {shown(value)}: {constraint}; {remedy}")

    def __reduce__(self):
        return type(self), (self.argument, self.value, self.constraint, self.remedy)


def shown(value: object) -> str:
    """A value in a message, whatever it is: some have no repr (ints of 5,000 digits, lists in lists in lists)."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]} ({len(text)} characters)"


class TargetError(ArgumentError):
    """A GPU target that is unknown, or a capability that the target lacks."""


class LayoutError(ArgumentError):
    """A layout that cannot be derived, or whose proof fails; the message says which part."""


class LayoutMismatchError(LayoutError):
    """Packed data and kernel (or file) disagree about the layout's identity."""


class ToolchainError(TerrazzoError, RuntimeError):
    """A compiler or runtime package is missing, or two that exclude each other are loaded."""


class CompileError(TerrazzoError, RuntimeError):
    """Lowering or nvcc failed; the message carries the tool's own words."""


class CacheError(TerrazzoError, RuntimeError):
    """The kernel cache cannot be used: its folder cannot be found or written, or a kernel in it cannot be loaded."""


class BundleError(TerrazzoError, RuntimeError):
    """An ahead-of-time bundle is incomplete, altered, or made for another machine, target, version or layout."""


class CaptureError(TerrazzoError, RuntimeError):
    """A kernel that was never launched was met while a CUDA graph is being captured."""

"""Kernels with tables of source lines: by them compute-sanitizer names lines and the functions that nvcc inlined.

They are others than those that are launched elsewhere: the flag is part of a request and of its key in the cache.
Plans keep their requests, so `line_all` comes before an operator's first call.
"""

from __future__ import annotations

from dataclasses import replace

from terrazzo.lowering import KernelRequest

FLAG = "-lineinfo"


def lined(request: KernelRequest) -> KernelRequest:
    """The request of the same kernel with line tables."""
    return request if FLAG in request.flags else replace(request, flags=(*request.flags, FLAG))


def line_all() -> None:
    """From now on every request that this process makes, an operator's own too, is of a kernel with line tables."""
    made = KernelRequest.__post_init__

    def with_lines(self: KernelRequest) -> None:
        made(self)
        if FLAG not in self.flags:
            object.__setattr__(self, "flags", (*self.flags, FLAG))

    KernelRequest.__post_init__ = with_lines

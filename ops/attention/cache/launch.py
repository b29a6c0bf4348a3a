"""What the attention operators hand to their kernels beside the caller's tensors: targets, stand-ins, semaphores."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering import graphs
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.lasting import lasting

if TYPE_CHECKING:
    import torch

PTX = "sm_80"
"""The target whose programs newer GPUs run, compiled by the driver."""


def current_targets(target: Target | str | None, device: torch.device | None = None) -> tuple[Target, Target]:
    """The target whose program runs (None: the GPU's own), and the GPU: that of a device, or the current one.

    Raises:
        ArgumentError: a target whose programs that GPU does not run.
    """
    here = detect(device)
    at = here if target is None else Target.parse(target)
    if at.arch == here.arch:
        return here, here
    if at.arch != PTX:
        constraint = f"{here.name} runs programs of {here.arch} and, from their PTX, of {PTX}"
        raise ArgumentError("target", at.arch, constraint, "leave it out")
    return at, here


def detect(device: torch.device | None = None) -> Target:
    """The GPU of a device, or the current one."""
    return Target.detect() if device is None or device.index is None else launching.detect(device.index)


@lru_cache(maxsize=16)
def stand_ins(device: torch.device) -> dict[str, torch.Tensor]:
    """Stand-ins for what a kernel does not read."""
    import torch

    i32, f32 = (dict(dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    make = lambda: {
        "table": torch.zeros(1, 1, **i32),
        "residual": torch.zeros(1, 1, 4, **i32),
        "static": torch.zeros(1, 1, **f32),
        "sinks": torch.zeros(1, **f32),
    }
    return lasting(device, make)


_multiples: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
_views: dict[tuple[torch.device, int, int], torch.Tensor] = {}  # of them, which may be dropped
_MOST_VIEWS = 4096


def multiples(count: int, step: int, device: torch.device) -> torch.Tensor:
    """int32 [count] on the device: 0, step, 2 * step, ... Captured graphs hold the addresses, so nothing is freed."""
    import torch

    found = _views.get((device, step, count))
    if found is not None:
        return found
    held = _multiples.setdefault((device, step), [])
    if held and len(held[-1]) >= count:
        return _view(held[-1], device, step, count)
    room = max(64, 1 << (count - 1).bit_length())
    room = room if room * step < launching.LARGEST else count
    made = lasting(device, lambda: torch.arange(0, room * step, step, dtype=torch.int32, device=device))
    if launching.may_keep(device):  # one that a graph makes has no value before the graph is replayed
        launching.settle(made.device)
        held.append(made)
        return _view(made, device, step, count)
    return made[:count]


def _view(base: torch.Tensor, device: torch.device, step: int, count: int) -> torch.Tensor:
    if len(_views) >= _MOST_VIEWS:
        _views.clear()
    made = _views[device, step, count] = base[:count]
    return made


def own_slots(batch: int, device: torch.device) -> torch.Tensor:
    """Residual block b for sequence b."""
    return multiples(batch, 1, device)


_counters: dict[tuple, list[torch.Tensor]] = {}
_counting = threading.Lock()
_spares: dict[torch.device, list[torch.Tensor]] = {}
"""For a stream that is first seen in a capture, as that of torch.cuda.graph is."""


def semaphores(device: torch.device, count: int, capturing: bool) -> torch.Tensor:
    """`count` zeros that kernels of the current stream leave zero; captured graphs keep the ones they were given."""
    import torch

    handle = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)
    key = (device, graphs.standing.get(handle, handle))
    make = lambda: torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=device)
    with _counting:  # two streams must not be given one spare
        held, spares = _counters.setdefault(key, []), _spares.setdefault(device, [])
        if not held or held[-1].numel() < count:
            if not capturing:
                held.append(lasting(device, make))
            elif spares and spares[-1].numel() >= count:
                held.append(spares.pop())
            else:
                raise CaptureError(
                    f"decode with {count} tiles that CTAs share was never launched on {device}, and a CUDA graph is "
                    "being captured; call it once with this batch before the capture"
                )
        if not capturing and (not spares or spares[-1].numel() < count):
            spares.append(lasting(device, make))
            launching.settle(device)
        return held[-1][:count]

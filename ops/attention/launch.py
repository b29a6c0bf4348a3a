"""What the attention operators hand to their kernels beside the caller's tensors: targets, stand-ins, semaphores."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import CaptureError, TargetError
from terrazzo.lowering.targets import Target

if TYPE_CHECKING:
    import torch


def current_targets(target: Target | str | None) -> tuple[Target, Target]:
    """The target whose program runs (None: the GPU's own), and the GPU."""
    here = detect()
    at = here if target is None else Target.parse(target)
    return (here if at.arch == here.arch else at), here


def requested_targets(target: Target | str | None) -> tuple[Target, Target]:
    """As `current_targets`, to compile ahead: where no GPU is seen, a target that is named stands for both."""
    try:
        return current_targets(target)
    except TargetError:
        if target is None:
            raise
    at = Target.parse(target)
    return at, at


@lru_cache(maxsize=1)
def detect() -> Target:
    """The current GPU."""
    return Target.detect()


@lru_cache(maxsize=16)
def stand_ins(device: torch.device) -> dict[str, torch.Tensor]:
    """Stand-ins for what a kernel does not read."""
    import torch

    i32 = dict(dtype=torch.int32, device=device)
    return {
        "table": torch.zeros(1, 1, **i32),
        "residual": torch.zeros(1, 1, 4, **i32),
        "static": torch.zeros(1, 1, device=device),
        "sinks": torch.zeros(1, device=device),
    }


@lru_cache(maxsize=256)
def own_slots(batch: int, device: torch.device) -> torch.Tensor:
    """Residual block b for sequence b."""
    import torch

    return torch.arange(batch, dtype=torch.int32, device=device)


_counters: dict[tuple, list[torch.Tensor]] = {}


def semaphores(device: torch.device, count: int, capturing: bool) -> torch.Tensor:
    """`count` zeros that kernels of the current stream leave zero; captured graphs keep the ones they were given."""
    import torch

    key = (device, torch.cuda.current_stream(device).cuda_stream)
    held = _counters.setdefault(key, [])
    if not held or held[-1].numel() < count:
        if capturing:
            raise CaptureError(
                "decode was never called with this batch on this stream; call it once before the capture"
            )
        held.append(torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=device))
    return held[-1][:count]

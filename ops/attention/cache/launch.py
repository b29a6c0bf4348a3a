"""From a call of any attention operator to a launch: targets, kernels, what a cache hands to them, where results go."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from terrazzo.lowering import graphs
from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError, CaptureError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.lasting import lasting

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.kernels import Kernel
    from terrazzo.ops.attention.cache.cache import PackedCache
    from terrazzo.schedules import attention, attention_prefill

LOG2E = math.log2(math.e)
PTX = "sm_80"
"""The target whose programs newer GPUs run, compiled by the driver."""


@dataclass(frozen=True)
class Choice:
    """What a call says of its launch: see `entry.decode` and `entry.prefill`."""

    splits: int | None = None
    schedule: attention.Decode | attention_prefill.Prefill | None = None
    target: Target | str | None = None
    balanced: bool | None = None


class Operands(NamedTuple):
    """A cache as kernels take it: what it does not have is stood in for."""

    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    residual: torch.Tensor
    slots: torch.Tensor
    k_static: torch.Tensor
    v_static: torch.Tensor


def operands(cache: PackedCache) -> Operands:
    """Those of a cache, which is checked; found once for each object."""
    found = cache.__dict__.get("_operands")
    if found is not None:
        return found
    cache.check()
    device = cache.pages.device
    none = stand_ins(device)
    given = dict(table=cache.block_table, residual=cache.residual, k_static=cache.k_static, v_static=cache.v_static)
    slots = multiples(len(cache.lengths), 1, device) if cache.slots is None else cache.slots
    found = Operands(
        pages=cache.pages, lengths=cache.lengths, slots=slots,
        **{name: none["static" if "static" in name else name] if x is None else x for name, x in given.items()},
    )  # fmt: skip
    if launching.may_keep(device):
        cache.__dict__["_operands"] = found
    return found


def request(
    name: str, program: ModuleType, params: dict[str, str | int | bool], target: Target, device: Target | None
) -> KernelRequest:
    """The kernel of a program; `device` runs it where that is newer than `target`."""
    return KernelRequest(
        f"attention.{name}", f"{program.__name__}:build", tuple(params.items()), target, program.PASS_CONFIGS,
        launching.ptx_flags(target, device),
    )  # fmt: skip


def warm(request: KernelRequest, device: torch.device, what: str, *sizes: int) -> tuple[Kernel, bool]:
    """The kernel of a request, and whether a CUDA graph is being captured on the device.

    Args:
        what: the call launches it for, with `{}` for each of `sizes`.

    Raises:
        CaptureError: there is one, and the kernel was never launched there.
    """
    from terrazzo.lowering.kernels import get_kernel

    kernel, captured = get_kernel(request), capturing(device)
    if captured and not kernel.warm_on(device):
        raise CaptureError(
            f"{request.name} for {what.format(*sizes)} was never launched on {device}, and a CUDA graph is being "
            "captured; call it once with as much before the capture"
        )
    return kernel, captured


def results(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` of a call on q [..., Hq, D], or memory for them.

    Raises:
        ArgumentError: lse does not fit, or shares memory with another argument.
    """
    import torch

    made = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if lse is None:
        return made, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    launching.check_out(lse, q.shape[:-1], torch.float32, q.device, "lse")
    launching.check_apart(lse, "lse", q=q if q.is_contiguous() else None, out=made, sinks=sinks)
    return made, lse


def aligned(q: torch.Tensor, out: torch.Tensor | None, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q as kernels read it, and what they write in the place of `made`, which is `out` or new: memory of its own where
    copies and stores of several values would miss.

    Raises:
        ArgumentError: out shares memory with q.
    """
    import torch

    q = launching.aligned_copy(q) if not q.is_contiguous() or q.data_ptr() % 16 else q
    if out is not None:
        launching.check_apart(out, "out", q=q)
    return q, torch.empty_like(made) if made.data_ptr() % 16 else made


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

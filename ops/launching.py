"""What every operator does between its plan and the launch: workspaces, semaphores, targets, checks of arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError, CaptureError, TargetError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target

if TYPE_CHECKING:
    import torch

SEMAPHORES = 4096
"""int32 for each stream: a counter for each row range, or a flag for each warp."""
STREAMS = 64
ALL_TOKENS = (8, 16, 32, 64, 128, 256, 300, 512, 600, 1024, 2048, 4096)
"""One M of every bucket; 300 and 600 where tiles of 128 tokens pad less than tiles of 256."""


@dataclass(frozen=True)
class Plan:
    """What one M of one weight format launches."""

    request: KernelRequest
    workspace: tuple[int, ...]  # of 4-byte elements, shape
    semaphores: tuple[int, ...]  # int32, shape
    scalars: tuple[int, ...]  # trailing kernel arguments


def requests_of(plans: Iterable[Plan]) -> list[KernelRequest]:
    """The distinct kernels of some plans, in order."""
    return list(dict.fromkeys(plan.request for plan in plans))


def tokens_of(m: int | Iterable[int] | None) -> tuple[int, ...]:
    """The numbers of tokens that a request names: one, several, or (None) one of every bucket; 0 needs no kernel."""
    tokens = ALL_TOKENS if m is None else (m,) if isinstance(m, int) else tuple(m)
    return tuple(t for t in tokens if t > 0)


@dataclass
class _Pool:
    """Of one device, for each stream: semaphores, zero between launches, and workspaces."""

    semaphores: torch.Tensor
    slots: dict[int, int]
    workspaces: dict[int, list[torch.Tensor]]


_pools: dict[torch.device, _Pool] = {}
_pools_lock = threading.Lock()


def ready(plan: Plan, m: int, device: torch.device, stream: int, operator: str, dtype: str = "float32") -> tuple:
    """(kernel, workspace of `dtype`, semaphores, scalars) for launches of a plan on a stream.

    Both tensors are tvm-ffi's, which a launch takes without converting them.

    Raises:
        CaptureError: a CUDA graph is being captured, and the kernel was never launched or the device never used.
        ArgumentError: more streams than STREAMS. ToolchainError, CompileError: see `get_kernel`.
    """
    import torch

    kernel = warm_kernel(plan.request, m, operator)
    with _pools_lock:  # two threads must not find the same slot free for two streams
        pool = _pool(device, operator)
        slot = pool.slots.setdefault(stream, len(pool.slots))
    if slot >= STREAMS:
        raise ArgumentError("stream", stream, f"at most {STREAMS} streams of a device", "reuse streams")
    semaphores = pool.semaphores[slot, : prod(plan.semaphores)].view(plan.semaphores)
    size = prod(plan.workspace)
    spaces = pool.workspaces.setdefault(stream, [])
    if not spaces or spaces[-1].numel() < size:
        spaces.append(torch.empty(size, dtype=torch.float32, device=device))  # captured graphs keep the smaller ones
    workspace = spaces[-1][:size].view(getattr(torch, dtype)).view(plan.workspace)
    return kernel, argument(workspace), argument(semaphores), plan.scalars


def argument(tensor: torch.Tensor) -> Any:
    """The same memory as a tensor of tvm-ffi: made once for arguments of many launches, 0.2 us less for each.

    A launch takes its stream from the first tensor of torch among its arguments: one must remain.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


class Launches(dict):
    """What is ready to launch for weights of one format, by whatever else may differ between two calls.

    A weight keeps the object; where the weight is copied or pickled, None takes its place.

    Attributes:
        facts: what a kernel must know of the weight.
    """

    def __init__(self, facts: tuple) -> None:
        super().__init__()
        self.facts = facts

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(None), ()


class LaunchTable:
    """`Launches` of one operator, by format of the weight."""

    def __init__(self) -> None:
        self._formats: dict[tuple, Launches] = {}

    def keep(self, w: Any, facts: tuple) -> Launches:
        """The launches of weights with these facts; `w` keeps them as `_launches`."""
        found = self._formats.get(facts)
        if found is None:
            found = self._formats.setdefault(facts, Launches(facts))
        w.__dict__["_launches"] = found
        return found

    def clear(self) -> None:
        """Forget what is ready, wherever it is kept."""
        for launches in self._formats.values():
            launches.clear()


def launch(kept: dict, key: tuple, found: tuple, args: tuple) -> None:
    """Launch `found`, kept under `key`: a kernel, its launcher (another one once it is warm), and more."""
    kernel, launcher = found[0], found[1]
    try:
        launcher(*args)
    except RuntimeError as error:
        kernel.explain(args, error)
    if launcher is kernel:
        kept[key] = (kernel, kernel.launcher(args[0].get_device()), *found[2:])


def adopted(words: torch.Tensor, params: torch.Tensor, facts: tuple) -> bool:
    """Whether `adopt` noted this memory as a weight with these facts, and PyTorch has not written to it since."""
    note = getattr(words, "_terrazzo", None)
    return (
        note is not None
        and note[0] == facts
        and note[1] == words.data_ptr()
        and note[2] == params.data_ptr()
        and (note[3] < 0 or note[3] == words._version + params._version)
    )


def adopt(words: torch.Tensor, params: torch.Tensor, facts: tuple) -> None:
    """Note on its words, which outlive the weight around them, that a weight was checked.

    Kernels fetch weights before the kernel ahead of them on the stream has ended (programmatic dependent launch), so
    the last writer of the weight must not be that kernel: a tiny one is launched between.
    """
    params.new_zeros(1)
    words._terrazzo = (facts, words.data_ptr(), params.data_ptr(), writes(words, params))


def warm_kernel(request: KernelRequest, m: int, operator: str) -> Any:
    """The kernel of a request; a CaptureError where a CUDA graph is being captured and it was never launched."""
    import torch
    from terrazzo.lowering.kernels import get_kernel

    kernel = get_kernel(request)
    if torch.cuda.is_current_stream_capturing() and not kernel.warm:
        raise CaptureError(
            f"{request.name} for M = {m} was never launched, and a CUDA graph is being captured; call {operator} once "
            "with each M before the capture"
        )
    return kernel


def _pool(device: torch.device, operator: str) -> _Pool:
    import torch

    if device not in _pools:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"the first call of {operator} on a device cannot be captured; call it once before")
        _pools[device] = _Pool(torch.zeros(STREAMS, SEMAPHORES, dtype=torch.int32, device=device), {}, {})
        torch.cuda.synchronize(device)  # other streams may use their slots at once
    return _pools[device]


@cache
def _detect(index: int) -> Target:
    return Target.detect(index)


def targets(packed_for: str | None, device: torch.device, argument: str = "w") -> tuple[Target, Target]:
    """The target whose program runs, and the GPU that runs it: the same, or sm_80 code on a newer GPU."""
    import torch

    if device.type != "cuda":
        raise ArgumentError(argument, str(device), "must be on a CUDA device", f"move it with {argument}.to('cuda')")
    here = _detect(torch.cuda.current_device() if device.index is None else device.index)
    if packed_for is None or packed_for == here.arch:
        return here, here
    if packed_for == "sm_80":
        return Target.parse("sm_80"), here
    raise TargetError(
        argument, packed_for, f"was packed for another GPU than {here.name} ({here.arch})", "pack it for this target"
    )


def ptx_flags(target: Target, device: Target | None) -> tuple[str, ...]:
    """nvcc flags: code for an older target than the GPU that runs it comes from its PTX."""
    return () if (device or target).arch == target.arch else ("ptx=compute_80",)


def place(x: torch.Tensor) -> tuple[int, int]:
    """Index of the CUDA device and handle of its current stream; (-1, 0) for a tensor that is elsewhere."""
    import torch

    if not x.is_cuda:
        return -1, 0
    index = x.get_device()
    return index, torch._C._cuda_getCurrentRawStream(index)  # torch.cuda.current_stream builds an object: 2 us


def current_stream(x: torch.Tensor) -> int:
    return place(x)[1]


def writes(first: torch.Tensor, *more: torch.Tensor) -> int:
    """Counts PyTorch's in-place writes to some tensors; inference tensors keep no count."""
    if first.is_inference():
        return -1
    return first._version + sum(t._version for t in more) if more else first._version


def elsewhere(x: torch.Tensor, device: torch.device) -> ArgumentError:
    constraint = f"must be on a CUDA device together with w, which is on {device}"
    return ArgumentError("x", str(x.device), constraint, "move both there")


def check_no_grad(x: torch.Tensor, operator: str) -> None:
    import torch

    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("x", "requires_grad=True", f"{operator} has no gradient", "call it under torch.no_grad()")


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address that copies of 16 bytes take."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def output_fits(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, index: int) -> bool:
    """`check_out` in a hurry; where it says no, that one says why."""
    return out.shape == shape and out.dtype is dtype and out.get_device() == index and out.is_contiguous()


def check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ArgumentError(
            "out",
            f"{out.dtype} {list(out.shape)} strides {list(out.stride())} on {out.device}",
            f"must be contiguous {dtype} {list(shape)} on {device}",
            "allocate it with torch.empty of that shape",
        )


def check_bias(bias: torch.Tensor, n: int, dtype: torch.dtype | None, device: torch.device) -> None:
    """`dtype` None accepts any float."""
    fits = bias.dtype == dtype if dtype is not None else bias.dtype.is_floating_point
    if tuple(bias.shape) != (n,) or not fits or bias.device != device or not bias.is_contiguous():
        raise ArgumentError(
            "bias",
            f"{bias.dtype} {list(bias.shape)} on {bias.device}",
            f"must be contiguous {dtype or 'float'} [{n}] on {device}",
            "cast and move it",
        )


def cast_once(owner: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The owner's tensor `name` in another dtype, kept with the owner."""
    tensor = getattr(owner, name)
    if tensor.dtype == dtype:
        return tensor
    cast = owner.__dict__.setdefault("_casts", {})
    if (name, dtype) not in cast:
        cast[name, dtype] = tensor.to(dtype)
    return cast[name, dtype]

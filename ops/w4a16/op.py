"""y = x w^T: validation, choice of kernel and schedule, workspace, launch, torch.library registration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError, CaptureError, LayoutMismatchError, TargetError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.w4a16 import multistage as multistage_program
from terrazzo.ops.w4a16 import small_batch as small_batch_program
from terrazzo.ops.w4a16 import stream_k as stream_k_program
from terrazzo.ops.w4a16.operand import Operand
from terrazzo.schedules import multistage, small_batch, stream_k
from terrazzo.schedules.problem import WeightOnlyGemm

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.w4a16.format import PackedWeight

NUMERICS = ("auto", "exact", "fused", "post")
_SEMAPHORES = 4096  # int32 per stream: a counter for each row range, or a flag for each warpgroup
_STREAMS = 64
ALL_TOKENS = (8, 16, 32, 64, 128, 256, 4096)  # one M of every bucket


@dataclass(frozen=True)
class Plan:
    """What one M of one weight format launches."""

    request: KernelRequest
    workspace: tuple[int, ...]  # f32, shape
    semaphores: tuple[int, ...]  # int32, shape
    scalars: tuple[int, ...]  # trailing kernel arguments


@lru_cache(maxsize=1024)
def plan(
    m: int,
    n: int,
    k: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    dtype: str,
    bias: bool,
    numerics: str,
    target: Target,
    device: Target | None = None,
) -> Plan:
    """Kernel and launch sizes for M = m >= 1. `device` is the GPU that runs it where that is newer than `target`."""
    group = 0 if group_size >= k else group_size
    k8 = -(-k // 8) * 8  # x rows must be multiples of 16 bytes
    common = dict(n=n, k=k8, group=group, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, bias=bias)
    probe = Operand(group, symmetric, scale_dtype, dtype, "post")
    problem = WeightOnlyGemm(n, k8, probe.groups_per(128), probe.record_bytes)
    runs_on = device or target
    flags = () if runs_on.arch == target.arch else ("ptx=compute_80",)

    def request(program: ModuleType, schedule: Any, numerics: str) -> KernelRequest:
        Operand(group, symmetric, scale_dtype, dtype, numerics)  # raises where these do not go together
        params = common | schedule.params() | {"numerics": numerics}
        name = f"w4a16.{program.__name__.rpartition('.')[2]}"
        entry = f"{program.__name__}:build"
        return KernelRequest(name, entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)

    scaled = "exact" if scale_dtype == dtype else "post"
    if small_batch.serves(problem, target, m):
        s = small_batch.choose(problem, target, m)
        chosen = request(small_batch_program, s, "post" if numerics == "auto" else numerics)
        workspace = (s.kc, s.token_tiles * 8, problem.row_blocks * 64)
        return Plan(chosen, workspace, (s.nc,), ())
    numerics = scaled if numerics == "auto" else numerics
    if target.supports("wgmma.f16"):
        s = stream_k.choose(problem, target, m, numerics == "post")
        part = stream_k.partition(s, problem, runs_on, m)
        return Plan(
            request(stream_k_program, s, numerics),
            (part.grid, s.cta_blocks, s.block_tokens // 8, 128, 4),
            (part.grid, s.warpgroups),
            (part.shared,),
        )
    s = multistage.choose(problem, target, m, numerics == "post", symmetric)
    return Plan(request(multistage_program, s, numerics), *multistage.launch_sizes(s, problem, m), ())


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int,
    symmetric: bool,
    scale_dtype: str,
    m: int | Sequence[int] | None = None,
    dtype: str = "float16",
    target: Target | str,
    numerics: str = "auto",
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        dtype: of activations and output, "float16" or "bfloat16". scale_dtype also "float32".
        numerics: see `gemm`.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    _check_numerics(numerics)
    tokens = ALL_TOKENS if m is None else (m,) if isinstance(m, int) else tuple(m)
    facts = dict(group_size=group_size, symmetric=symmetric, scale_dtype=scale_dtype, dtype=dtype, bias=bias)
    at = Target.parse(target)
    plans = [plan(t, n, k, **facts, numerics=numerics, target=at) for t in tokens if t > 0]
    return list(dict.fromkeys(p.request for p in plans))


def weight_requests(
    w: PackedWeight, m: int | Sequence[int], dtype: torch.dtype, numerics: str = "auto", bias: bool | None = None
) -> list[KernelRequest]:
    """The kernels that `gemm` will use for `w` and these M on the current GPU, to compile them up front."""
    _check_numerics(numerics)
    target, device = _targets(w.target, w.device)
    tokens = (m,) if isinstance(m, int) else tuple(m)
    plans = [_plan_for(w, t, str(dtype)[6:], _has_bias(w, bias), numerics, target, device) for t in tokens if t > 0]
    return list(dict.fromkeys(p.request for p in plans))


def gemm(
    x: torch.Tensor,
    w: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    numerics: str = "auto",
) -> torch.Tensor:
    """y[..., N] = x[..., K] w[N, K]^T + bias, on the current stream; the same bits in every run.

    Args:
        x: float16 or bfloat16 [..., K] on w's GPU; leading dimensions may be strided (then they are copied).
        w: packed weight. Its own bias is added unless `bias` is given.
        bias: [N] in x's dtype.
        out: contiguous [..., N] in x's dtype, written and returned. M = 0 writes nothing.
        numerics: "exact" scales each weight with one rounding; "fused" is fma(q, s, -z*s), as TurboMind; "post"
            applies scale and zero point to the f32 sum of each group (specs.md B.3). "auto" is post where the
            small-batch program runs (up to 16 tokens), else exact (post where the scales are not in x's dtype).

    Works under torch.compile(fullgraph=True) and, once each M bucket was called, in CUDA graph capture. Calls on
    different streams use different workspaces; two graphs captured on one stream must not be replayed at the same time.
    A weight that something else than PyTorch writes to (a communication library, say) needs a kernel between that
    writer and `gemm`.

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy.
        LayoutMismatchError: w was packed with another layout. TargetError: w was packed for another GPU.
        CaptureError: a kernel that was never launched is met during CUDA graph capture.
        ToolchainError, CompileError: the kernel is not compiled yet and cannot be.
    """
    import torch

    if torch.compiler.is_compiling() or type(x) is not torch.Tensor:  # traced, fake or another subclass: dispatch
        from terrazzo.ops.w4a16 import torch_op

        y = torch_op.call(x, w, bias, numerics)
        return y if out is None else out.copy_(y)
    return run(x, w, bias, out, numerics)


def run(
    x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None, numerics: str
) -> torch.Tensor:
    """The eager path of `gemm`: sizes are looked up by M, tensors are checked, the kernel is launched."""
    import torch

    if not hasattr(w, "words"):
        raise ArgumentError("w", type(w).__name__, "must be a PackedWeight", "call w4a16.pack, or w.pack()")
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("x", "requires_grad=True", "gemm has no gradient", "call it under torch.no_grad()")
    shape = x.shape
    if not shape or shape[-1] != w.k:
        raise ArgumentError("x", list(shape), f"its last dimension must be K = {w.k}", "pass activations [..., K]")
    m = x.numel() // w.k
    if bias is not None:
        _check_bias(bias, w.n, x)
    elif w.bias is not None:
        bias = _own_bias(w, x)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    facts = w.__dict__.get("_facts") or _facts(w)
    if getattr(w.words, "_terrazzo", None) != (_version(w), facts):
        _adopt(w, facts)
    key = (facts, m, x.dtype, x.device, stream, numerics, bias is None)
    found = _launchers.get(key) or _prepare(key, x, w)
    n = w.n
    if out is None:
        y = torch.empty((*shape[:-1], n), dtype=x.dtype, device=x.device)
    else:
        _check_out(out, (*shape[:-1], n), x)
        y = out
    if m == 0:
        return y
    if w.device != x.device:
        raise _elsewhere(x, w)
    if w.perm is not None:
        x = x.index_select(-1, w.perm)
    if w.k % 8:
        x = torch.nn.functional.pad(x, (0, -w.k % 8))
    x = x.reshape(m, -1)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    kernel, workspace, semaphores, scalars, no_bias = found
    written = y if y.data_ptr() % 16 == 0 else torch.empty_like(y)
    kernel(x, w.words, w.params, no_bias if bias is None else bias, workspace, semaphores, written.view(m, n), *scalars)
    return y if written is y else y.copy_(written)


_launchers: dict[tuple, tuple] = {}


def _version(w: PackedWeight) -> int:
    """Counts PyTorch's in-place writes to the weight; inference tensors keep no count."""
    return -1 if w.words.is_inference() else w.words._version + w.params._version


def _facts(w: PackedWeight) -> tuple:
    """What a kernel must know of a weight."""
    facts = w.__dict__["_facts"] = (w.n, w.k, w.group_size, w.symmetric, w.scale_dtype, w.target)
    return facts


def _adopt(w: PackedWeight, facts: tuple) -> None:
    """Check a weight that is new or was written to, and note so on its words, which outlive a PackedWeight around them.

    Kernels fetch weights before the kernel ahead of them on the stream has ended (programmatic dependent launch), so
    the last writer of the weight must not be that kernel: a tiny one is launched between.
    """
    if w.layout != _layout_identity():
        raise LayoutMismatchError("w", w.layout, f"must have layout {_layout_identity()}", "pack it again")
    w.check_sizes()
    w.params.new_zeros(1)
    w.words._terrazzo = (_version(w), facts)


def _own_bias(w: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """The weight's bias in x's dtype."""
    if w.bias.dtype == x.dtype:
        return w.bias
    cast = w.__dict__.setdefault("_biases", {})
    if x.dtype not in cast:
        cast[x.dtype] = w.bias.to(x.dtype)
    return cast[x.dtype]


def _elsewhere(x: torch.Tensor, w: PackedWeight) -> ArgumentError:
    constraint = f"must be on a CUDA device together with w, which is on {w.device}"
    return ArgumentError("x", str(x.device), constraint, "move both there")


def _prepare(key: tuple, x: torch.Tensor, w: PackedWeight) -> tuple:
    """Kernel, workspace, semaphores, trailing arguments and a stand-in for no bias, remembered under `key`."""
    import torch
    from terrazzo.lowering.kernels import get_kernel

    _, m, _, _, stream, numerics, no_bias = key
    _check_numerics(numerics)
    if not x.is_cuda or x.device != w.device:
        raise _elsewhere(x, w)
    dtype = str(x.dtype)[6:]
    if dtype not in ("float16", "bfloat16"):
        raise ArgumentError("x", dtype, "must be float16 or bfloat16", "cast the activations")
    if m == 0:
        return ()
    target, device = _targets(w.target, x.device)
    chosen = _plan_for(w, m, dtype, not no_bias, numerics, target, device)
    capturing = torch.cuda.is_current_stream_capturing()
    kernel = get_kernel(chosen.request)
    if capturing and not kernel.warm:
        raise CaptureError(
            f"{chosen.request.name} for M = {m} was never launched, and a CUDA graph is being captured; call gemm once "
            "with each M before the capture"
        )
    pool = _pool(x.device, capturing)
    slot = pool.slots.setdefault(stream, len(pool.slots))
    if slot >= _STREAMS:
        raise ArgumentError("stream", stream, f"at most {_STREAMS} streams of a device", "reuse streams")
    semaphores = pool.semaphores[slot, : prod(chosen.semaphores)].view(chosen.semaphores)
    size = prod(chosen.workspace)
    spaces = pool.workspaces.setdefault(stream, [])
    if not spaces or spaces[-1].numel() < size:
        spaces.append(torch.empty(size, dtype=torch.float32, device=x.device))  # captured graphs keep the smaller ones
    workspace = spaces[-1][:size].view(chosen.workspace)
    stand_in = torch.empty(1, dtype=x.dtype, device=x.device)
    found = _launchers[key] = (kernel, workspace, semaphores, chosen.scalars, stand_in)
    return found


@dataclass
class _Pool:
    """Of one device, for each stream: semaphores, zero between launches, and f32 workspaces."""

    semaphores: torch.Tensor
    slots: dict[int, int]
    workspaces: dict[int, list[torch.Tensor]]


_pools: dict[torch.device, _Pool] = {}


def _pool(device: torch.device, capturing: bool) -> _Pool:
    import torch

    if device not in _pools:
        if capturing:
            raise CaptureError("the first call of w4a16.gemm on a device cannot be captured; call it once before")
        _pools[device] = _Pool(torch.zeros(_STREAMS, _SEMAPHORES, dtype=torch.int32, device=device), {}, {})
        torch.cuda.synchronize(device)  # other streams may use their slots at once
    return _pools[device]


def _plan_for(w: PackedWeight, m: int, dtype: str, bias: bool, numerics: str, target: Target, device: Target) -> Plan:
    return plan(
        m, w.n, w.k, group_size=w.group_size, symmetric=w.symmetric, scale_dtype=w.scale_dtype, dtype=dtype, bias=bias,
        numerics=numerics, target=target, device=device,
    )  # fmt: skip


@cache
def _detect(index: int) -> Target:
    return Target.detect(index)


def _targets(packed_for: str | None, device: torch.device) -> tuple[Target, Target]:
    """The target whose program runs, and the GPU that runs it: the same, or sm_80 code on a newer GPU."""
    import torch

    if device.type != "cuda":
        raise ArgumentError("w", str(device), "must be on a CUDA device", "move it with w.to('cuda')")
    here = _detect(torch.cuda.current_device() if device.index is None else device.index)
    if packed_for is None or packed_for == here.arch:
        return here, here
    if packed_for == "sm_80":
        return Target.parse("sm_80"), here
    raise TargetError(
        "w", packed_for, f"was packed for another GPU than {here.name} ({here.arch})", "pack it for this target"
    )


def _has_bias(w: PackedWeight, bias: bool | None) -> bool:
    return w.bias is not None if bias is None else bias


def _check_numerics(numerics: str) -> None:
    if numerics not in NUMERICS:
        raise ArgumentError("numerics", numerics, f"must be one of {NUMERICS}", "leave it 'auto'")


def _check_out(out: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ArgumentError(
            "out",
            f"{out.dtype} {list(out.shape)} strides {list(out.stride())} on {out.device}",
            f"must be contiguous {x.dtype} {list(shape)} on {x.device}",
            "allocate it with torch.empty of that shape",
        )


def _check_bias(bias: torch.Tensor, n: int, x: torch.Tensor) -> None:
    if tuple(bias.shape) != (n,) or bias.dtype != x.dtype or bias.device != x.device or not bias.is_contiguous():
        raise ArgumentError(
            "bias",
            f"{bias.dtype} {list(bias.shape)} on {bias.device}",
            f"must be contiguous {x.dtype} [{n}] on {x.device}",
            "cast and move it",
        )


@cache
def _layout_identity() -> str:
    from terrazzo.layouts.instances import get_instance
    from terrazzo.ops.w4a16.format import LAYOUT

    return get_instance(LAYOUT).identity

"""Quantized activations, and the call that makes them: one kernel for smoothing, RMSNorm, codes and row sums."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.capture import capturing
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, launching, weights
from terrazzo.ops.lasting import lasting
from terrazzo.ops.linear.quantize import quantize_rows as program
from terrazzo.ops.products.converted import W4A8_FP8
from terrazzo.ops.quantized import CODES, QuantizedActivations, empty, padded
from terrazzo.ops.w4a8.reference import activation_gain
from terrazzo.schedules import quantize_rows

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16")
SCRATCH = 8 << 20
"""Most codes that `gemm` keeps memory for, for each thread and stream: beyond, allocations do not show."""
SCRATCH_SHAPES = 1024


@lru_cache(maxsize=1024)
def plan(
    m: int, k: int, *, dtype: str, gain: bool, norm: bool, target: Target, device: Target | None = None,
    codes: str = "int8", schedule: quantize_rows.QuantizeRows | None = None,
) -> KernelRequest:  # fmt: skip
    """The kernel that quantizes m >= 1 rows of k values. `device` is the GPU where that is newer than `target`.

    `schedule` None is what `quantize_rows.choose` takes.
    """
    if codes == "e4m3":
        W4A8_FP8.check(target)
    k = k if k % program.VECTOR == 0 else padded(k)
    schedule = schedule or quantize_rows.choose(k, device or target, m, gain)
    params = dict(k=k, dtype=dtype, gain=gain, norm=norm) | schedule.params()
    params |= {} if codes == "int8" else {"codes": codes}
    flags = launching.ptx_flags(target, device)
    entry = f"{program.__name__}:build"
    return KernelRequest("w4a8.quantize_rows", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


def run(
    x: torch.Tensor,
    smooth: torch.Tensor | None,
    rms_weight: torch.Tensor | None,
    eps: float,
    out: QuantizedActivations | None,
    target: str | None,
    codes: str = "int8",
    scratch: bool = False,
) -> QuantizedActivations:
    """The eager path of `quantize_activations`.

    With `scratch`, small results may lie in memory that the next such call of this thread on this stream takes again.
    """
    if codes != "int8":
        check_codes(codes)
    if x.requires_grad:
        launching.check_no_grad(x, "quantize_activations")
    shape = x.shape
    if not shape or not shape[-1]:
        raise ArgumentError("x", list(shape), "must be [..., K] with K >= 1", "pass activations")
    k, flat = shape[-1], len(shape) == 2
    m = shape[0] if flat else x.numel() // k
    at = launching.place(x)
    key = (m, k, x.dtype, at[0], smooth is None, rms_weight is None, target, codes)
    found = _kernels.get(key)
    gain = None if smooth is rms_weight is None else _gain(smooth, rms_weight, k, x.device)
    if rms_weight is not None:
        launching.check_eps(eps)
    if out is None:
        out = _scratch(shape, m, codes, at, x) if scratch and found else None
        out = empty(tuple(shape), x.device, codes) if out is None else out
    else:
        check_out(out, shape, x.device, codes)
        for part in (out.q, out.scales, out.row_sums):
            if part is not None and x.is_contiguous():  # else a copy is read
                launching.check_apart(part, "out", x=x)
    found = found or _prepare(key, x)
    if m == 0:
        return out
    if k % program.VECTOR:
        import torch

        x = torch.nn.functional.pad(x, (0, padded(k) - k))
    if not flat:
        x = x.reshape(m, -1)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = launching.aligned_copy(x)
    _, _, no_gain, no_sums = found
    scales, sums = out.__dict__.get("_arguments") or (out.scales, out.row_sums)
    q = out.q
    if codes != "int8":
        import torch

        q = q.view(torch.int8)
    args = (x, no_gain if gain is None else gain, q, scales, no_sums if sums is None else sums, eps, float(k))
    launching.launch(_kernels, key, found, args)
    return out


def check_codes(codes: str) -> None:
    if type(codes) is not str or codes not in CODES:
        raise ArgumentError("codes", codes, f"must be one of {tuple(CODES)}", "use int8")


class _Spaces(threading.local):
    """Of each thread, whose two launches on a stream have no third one of another thread between them."""

    def __init__(self) -> None:
        self.kept: dict[tuple, tuple] = {}  # (device index, stream) -> bytes, activations in them


_spaces = _Spaces()


def _scratch(
    shape: tuple[int, ...], m: int, codes: str, at: tuple[int, int], x: torch.Tensor
) -> QuantizedActivations | None:
    """Activations in memory that is used again; None if there are many, or for a CUDA graph, whose memory must stay."""
    import torch

    k = -(-shape[-1] // 16) * 16  # `padded`
    if m * k > SCRATCH or capturing(x.device):
        return None
    space, made = _spaces.kept.get(at, (None, {}))
    found = made.get((shape, codes))
    if found is not None:
        return found
    vector = -(-m // 4) * 16  # bytes of a scale or a sum for each row, at an address of 16 bytes
    size = m * k + 2 * vector
    if space is None or space.numel() < size or len(made) >= SCRATCH_SHAPES:
        made = {}
        room = max(size, 0 if space is None else space.numel())
        space = lasting(x.device, lambda: torch.empty(room, dtype=torch.uint8, device=x.device))
        _spaces.kept[at] = space, made
    take = lambda start, nbytes, dtype: space[start : start + nbytes].view(dtype)
    q = take(0, m * k, getattr(torch, CODES[codes])).view(m, k)
    scales = take(m * k, 4 * m, torch.float32)
    sums = take(m * k + vector, 4 * m, torch.int32) if codes == "int8" else None
    found = made[shape, codes] = QuantizedActivations(q, scales, sums, tuple(shape))
    found.__dict__["_arguments"] = (launching.argument(scales), None if sums is None else launching.argument(sums))
    return found


_kernels: dict[tuple, tuple] = {}


def _prepare(key: tuple, x: torch.Tensor) -> tuple:
    """Kernel, its launcher, and stand-ins for no gain and no row sums; kept."""
    import torch

    m, k, _, index, no_smooth, no_norm, target, codes = key
    dtype = check_dtype(x)
    launching.check_tokens(m)
    if not x.is_cuda:
        raise ArgumentError("x", str(x.device), "must be on a CUDA device", "move it, or use the torch reference")
    if m == 0:
        return (None, None, None, None)
    at, device = launching.targets(target, x.device, "x")
    facts = dict(gain=not (no_smooth and no_norm), norm=not no_norm, target=at, device=device, codes=codes)
    kernel = launching.warm_kernel(plan(m, k, dtype=dtype, **facts), m, "w4a8.quantize_activations", x.device)
    stand_ins = launching.stand_ins(x.device, torch.float32, torch.int32)
    found = _kernels[key] = (kernel, kernel.launcher(index), *map(launching.argument, stand_ins))
    return found


def _gain(
    smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, k: int, device: torch.device
) -> torch.Tensor | None:
    """float32 [K], padded to rows of the kernel, kept with the vector that it was made of until one of them changes."""
    owner = smooth if rms_weight is None else rms_weight
    if owner is None:
        return None
    other = smooth if owner is rms_weight else None
    key, state = ("w4a8", id(other), k, device), (derived.state_of(owner), derived.state_of(other))
    found = derived.find(owner, key, state)
    if found is not None:
        return found
    import torch

    check_vectors(smooth, rms_weight, k, device)
    rest = padded(k) - k if k % program.VECTOR else 0
    make = lambda: torch.nn.functional.pad(activation_gain(smooth, rms_weight), (0, rest))
    return derived.keep(owner, key, state, make, (other,))


def check_dtype(x: torch.Tensor) -> str:
    """Name of x's dtype, ArgumentError unless kernels quantize it."""
    dtype = weights.dtype_name(x)
    if dtype not in DTYPES:
        raise ArgumentError("x", dtype, "must be float16 or bfloat16", "cast the activations")
    return dtype


def check_vectors(smooth: torch.Tensor | None, rms_weight: torch.Tensor | None, k: int, device: torch.device) -> None:
    """Raise ArgumentError unless each is None, or float [K] on a device."""
    for name, vector in (("rms_weight", rms_weight), ("smooth", smooth)):
        if vector is None:
            continue
        launching.check_tensor(vector, name, "float [{}]", k)
        if tuple(vector.shape) != (k,) or not vector.dtype.is_floating_point or vector.device != device:
            seen = f"{weights.dtype_name(vector)} {list(vector.shape)} on {vector.device}"
            raise ArgumentError(
                name, seen, f"must be a float vector [{k}] on {device}", "pass a value for each channel"
            )


def check_out(out: QuantizedActivations, shape: tuple[int, ...], device: torch.device, codes: str) -> None:
    if not isinstance(out, QuantizedActivations):
        remedy = "keep what an earlier call returned"
        raise ArgumentError("out", weights.kind(out), "must be QuantizedActivations of w4a8", remedy)
    if out.shape != shape or out.device != device or out.codes != codes:
        seen = f"{out.codes} {list(out.shape)} on {out.device}"
        constraint = f"must be {codes} {list(shape)} on {device}"
        raise ArgumentError("out", seen, constraint, "make it for activations of this shape")
    out.check()


def copy_into(out: QuantizedActivations, found: QuantizedActivations) -> QuantizedActivations:
    check_out(out, found.shape, found.device, found.codes)
    for name in ("q", "scales", *(["row_sums"] if found.row_sums is not None else [])):
        getattr(out, name).copy_(getattr(found, name))
    return out

"""Activations of W8A8: as its weight wants them, in one kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, quantized, row_calls, weights
from terrazzo.ops.linear.quantize import quantize_bytes as program
from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations
from terrazzo.ops.w4a8 import activations
from terrazzo.ops.w4a8.w8a8.format import PRODUCTS, PackedWeight
from terrazzo.ops.w4a8.w8a8.reference import quantize_asymmetric, quantize_powers, quantize_static
from terrazzo.schedules import rows

if TYPE_CHECKING:
    import torch

Activations = QuantizedActivations | BlockQuantizedActivations


def form_of(w: PackedWeight) -> str:
    """Of the kernel that quantizes for a weight, one of `quantize_bytes.FORMS`; "" for that of W4A8."""
    if w.block or w.ue8m0:
        return "e4m3_block128_ue8m0" if w.ue8m0 else "e4m3_block128"
    if w.input_scale is not None:
        return f"{w.codes}_static"
    return "int8_asymmetric" if w.asymmetric else ""


def has_zeros(w: PackedWeight) -> bool:
    """Whether a weight's activations have zero points."""
    return w.asymmetric or w.input_zero != 0


@lru_cache(maxsize=1024)
def plan(
    m: int, k: int, *, dtype: str, gain: bool, form: str, target: Target, device: Target | None = None
) -> KernelRequest:  # fmt: skip
    """The kernel that quantizes m >= 1 rows of k values in another form than W4A8's."""
    PRODUCTS["int8" if form.startswith("int8") else "e4m3"].check(target)
    k = -(-k // program.VECTOR) * program.VECTOR
    schedule = rows.choose(k, device or target, m)
    params = dict(k=k, dtype=dtype, gain=gain, form=form) | schedule.params()
    flags = launching.ptx_flags(target, device)
    entry = f"{program.__name__}:build"
    return KernelRequest("w8a8.quantize_bytes", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


def dynamic(
    m: int, k: int, *, dtype: str, gain: bool, codes: str, target: Target, device: Target | None = None
) -> KernelRequest:
    """W4A8's kernel, which quantizes by the largest magnitude of a row."""
    PRODUCTS[codes].check(target)
    return activations.plan(m, k, dtype=dtype, gain=gain, norm=False, target=target, device=device, codes=codes)


def requests(w: PackedWeight, m: int, dtype: str, target: Target, device: Target | None = None) -> KernelRequest:
    """The kernel that quantizes m rows for a weight."""
    form, facts = form_of(w), dict(dtype=dtype, gain=w.smooth is not None, target=target, device=device)
    if form:
        return plan(m, w.k, form=form, **facts)
    return dynamic(m, w.k, codes=w.codes, **facts)


def run(x: torch.Tensor, w: PackedWeight) -> Activations:
    """x [..., K] as `w` multiplies it; on the CPU by the reference."""
    import torch

    if not x.shape or x.shape[-1] != w.k:
        launching.check_last(x, w.k)
    form = form_of(w)
    if not form and x.is_cuda:
        at = "sm_80" if w.target == "sm_80" else None
        try:
            return activations.run(x, w.smooth, None, 0.0, None, at, w.codes)
        except ArgumentError as error:  # of a target: what to do instead is W8A8's own
            if error.argument == "target":
                PRODUCTS[w.codes].check(launching.targets(at, x.device)[0])
            raise
    launching.check_no_grad(x, "quantize_activations")
    dtype = weights.dtype_name(x)
    if dtype not in activations.DTYPES:
        raise ArgumentError("x", dtype, "must be float16 or bfloat16", "cast the activations")
    if not x.is_cuda:
        return on_cpu(x, w)
    m = x.numel() // w.k
    blocks = "_block128" in form
    made = quantized.allocate(x, tuple(x.shape), "e4m3_block128" if blocks else w.codes, blocks)
    if w.codes == "int8":
        zeros = torch.empty(m, dtype=torch.int32, device=x.device)
        made = QuantizedActivations(made.q, made.scales, None, made.shape, zeros if has_zeros(w) else None)
    launching.check_tokens(m)
    if m == 0:
        return _of_scales(made, w)
    scale = 1.0 if w.input_scale is None else w.input_scale
    launch(x, made, form, w.target, w.smooth, None if w.codes != "int8" else zeros, scale, float(w.input_zero))
    return _of_scales(made, w)


def launch(
    x: torch.Tensor, made: Activations, form: str, arch: str | None, smooth: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None, scale: float = 1.0, zero: float = 0.0,
) -> None:  # fmt: skip
    """Codes and scales of x, one token or more, into `made`; arguments as of `quantize_bytes.build`."""
    import torch

    k, dtype = x.shape[-1], weights.dtype_name(x)
    m = x.numel() // k
    target, device = launching.targets(arch, x.device)
    gain = None if smooth is None else row_calls.inverse_of(smooth)
    key = (m, k, dtype, form, gain is None, target.arch, x.device.index, row_calls.bucket(m, x.device.index))
    found = _kernels.get(key)
    if found is None:
        facts = dict(dtype=dtype, gain=gain is not None, form=form, target=target, device=device)
        operator = "w8a8.quantize_activations"
        kernel = launching.warm_kernel(plan(m, k, **facts), m, operator, x.device)
        none, no_zeros = map(launching.argument, launching.stand_ins(x.device, torch.float32, torch.int32))
        found = _kernels[key] = (kernel, kernel.launcher(x.device.index), none, no_zeros)
    rest = -k % program.VECTOR
    x = torch.nn.functional.pad(x, (0, rest)) if rest else x
    if gain is not None and rest:
        gain = torch.nn.functional.pad(gain, (0, rest))
    x = row_calls.vector(x.reshape(m, -1))
    q, of_codes = made.q.view(torch.int8), found[2] if gain is None else gain
    args = (x, of_codes, q, made.scales, found[3] if zeros is None else zeros, scale, _reciprocal(scale), zero)
    launching.launch(_kernels, key, found, args)


_kernels: dict[tuple, tuple] = {}


def _of_scales(made: Activations, w: PackedWeight) -> Activations:
    """Activations with a scale for each token, where a block holds all of K."""
    if w.block or not isinstance(made, BlockQuantizedActivations):
        return made
    return QuantizedActivations(made.q, made.scales.view(-1)[: len(made.q)], None, made.shape)


def _reciprocal(scale: float) -> float:
    """The float32 of 1 / the float32 of scale."""
    import numpy as np

    return float(np.float32(1) / np.float32(scale))


def on_cpu(x: torch.Tensor, w: PackedWeight) -> Activations:
    """By the reference."""
    import torch
    from terrazzo.ops.w4a8 import fp8_reference, reference

    shape, flat, rest = tuple(x.shape), x.reshape(-1, w.k), quantized.padded(w.k) - w.k
    widened = lambda q: torch.cat([q, q.new_zeros(len(q), rest)], 1) if rest else q
    if w.block or w.ue8m0:
        values = flat.float() if w.smooth is None else flat.float() * (1 / w.smooth.float())
        if w.ue8m0:
            return _of_scales(quantize_powers(values, shape), w)
        return quantized.encode(values, None, shape, "e4m3_block128", True)
    if w.input_scale is not None:
        q = quantize_static(flat, w.input_scale, w.input_zero, w.codes, w.smooth)
        scales = flat.new_full((len(flat),), w.input_scale, dtype=torch.float32)
        zeros = torch.full_like(scales, w.input_zero, dtype=torch.int32) if w.input_zero else None
        return QuantizedActivations(widened(q), scales, None, shape, zeros)
    if w.asymmetric:
        q, scales, zeros = quantize_asymmetric(flat, w.smooth)
        return QuantizedActivations(widened(q), scales, None, shape, zeros)
    if w.codes == "e4m3":
        q, scales = fp8_reference.quantize_activations(flat, w.smooth)
        return QuantizedActivations(widened(q), scales, None, shape)
    q, scales, sums = reference.quantize_activations(flat, w.smooth)
    return QuantizedActivations(widened(q), scales, sums, shape)

"""Products of packed weights on a CPU, by torch's own: each weight is dequantized once, at the first call.

What a CPU computes is a reference: it multiplies what kernels multiply. Weights that 16 bits hold exactly stay in 16
bits, others in 32. Sums have 32 bits at least and are rounded once. Activations are quantized where kernels quantize
them: int8 codes with one scale for a token are multiplied as integers, all others as float32.
`exactly` gives the operators' oracle, of float64, in its place.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from terrazzo.ops.products.ways import choose_way
from terrazzo.ops.quantized import padded
from terrazzo.ops.w4a8.format import PackedWeight as W4A8
from terrazzo.ops.w4a8.w8a8.format import PackedWeight as W8A8
from terrazzo.ops.w4ax.fmpq import BLOCK
from terrazzo.ops.w4ax.format import PackedWeight as W4Ax
from terrazzo.ops.weight_only.packed import WeightOnly
from torch.nn import functional

if TYPE_CHECKING:
    from terrazzo.nn.products import Activations
    from terrazzo.ops.weight.base import AnyPacked as Packed

FEW = 4
"""Rows for which float16 products are as fast as those of float32 in torch."""
_exact = 0
_told = False
_lock = threading.Lock()


@contextmanager
def exactly() -> Iterator[None]:
    """Inside, modules on a CPU run the operators' oracle in every thread: float64, slow, nothing kept."""
    global _exact
    _exact += 1
    try:
        yield
    finally:
        _exact -= 1


def asked_for_oracle() -> bool:
    """Whether `exactly` is around."""
    return _exact > 0


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [..., N] in x's dtype of x [..., K] and w [N, K], which may have another one: float32 sums, rounded once."""
    rows = x.numel() // max(x.shape[-1], 1)
    native = x.dtype == w.dtype and bias is None
    if native and (rows <= FEW or (x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())):
        return functional.linear(x, w)
    y = functional.linear(x.float(), w.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


class Floats:
    """A weight as numbers [N, K], for activations that are not quantized, or to e4m3, or to blocks of 4 and 8 bits.

    Args:
        w: packed weight. dtype: of activations.
    """

    def __init__(self, w: Packed, dtype: torch.dtype) -> None:
        if isinstance(w, WeightOnly):
            numerics = choose_way(w.format, w.scale_dtype, str(dtype)[6:], False).name
            exact = w.dequantize(numerics, dtype)
            self.weight = exact.to(dtype)
            if torch.equal(self.weight.double(), exact):
                return
        elif isinstance(w, W4Ax):  # in the order of its quantized activations
            held = w.unpack()
            exact = held.codes.double() * held.scales.double().repeat_interleave(BLOCK, 1)
        else:
            exact = w.dequantize()
        self.weight = exact.float()

    def __call__(self, x: Activations, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return linear(x, self.weight, bias)
        y = functional.linear(x.dequantize(), self.weight)
        return (y if bias is None else y + bias.float()).to(dtype)


class Integers:
    """A weight as int8 codes with a scale for each row, for int8 activations."""

    def __init__(self, w: W4A8 | W8A8, dtype: torch.dtype) -> None:
        held = w.unpack()
        codes = held.bytes() if isinstance(w, W4A8) else held.codes
        self.codes = functional.pad(codes, (0, padded(w.k) - w.k)).to(torch.int8).contiguous()
        self.scales = w.channel_scales[: w.n].double() if isinstance(w, W4A8) else held.scales.double()
        self.sums = self.codes.sum(1, dtype=torch.int64).double() if isinstance(w, W8A8) else None

    def __call__(self, x: Activations, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        sums = torch._int_mm(x.q.contiguous(), self.codes.t()).double()
        if getattr(x, "zeros", None) is not None:
            sums -= x.zeros.double()[:, None] * self.sums
        y = sums * self.scales * x.scales.double()[:, None]
        return (y if bias is None else y + bias.double()).to(dtype)


def dense(w: Packed, dtype: torch.dtype) -> Floats | Integers:
    """What multiplies activations of this dtype by a packed weight from now on."""
    global _told
    integers = isinstance(w, W4A8) or (isinstance(w, W8A8) and w.codes == "int8")
    with _lock:  # one thread tells, and one at a time needs the memory
        if not _told:
            _told = True
            said = "a CPU multiplies packed layers by torch, from a dequantized copy of each"
            warnings.warn(f"{said}: a reference for results, not for speed", RuntimeWarning, stacklevel=2)
        with torch.inference_mode(False), torch.no_grad():
            return (Integers if integers else Floats)(w, dtype)

"""Codes of decode's outputs, host side: which form, where they go, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import quantized, row_calls
from terrazzo.ops.attention.cache.launch import stand_ins

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


@dataclass(frozen=True)
class Coding:
    """Form of the codes, whether a smooth vector is given, and how scales of blocks lie."""

    quant: str
    smooth: bool = False
    column_scales: bool = False

    def params(self, target: Target) -> dict[str, Any]:
        """Arguments of the program's `build`."""
        quantized.check_codes_on(target, self.quant)
        return dict(output=self.quant, smooth=self.smooth, column_scales=self.column_scales)

    def room(self, q: torch.Tensor) -> QuantizedActivations | BlockQuantizedActivations:
        """Codes of the outputs of q [..., Hq, D], with nothing in them."""
        return quantized.allocate(q, (*q.shape[:-2], q.shape[-2] * q.shape[-1]), self.quant, self.column_scales)


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes that a launch makes: their form, the tensors, and the factors of columns or None."""

    coding: Coding
    made: QuantizedActivations | BlockQuantizedActivations
    inverse: torch.Tensor | None = None

    def arguments(self) -> tuple:
        """(XQ, XS, XR, SM) of the program."""
        codes, scales, sums = quantized.kernel_arguments(self.made)
        none = stand_ins(codes.device)
        factors = none["sinks"] if self.inverse is None else row_calls.vector(self.inverse)
        return codes, scales.view(-1), none["table"].view(-1) if sums is None else sums, factors


def coding_of(quant: str | None, smooth: bool, column_scales: bool) -> Coding | None:
    """The form that a call asks for.

    Raises:
        ArgumentError: another form than `quantized.QUANTS`; a smooth vector or column scales without one.
    """
    quantized.check_quant(quant, column_scales)
    if quant is None and smooth:
        raise ArgumentError("smooth", "given", "divides what is quantized", "pass quant, or leave it out")
    return None if quant is None else Coding(quant, smooth, column_scales)


def codes_for(q: torch.Tensor, quant: str | None, smooth: torch.Tensor | None, column_scales: bool) -> Codes | None:
    """Room for codes of the outputs of q [..., Hq, D], a row of Hq D values for each token; None without `quant`.

    Raises:
        ArgumentError: see `check`.
    """
    coding = check(q, quant, smooth, column_scales)
    if coding is None:
        return None
    return Codes(coding, coding.room(q), None if smooth is None else row_calls.inverse_of(smooth))


def check(q: torch.Tensor, quant: str | None, smooth: torch.Tensor | None, column_scales: bool) -> Coding | None:
    """The form that a call on q asks for.

    Raises:
        ArgumentError: see `coding_of`; a smooth vector that is not float [Hq D] on q's device.
    """
    coding = coding_of(quant, smooth is not None, column_scales)
    if coding is None:
        return None
    if q.dim() != 4:
        raise ArgumentError("q", list(q.shape), "must be [B, q_len, Hq, D] or, for one token, [B, Hq, D]", "reshape it")
    if smooth is not None:
        row_calls.check_vector(smooth, "smooth", (q.shape[-2] * q.shape[-1],), q.device)
    return coding


def encoded(
    out: torch.Tensor, quant: str, smooth: torch.Tensor | None, column_scales: bool
) -> QuantizedActivations | BlockQuantizedActivations:
    """The oracle: codes of outputs [..., Hq, D] in 16 bits, divided by `smooth` in float32."""
    shape = (*out.shape[:-2], out.shape[-2] * out.shape[-1])
    values = out.reshape(-1, shape[-1]).float()
    values = values if smooth is None else values * (1 / smooth.float())
    return quantized.encode(values, None, shape, quant, column_scales)

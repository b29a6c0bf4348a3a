"""Smoothing: divide activation channels with outliers by a vector, and fold that vector into the weight.

The vector is found by a grid search over two families on calibration activations, judged by what counts, the squared
error of the layer's output with both operands quantized:

    threshold t   smooth[k] = max(1, max_m |x[m, k]| / t)                         Outlier Suppression+, arXiv 2304.09145
    alpha         smooth[k] = max_m |x[m, k]|^alpha / max_n |w[n, k]|^(1 - alpha) SmoothQuant, arXiv 2211.10438
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, isfinite, log2
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.w4a8 import reference
from terrazzo.ops.w4a8.quantizer import quantize_weight

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import SupportsDLPack

MOST_STEPS = 1024
"""Of a search: each quantizes the weight once."""
_FAR = 2.0**20
"""Activations whose largest magnitude is above it, or below its reciprocal, are scaled by a power of two first."""
_TINY = 1e-5
"""Channels whose largest activation or weight is below this fraction of the tensor's are left as they are."""


@dataclass(frozen=True)
class SmoothSearch:
    """Result of `search_smooth`.

    Attributes:
        smooth: float32 [K], to be passed to `quantize`; None when nothing beats no smoothing.
        family: "none", "threshold" or "alpha"; parameter: the value of t / max |x|, or alpha.
        error: squared error of the output over that of the float output, with the vector found.
        plain_error: the same without smoothing.
    """

    smooth: torch.Tensor | None = field(repr=False)
    family: str
    parameter: float
    error: float
    plain_error: float


@dlpack.accepting
def search_smooth(
    x: SupportsDLPack,
    weight: SupportsDLPack,
    *,
    group_size: int = 64,
    rule: str = "best2",
    steps: int = 16,
    max_tokens: int = 512,
) -> SmoothSearch:
    """The smooth vector with the least output error on calibration activations.

    Args:
        x: float [..., K], calibration activations of this layer, on the weight's device; leading dimensions are tokens.
        weight: float [N, K].
        group_size, rule: as the weight will be quantized.
        steps: values tried in each family, at most MOST_STEPS; the thresholds fall geometrically from max |x| to the
            median channel's.
        max_tokens: tokens of x that are used, evenly spread.

    Raises:
        ArgumentError: shapes or devices that do not fit, x that is not finite, or outputs that leave float32.
    """
    weights.check_matrix(weight)
    weight, x = weight.detach(), _near_one(weights.as_tokens(x, weight).detach())
    weights.check_count("steps", steps, most=MOST_STEPS)
    weights.check_count("max_tokens", max_tokens)
    x_max, w_max = x.abs().amax(0).float(), weight.abs().amax(0).float()
    x = weights.spread_rows(x, max_tokens)
    wanted = x @ weight.float().T
    power = float(wanted.double().square().sum()) or 1.0
    if not isfinite(power):
        seen = f"up to {float(w_max.max()):g} beside activations up to {float(x_max.max()):g}"
        raise ArgumentError("weight", seen, "the layer's outputs must be finite in float32", "scale the weight down")

    def error(smooth: torch.Tensor | None) -> float:
        w = quantize_weight(weight, group_size=group_size, rule=rule, smooth=smooth)
        q, scales, _ = reference.quantize_activations(x, smooth)
        y = q.float() @ w.dequantize().float().T * scales[:, None]
        return float((y - wanted).double().square().sum()) / power

    plain = error(None)
    best = SmoothSearch(None, "none", 0.0, plain, plain)
    for family, parameter, smooth in _candidates(x_max, w_max, steps):
        found = error(smooth)
        if found < best.error:
            best = SmoothSearch(smooth, family, parameter, found, plain)
    return best


def _near_one(x: torch.Tensor) -> torch.Tensor:
    """x, or where squares of it may leave float32, x over a power of two: no error of an output depends on that."""
    largest = float(x.abs().max())
    if largest == 0 or 1 / _FAR <= largest <= _FAR:
        return x
    return (x.double() / 2.0 ** floor(log2(largest))).float()


def _candidates(x_max: torch.Tensor, w_max: torch.Tensor, steps: int):
    """(family, parameter, smooth) of the grid; channels that carry nothing keep 1."""
    largest, middle = float(x_max.max()), float(x_max.median())
    if largest == 0.0:
        return
    quiet = (x_max < _TINY * largest) | (w_max < _TINY * w_max.max())
    ratio = max(middle, _TINY * largest) / largest
    for step in range(1, steps + 1):
        share = ratio ** (step / steps)
        yield "threshold", share, (x_max / (share * largest)).clamp(min=1.0)
    for step in range(1, steps + 1):
        alpha = step / (steps + 1)
        smooth = x_max**alpha / w_max.clamp(min=1e-30) ** (1 - alpha)
        yield "alpha", alpha, smooth.masked_fill(quiet, 1.0).clamp(min=1e-5, max=1e5)

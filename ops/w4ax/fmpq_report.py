"""What FMPQ does to one layer: outliers, blocks, and the error of its output, as text and as a plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.products.converted import W4A8
from terrazzo.ops.products.mixed import W4AX
from terrazzo.ops.w4ax import reference
from terrazzo.ops.w4ax.fmpq import BLOCK, ActivationStatistics, BlockPlan, plan_blocks
from terrazzo.ops.w4ax.quantizer import quantize_weight

if TYPE_CHECKING:
    import torch

_MOST_TOKENS = 512


@dataclass(frozen=True)
class FmpqReport:
    """Made by `report`; print it, or `plot` it.

    Attributes:
        k, blocks, blocks8: input channels, blocks of 128, INT8 ones among them.
        outliers: channels above the threshold; touched: blocks that hold one in the channels' own order.
        threshold: of the magnitude.
        errors: relative error of the output, |y - x w^T| / |x w^T| in the Frobenius norm, for "w4a4", "w4ax", "w4a8"
            and "w4" (float activations).
        magnitude: float32 [K] of the channels, in the plan's order.
    """

    k: int
    blocks: int
    blocks8: int
    outliers: int
    touched: int
    threshold: float
    errors: dict[str, float]
    magnitude: torch.Tensor = field(repr=False, compare=False)

    @property
    def macs4(self) -> float:
        """Share of multiply-adds with both operands in 4 bits."""
        return 1 - self.blocks8 / self.blocks

    def __str__(self) -> str:
        lines = [
            f"channels      {self.k}, {self.blocks} blocks of {BLOCK}",
            f"outliers      {self.outliers} above {self.threshold:.4g}, in {self.touched} blocks before permutation",
            f"INT8 blocks   {self.blocks8} ({1 - self.macs4:.1%}), so W4A4 multiply-adds {self.macs4:.1%}",
        ]
        names = {"w4": "W4, float x", W4A8.word: "all W4A8", W4AX.word: "W4Ax", "w4a4": "all W4A4"}
        lines += [f"error         {names[name]:<12} {self.errors[name]:.5f}" for name in names if name in self.errors]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Write a picture: magnitude of the channels in the plan's order, INT8 blocks shaded, and the errors.

        Raises:
            ArgumentError: matplotlib is not installed, or the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ArgumentError("path", str(path), "needs matplotlib", "pip install terrazzo[bench]") from None
        figure = Figure(figsize=(10, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 1))
        left.semilogy(self.magnitude.clamp(min=1e-8).cpu().numpy(), ",", color="#34495e")
        left.axhline(self.threshold, color="#c0392b", linewidth=0.8, label="threshold")
        first = (self.blocks - self.blocks8) * BLOCK
        left.axvspan(first, self.blocks * BLOCK, color="#f1c40f", alpha=0.3, label=f"{self.blocks8} INT8 blocks")
        left.set(xlabel="channel, permuted", ylabel="largest |x|", xlim=(0, self.blocks * BLOCK))
        left.legend(loc="upper left", fontsize=8)
        right.bar(list(self.errors), list(self.errors.values()), color="#2980b9")
        right.set(ylabel="relative error of the output")
        try:
            figure.savefig(path, dpi=150)
        except (OSError, ValueError, AttributeError) as error:  # a folder, a suffix, or what is no path
            constraint = f"cannot be written ({error})"
            raise ArgumentError("path", str(path), constraint, "name a .png in a folder that exists") from None


def report(
    statistics: ActivationStatistics, plan: BlockPlan, weight: torch.Tensor, x: torch.Tensor, **quantizer: object
) -> FmpqReport:
    """Quantize a layer in every way that the plan chooses between and compare its outputs.

    Args:
        statistics, plan: of the layer's input.
        weight: float [N, K]. x: float [..., K], tokens that the error is measured on (at most 512, evenly spread).
        quantizer: further arguments of `quantize_weight`.

    Raises:
        ArgumentError: shapes or devices that do not fit, or values that are not finite.
    """
    import torch

    for name, value, kind in (("statistics", statistics, ActivationStatistics), ("plan", plan, BlockPlan)):
        if not isinstance(value, kind):
            raise ArgumentError(name, type(value).__name__, f"must be {kind.__name__}", "see terrazzo.ops.w4ax")
    _, k = weights.check_matrix(weight)
    if not k == plan.k == statistics.k:
        constraint = f"must be of the weight's {k} channels, as the statistics ({statistics.k})"
        raise ArgumentError("plan", plan.k, constraint, "pass those of one layer")
    x = weights.spread_rows(weights.as_tokens(x, weight), _MOST_TOKENS)
    wanted = x.double() @ weight.double().T
    norm = float(wanted.norm()) or 1.0
    both = plan_blocks(statistics, ratio=0.0), plan_blocks(statistics, ratio=1.0)
    plans = {"w4a4": both[0], W4AX.word: plan, W4A8.word: both[1]}
    errors = {}
    for name, each in plans.items():
        w = quantize_weight(weight, each, **quantizer)
        facts = dict(blocks8=each.blocks8, permutation=each.permutation)
        facts["granularity"] = "two_level" if w.two_level else "block"
        q, scales = reference.quantize_activations(x, **facts)
        errors[name] = float((reference.gemm(q, scales, w) - wanted).norm()) / norm
        if each is plan:
            errors["w4"] = float((x.double() @ w.dequantize().T - wanted).norm()) / norm
    return FmpqReport(
        k=plan.k,
        blocks=plan.blocks,
        blocks8=plan.blocks8,
        outliers=int(plan.outliers.sum()),
        touched=len(torch.nonzero(plan.outliers).flatten().div(BLOCK, rounding_mode="floor").unique()),
        threshold=plan.threshold,
        errors=errors,
        magnitude=plan.arrange(statistics.magnitude),
    )

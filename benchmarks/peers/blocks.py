"""Other packages' e4m3 products with scales of 128 x 128 blocks of the weight and of 128 columns of a token.

They multiply the very codes and scales that W8A8 multiplies, so that outputs are held against one float64 product.
Each wants the scales in an order of its own, which is made outside of the clock.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.byte_inputs import error
from benchmarks.peers.weights import missing_module

BLOCK = 128
MOST_ERROR = 0.01
"""Of an output in bfloat16, root mean square over that of the exact one; scales in another order are off by more."""


@dataclass(frozen=True)
class Blocks:
    """A weight as it is published. codes: float8_e4m3fn [N, K]. scales: float32 [N / 128, K / 128], rounded up."""

    codes: Any
    scales: Any

    @staticmethod
    def of(weight: Any) -> Blocks:
        """Of a `w8a8.QuantizedWeight` in blocks, whose scales are those of each row."""
        return Blocks(weight.codes, weight.scales[::BLOCK].contiguous())

    def rows(self, picked: Any) -> Any:
        """float64 of some rows."""
        scales = self.scales[picked // BLOCK].double().repeat_interleave(BLOCK, dim=1)
        return self.codes[picked].double() * scales[:, : self.codes.shape[1]]


def wrong(y: Any, x: Any, weight: Blocks) -> str:
    """Why an output is not the product of these operands, or ""; x: `BlockQuantizedActivations`."""
    import torch

    scales = x.scales.T[: len(x.q)] if x.column_scales else x.scales
    values = x.q[:, : x.k].float() * scales.repeat_interleave(BLOCK, dim=1)[:, : x.k]
    seen = error(y, (values, torch.ones(len(y), 1, device=y.device)), weight.rows)
    return "" if seen <= MOST_ERROR else f"off by {seen:.3g} of the output, root mean square"


class TorchBlocks:
    """torch's own product, of cuBLASLt. `fast`: torch's flag of sums that stay in the tensor core."""

    def __init__(self, fast: bool = False) -> None:
        self.fast, self.name = fast, "torch_fp8_blocks" + "_fast" * fast

    def missing(self) -> str:
        import torch

        has = hasattr(torch.nn.functional, "scaled_mm")
        return "" if has else f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"

    def calls(self, x: Any, weights: list[Blocks]) -> list[Callable[[], Any]]:
        import torch
        from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

        of_tokens = x.scales[:, : len(x.q)].contiguous().T
        of_blocks = pad(weights[0].scales, (0, -weights[0].scales.shape[1] % 4)).T
        none = SwizzleType.NO_SWIZZLE
        how = dict(swizzle_a=none, swizzle_b=none, output_dtype=torch.bfloat16, use_fast_accum=self.fast)

        def one(w: Blocks) -> Callable[[], Any]:
            scales = (of_tokens, ScalingType.BlockWise1x128, of_blocks, ScalingType.BlockWise128x128)
            return lambda: scaled_mm(x.q, w.codes.T, *scales, **how)

        return [one(w) for w in weights]


class VllmCutlass:
    """vLLM's cutlass_scaled_mm, which it takes for such layers where DeepGEMM is not installed."""

    name = "vllm_cutlass_blocks"

    def missing(self) -> str:
        return missing_module("vllm._custom_ops")

    def calls(self, x: Any, weights: list[Blocks]) -> list[Callable[[], Any]]:
        import torch

        run = importlib.import_module("vllm._custom_ops").cutlass_scaled_mm
        own = dict(out_dtype=torch.bfloat16, scale_a=x.scales[:, : len(x.q)].contiguous().T)
        return [lambda w=w: run(x.q, w.codes.T, scale_b=w.scales.T, **own) for w in weights]


class VllmTriton:
    """vLLM's kernel in Triton, with the tiles that vLLM was tuned to where it has a file for the shape."""

    name = "vllm_triton_blocks"
    module = "vllm.model_executor.layers.quantization.utils.fp8_utils"

    def missing(self) -> str:
        return missing_module(self.module)

    def calls(self, x: Any, weights: list[Blocks]) -> list[Callable[[], Any]]:
        import torch

        run = importlib.import_module(self.module).w8a8_triton_block_scaled_mm
        scales = x.scales[:, : len(x.q)].T.contiguous()
        how = dict(block_size=[BLOCK, BLOCK], output_dtype=torch.bfloat16)
        return [lambda w=w: run(x.q, w.codes, scales, w.scales, **how) for w in weights]


PEERS = (TorchBlocks(), TorchBlocks(fast=True), VllmCutlass(), VllmTriton())

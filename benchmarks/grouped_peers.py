"""Other packages' grouped products: vLLM's experts in Triton, on int4 weights.

They have a weight of their own, int4 without zero points, and which rows go to which expert is sorted outside of the
clock, as it is for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import missing_module

CHECKED = 16
"""Rows of the first and of the last expert with tokens that are compared."""
MOST_ERROR = 0.01
"""Of an output in bfloat16, root mean square over that of the exact one."""


@dataclass(frozen=True)
class Stack:
    """Weights of experts as the kernel reads them.

    Attributes:
        words: uint8 [E, N, K / 2], channel 2 j in the low bits of byte j; a code stands for itself less 8.
        scales: bfloat16 [E, N, K / group].
    """

    words: Any
    scales: Any

    def rows(self, expert: int) -> Any:
        """float64 [N, K] of one expert."""
        import torch

        words = self.words[expert]
        codes = torch.stack([words & 15, words >> 4], dim=-1).flatten(1).double() - 8
        return codes * self.scales[expert].double().repeat_interleave(codes.shape[1] // self.scales.shape[2], dim=1)


class TritonExperts:
    """vLLM's `fused_moe` kernel of W4A16, with the tiles that vLLM takes for a step; few rows for each expert go to
    its CUDA kernel, as in vLLM."""

    name = "vllm_triton"

    def missing(self) -> str:
        return missing_module("vllm.model_executor.layers.fused_moe.fused_moe")

    def load(self, experts: int, n: int, k: int, group: int) -> Stack:
        import torch

        words = torch.randint(0, 256, (experts, n, k // 2), device="cuda", dtype=torch.uint8)
        scales = (torch.rand(experts, n, k // group, device="cuda") * 0.02 + 0.001).bfloat16()
        return Stack(words, scales)

    def calls(
        self, x: Any, starts: list[int], stacks: list[Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """(a call for each copy of the weights, what they write [M, N]).

        Args:
            x: bfloat16 [M, K], rows by expert. starts: first row of each expert, and M. tokens, top_k: of the step,
                for the choice of tiles.
        """
        import torch
        from triton import language
        from vllm.model_executor.layers.fused_moe import fused_moe
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        (experts, n, _), m = stacks[0].words.shape, len(x)
        block = [0, x.shape[1] // stacks[0].scales.shape[2]]
        config = fused_moe.get_default_config(tokens, experts, n, x.shape[1], top_k, "int4_w4a16", block)
        counts = torch.tensor(starts).diff()
        ids = torch.repeat_interleave(torch.arange(experts), counts).int().cuda()[:, None]
        places = moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts)
        y = torch.full((m, 1, n), float("nan"), device=x.device, dtype=x.dtype)

        def one(stack: Stack) -> Callable[[], object]:
            return lambda: fused_moe.dispatch_fused_moe_kernel(
                x, stack.words, y, None, stack.scales, None, None, *places, False, 1, config,
                compute_type=language.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
                use_int4_w4a16=True, per_channel_quant=False, block_shape=block,
            )  # fmt: skip

        return [one(stack) for stack in stacks], y.squeeze(1)

    def wrong(self, y: Any, x: Any, starts: list[int], stack: Stack) -> str:
        """Against the float64 product of its own weights, on rows of two experts."""
        if bool(y.isnan().any()):
            return f"{int(y.isnan().sum())} elements of y are NaN"
        used = [e for e in range(len(starts) - 1) if starts[e] < starts[e + 1]]
        for e in {used[0], used[-1]}:
            rows = slice(starts[e], min(starts[e + 1], starts[e] + CHECKED))
            exact = x[rows].double() @ stack.rows(e).T
            off = float((y[rows].double() - exact).norm() / exact.norm())
            if not off <= MOST_ERROR:
                return f"expert {e}: off by {off:.3g} of the output, root mean square"
        return ""


PEERS = {"w4a16": (TritonExperts(),)}
"""Operator of grouped.py -> other packages' products beside it."""

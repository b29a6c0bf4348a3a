"""Other packages' grouped products: vLLM's experts in Triton, on int4 weights, and its two of MXFP4.

They have a weight of their own, int4 without zero points or e2m1 codes, and which rows go to which expert is sorted
outside of the clock, as it is for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.peers.weights import missing_module

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
        return wrong(y, x, starts, stack)


@dataclass(frozen=True)
class Mxfp4Stack:
    """MXFP4 weights of experts as published, and as a kernel reads them.

    Attributes:
        codes: uint8 [E, N, K / 2], channel 2 j in the low bits of byte j. exponents: uint8 [E, N, K / 32].
        made: what the kernel is given.
    """

    codes: Any
    exponents: Any
    made: tuple[Any, ...] = ()

    @staticmethod
    def random(experts: int, n: int, k: int) -> Mxfp4Stack:
        import torch

        own = dict(device="cuda", dtype=torch.uint8)
        scales = torch.randint(116, 122, (experts, n, k // 32), **own)
        return Mxfp4Stack(torch.randint(0, 256, (experts, n, k // 2), **own), scales)

    def rows(self, expert: int) -> Any:
        """float64 [N, K] of one expert."""
        import torch
        from terrazzo.ops.products.codes import MXFP4

        codes = self.codes[expert]
        table = torch.tensor(MXFP4.values, dtype=torch.float64, device=codes.device)
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]
        return values * torch.exp2(self.exponents[expert].double() - 127).repeat_interleave(32, dim=1)


class MarlinMxfp4:
    """vLLM's Marlin experts of MXFP4 on 16 bits, which is what it takes on an H100. N is padded to a multiple of 256
    and K to one of 128: Marlin has no tiles for gpt-oss's 2880, and vLLM pads as well."""

    name = "vllm_marlin"
    _utils = "vllm.model_executor.layers.quantization.utils"

    def missing(self) -> str:
        align = "vllm.model_executor.layers.fused_moe.moe_align_block_size"
        return missing_module("vllm._custom_ops", f"{self._utils}.marlin_utils_fp4", align)

    def load(self, experts: int, n: int, k: int, group: int) -> Mxfp4Stack:
        import torch

        ops, utils = import_module("vllm._custom_ops"), import_module(f"{self._utils}.marlin_utils")
        process = import_module(f"{self._utils}.marlin_utils_fp4").mxfp4_marlin_process_scales
        stack, wide, deep = Mxfp4Stack.random(experts, n, k), -n % 256, -k % 128
        pad = torch.nn.functional.pad
        codes, scales = pad(stack.codes, (0, deep // 2, 0, wide)), pad(stack.exponents, (0, deep // 32, 0, wide))
        facts, words, factors = dict(size_k=k + deep, size_n=n + wide), [], []
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        for one, exponents in zip(codes, scales):
            words.append(ops.gptq_marlin_repack(one.view(torch.int32).T.contiguous(), none, **facts, num_bits=4))
            own = exponents.view(torch.float8_e8m0fnu).bfloat16().T
            factors.append(process(utils.marlin_permute_scales(own, **facts, group_size=32)))
        return Mxfp4Stack(stack.codes, stack.exponents, (torch.stack(words), torch.stack(factors)))

    def calls(
        self, x: Any, starts: list[int], stacks: list[Mxfp4Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """See `TritonExperts.calls`."""
        import torch
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.scalar_type import scalar_types

        ops, utils = import_module("vllm._custom_ops"), import_module(f"{self._utils}.marlin_utils")
        (experts, n, half), m = stacks[0].codes.shape, len(x)
        wide, deep = n + -n % 256, 2 * half + -2 * half % 128
        block = next((size for size in (8, 16, 32, 48, 64) if m / experts / size < 0.9), 64)  # as vLLM chooses it
        ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(starts).diff()).int().cuda()[:, None]
        places = moe_align_block_size(ids, block, experts)
        given = torch.nn.functional.pad(x, (0, deep - 2 * half)).contiguous()
        y = torch.full((m, wide), float("nan"), device=x.device, dtype=x.dtype)
        ones, workspace = torch.ones(m, 1, device=x.device), utils.marlin_make_workspace_new(x.device, 4)

        def one(stack: Mxfp4Stack) -> Callable[[], object]:
            words, factors = stack.made
            return lambda: ops.moe_wna16_marlin_gemm(
                given, y, words, None, factors, None, None, None, None, None, workspace, *places, ones,
                moe_block_size=block, top_k=1, mul_topk_weights=False, b_q_type=scalar_types.float4_e2m1f, size_m=m,
                size_n=wide, size_k=deep, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
            )  # fmt: skip

        return [one(stack) for stack in stacks], y[:, :n]

    def wrong(self, y: Any, x: Any, starts: list[int], stack: Mxfp4Stack) -> str:
        return wrong(y, x, starts, stack)


class TritonMxfp4:
    """The `matmul_ogs` of Triton's own kernels, which gpt-oss came with, as vLLM 0.26 has it."""

    name = "vllm_triton_kernels"

    def missing(self) -> str:
        absent = missing_module("vllm.utils.import_utils")
        if not absent and not import_module("vllm.utils.import_utils").has_triton_kernels():
            absent = "vllm has no triton_kernels"
        return absent or missing_module("triton_kernels.matmul_ogs", "triton_kernels.routing")

    def load(self, experts: int, n: int, k: int, group: int) -> Mxfp4Stack:
        swizzle = import_module("vllm.model_executor.layers.quantization.utils.mxfp4_utils")._swizzle_mxfp4
        stack = Mxfp4Stack.random(experts, n, k)
        return Mxfp4Stack(stack.codes, stack.exponents, swizzle(stack.codes, stack.exponents))

    def calls(
        self, x: Any, starts: list[int], stacks: list[Mxfp4Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """See `TritonExperts.calls`."""
        import torch

        ogs, routing = import_module("triton_kernels.matmul_ogs"), import_module("triton_kernels.routing")
        experts, m = len(stacks[0].codes), len(x)
        counts = torch.tensor(starts).diff().int().cuda()
        data = routing.RoutingData(None, counts, experts, 1, routing.compute_expt_data(counts, experts, m))

        def one(stack: Mxfp4Stack, **more: Any) -> Callable[[], Any]:
            weight, flex, scale = stack.made
            config = ogs.PrecisionConfig(weight_scale=scale, flex_ctx=ogs.FlexCtx(rhs_data=flex))
            return lambda: ogs.matmul_ogs(x, weight, None, data, precision_config=config, **more)

        y = one(stacks[0])()
        y.fill_(float("nan"))
        return [one(stack, y=y) for stack in stacks], y.view(m, -1)

    def wrong(self, y: Any, x: Any, starts: list[int], stack: Mxfp4Stack) -> str:
        return wrong(y, x, starts, stack)


def wrong(y: Any, x: Any, starts: list[int], stack: Any) -> str:
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


PEERS = {"w4a16": (TritonExperts(),), "mxfp4": (MarlinMxfp4(), TritonMxfp4())}
"""Operator of grouped.py -> other packages' products beside it."""

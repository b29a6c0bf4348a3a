"""Other packages' grouped products: vLLM's experts by Marlin, humming and Triton on int4 weights, and two of MXFP4.

They have a weight of their own, int4 without zero points or e2m1 codes, and which rows go to which expert is sorted
outside of the clock, as it is for ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.peers.weights import EVERY_M, missing_module

FUSED = "vllm.model_executor.layers.fused_moe"
CHECKED = 16
"""Rows of the first and of the last expert with tokens that are compared."""
_TILES: dict[tuple[str, str], list[Any]] = {}
"""humming's tiles, by its words for a layer and the form of the product: they take seconds to list."""
MOST_ERROR = 0.01
"""Of an output in bfloat16, root mean square over that of the exact one."""


@dataclass(frozen=True)
class Stack:
    """Weights of experts as published, and as a kernel reads them.

    Attributes:
        words: uint8 [E, N, K / 2], channel 2 j in the low bits of byte j; a code stands for itself less 8, or is e2m1.
        scales: bfloat16 [E, N, K / group], or powers of two as uint8 [E, N, K / 32] of MXFP4.
        made: what the kernel is given.
    """

    words: Any
    scales: Any
    made: tuple[Any, ...] = ()

    @staticmethod
    def random(experts: int, n: int, k: int, group: int, mxfp4: bool = False) -> Stack:
        import torch

        own = dict(device="cuda", dtype=torch.uint8)
        words = torch.randint(0, 256, (experts, n, k // 2), **own)
        if mxfp4:
            return Stack(words, torch.randint(116, 122, (experts, n, k // 32), **own))
        return Stack(words, (torch.rand(experts, n, k // group, device="cuda") * 0.02 + 0.001).bfloat16())

    @property
    def mxfp4(self) -> bool:
        return not self.scales.is_floating_point()

    def rows(self, expert: int) -> Any:
        """float64 [N, K] of one expert."""
        import torch
        from terrazzo.ops.products.codes import MXFP4

        words, scales = self.words[expert], self.scales[expert].double()
        codes = torch.stack([words & 15, words >> 4], dim=-1).flatten(1)
        values, factors = codes.double() - 8, scales
        if self.mxfp4:
            values = torch.tensor(MXFP4.values, dtype=torch.float64, device=codes.device)[codes.int()]
            factors = torch.exp2(scales - 127)
        return values * factors.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1)


def places_of(starts: list[int], block: int) -> tuple[Any, ...]:
    """Rows of each expert in blocks, as vLLM sorts them for its own kernels and for humming's."""
    import torch
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    experts = len(starts) - 1
    ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(starts).diff()).int().cuda()[:, None]
    return moe_align_block_size(ids, block, experts)


class Peer:
    """One package's product."""

    name: str
    modules: tuple[str, ...] = ()

    def missing(self) -> str:
        return missing_module(*self.modules)

    def wrong(self, y: Any, x: Any, starts: list[int], stack: Stack) -> str:
        return wrong(y, x, starts, stack)


class TritonExperts(Peer):
    """vLLM's `fused_moe` kernel of W4A16, with the tiles that vLLM takes for a step; few rows for each expert go to
    its CUDA kernel, as in vLLM."""

    name = "vllm_triton"
    modules = (f"{FUSED}.fused_moe",)

    def load(self, experts: int, n: int, k: int, group: int) -> Stack:
        return Stack.random(experts, n, k, group)

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

        (experts, n, _), m = stacks[0].words.shape, len(x)
        block = [0, x.shape[1] // stacks[0].scales.shape[2]]
        config = fused_moe.get_default_config(tokens, experts, n, x.shape[1], top_k, "int4_w4a16", block)
        places = places_of(starts, config["BLOCK_SIZE_M"])
        y = torch.full((m, 1, n), float("nan"), device=x.device, dtype=x.dtype)

        def one(stack: Stack) -> Callable[[], object]:
            return lambda: fused_moe.dispatch_fused_moe_kernel(
                x, stack.words, y, None, stack.scales, None, None, *places, False, 1, config,
                compute_type=language.bfloat16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
                use_int4_w4a16=True, per_channel_quant=False, block_shape=block,
            )  # fmt: skip

        return [one(stack) for stack in stacks], y.squeeze(1)


class Marlin(Peer):
    """vLLM's Marlin experts on 16 bits, its default for 4-bit experts on an H100. N is padded to a multiple of 256 and
    K to one of 128: Marlin has no tiles for gpt-oss's 2880, and vLLM pads as well."""

    name = "vllm_marlin"
    _utils = "vllm.model_executor.layers.quantization.utils"
    modules = ("vllm._custom_ops", f"{_utils}.marlin_utils_fp4", f"{FUSED}.moe_align_block_size")

    def __init__(self, mxfp4: bool) -> None:
        self.mxfp4 = mxfp4

    def load(self, experts: int, n: int, k: int, group: int) -> Stack:
        import torch

        ops, utils = import_module("vllm._custom_ops"), import_module(f"{self._utils}.marlin_utils")
        process = import_module(f"{self._utils}.marlin_utils_fp4").mxfp4_marlin_process_scales
        stack, wide, deep = Stack.random(experts, n, k, group, self.mxfp4), -n % 256, -k % 128
        pad = torch.nn.functional.pad
        codes, scales = pad(stack.words, (0, deep // 2, 0, wide)), pad(stack.scales, (0, deep // group, 0, wide))
        facts, words, factors = dict(size_k=k + deep, size_n=n + wide), [], []
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        for one, own in zip(codes, scales):
            words.append(ops.gptq_marlin_repack(one.view(torch.int32).T.contiguous(), none, **facts, num_bits=4))
            own = own.view(torch.float8_e8m0fnu).bfloat16() if self.mxfp4 else own
            own = utils.marlin_permute_scales(own.T.contiguous(), **facts, group_size=group)
            factors.append(process(own) if self.mxfp4 else own)
        return Stack(stack.words, stack.scales, (torch.stack(words), torch.stack(factors)))

    def calls(
        self, x: Any, starts: list[int], stacks: list[Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """See `TritonExperts.calls`."""
        import torch
        from vllm.scalar_type import scalar_types

        ops, utils = import_module("vllm._custom_ops"), import_module(f"{self._utils}.marlin_utils")
        (experts, n, half), m = stacks[0].words.shape, len(x)
        wide, deep = n + -n % 256, 2 * half + -2 * half % 128
        block = next((size for size in (8, 16, 32, 48, 64) if m / experts / size < 0.9), 64)  # as vLLM chooses it
        places = places_of(starts, block)
        given = torch.nn.functional.pad(x, (0, deep - 2 * half)).contiguous()
        y = torch.full((m, wide), float("nan"), device=x.device, dtype=x.dtype)
        ones, workspace = torch.ones(m, 1, device=x.device), utils.marlin_make_workspace_new(x.device, 4)
        kind = scalar_types.float4_e2m1f if self.mxfp4 else scalar_types.uint4b8

        def one(stack: Stack) -> Callable[[], object]:
            words, factors = stack.made
            return lambda: ops.moe_wna16_marlin_gemm(
                given, y, words, None, factors, None, None, None, None, None, workspace, *places, ones,
                moe_block_size=block, top_k=1, mul_topk_weights=False, b_q_type=kind, size_m=m,
                size_n=wide, size_k=deep, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
            )  # fmt: skip

        return [one(stack) for stack in stacks], y[:, :n]


class Humming(Peer):
    """humming's experts, with the tile that it chooses for so many rows: "indexed", as vLLM takes them, or
    "grouped_contiguous", on rows that lie by expert."""

    modules = ("humming.layer", f"{FUSED}.moe_align_block_size")

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form

    def load(self, experts: int, n: int, k: int, group: int) -> Stack:
        import torch
        from humming.layer import HummingLayer

        stack, config = Stack.random(experts, n, k, group), {"dtype": "uint4", "group_size": group}
        facts = dict(shape_n=n, shape_k=k, num_experts=experts, input_config={}, torch_dtype=torch.bfloat16)
        layer = HummingLayer(weight_config={**config, "has_zero_point": False}, **facts).to("cuda")
        layer.load_from_tensors({"weight": stack.words.view(torch.int32), "weight_scale": stack.scales})
        layer.transform()
        return Stack(stack.words, stack.scales, (layer,))

    def calls(
        self, x: Any, starts: list[int], stacks: list[Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """See `TritonExperts.calls`."""
        import torch

        (_, n, _), m = stacks[0].words.shape, len(x)
        tile, y = tile_of(stacks[0].made[0], m, self.form), torch.full_like(x[:, :1], float("nan")).repeat(1, n)
        facts = dict(valid_shape_m=m, top_k=1, compute_config=json.dumps({"gemm_type": self.form}))
        if self.form == "indexed":
            found = places_of(starts, tile["block_shape"][0])
            facts |= dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), found))
        else:
            facts |= dict(expert_layout=torch.tensor(starts, device="cuda"))
        facts |= dict(tuning_config=json.dumps([[0, EVERY_M, tile]]), outputs=y)
        return [lambda layer=stack.made[0]: layer(inputs=x, **facts) for stack in stacks], y


def tile_of(layer: Any, m: int, form: str) -> dict[str, Any]:
    """humming's own choice for m rows."""
    from humming.layer import HummingLayerMethod

    key = (layer.humming_metas[""].to_str(), form)
    if key not in _TILES:
        _TILES[key] = HummingLayerMethod.get_default_tuning_configs(layer, gemm_type=form)
    (found,) = [tile for least, most, tile in _TILES[key] if least < m <= most]
    return found


class TritonMxfp4(Peer):
    """The `matmul_ogs` of Triton's own kernels, which gpt-oss came with, as vLLM 0.26 has it."""

    name = "vllm_triton_kernels"

    def missing(self) -> str:
        absent = missing_module("vllm.utils.import_utils")
        if not absent and not import_module("vllm.utils.import_utils").has_triton_kernels():
            absent = "vllm has no triton_kernels"
        return absent or missing_module("triton_kernels.matmul_ogs", "triton_kernels.routing")

    def load(self, experts: int, n: int, k: int, group: int) -> Stack:
        swizzle = import_module("vllm.model_executor.layers.quantization.utils.mxfp4_utils")._swizzle_mxfp4
        stack = Stack.random(experts, n, k, group, mxfp4=True)
        return Stack(stack.words, stack.scales, swizzle(stack.words, stack.scales))

    def calls(
        self, x: Any, starts: list[int], stacks: list[Stack], tokens: int, top_k: int
    ) -> tuple[list[Callable[[], object]], Any]:
        """See `TritonExperts.calls`."""
        import torch

        ogs, routing = import_module("triton_kernels.matmul_ogs"), import_module("triton_kernels.routing")
        experts, m = len(stacks[0].words), len(x)
        counts = torch.tensor(starts).diff().int().cuda()
        data = routing.RoutingData(None, counts, experts, 1, routing.compute_expt_data(counts, experts, m))

        def one(stack: Stack, **more: Any) -> Callable[[], Any]:
            weight, flex, scale = stack.made
            config = ogs.PrecisionConfig(weight_scale=scale, flex_ctx=ogs.FlexCtx(rhs_data=flex))
            return lambda: ogs.matmul_ogs(x, weight, None, data, precision_config=config, **more)

        y = one(stacks[0])()
        y.fill_(float("nan"))
        return [one(stack, y=y) for stack in stacks], y.view(m, -1)


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


PEERS = {
    "w4a16": (
        Marlin(mxfp4=False), Humming("humming", "indexed"), Humming("humming_grouped", "grouped_contiguous"),
        TritonExperts(),
    ),
    "mxfp4": (Marlin(mxfp4=True), TritonMxfp4()),
}  # fmt: skip
"""Operator of grouped.py -> other packages' products beside it."""

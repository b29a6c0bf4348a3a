"""Other packages' int4 weights with 8-bit activations: CUTLASS W4A8 and Marlin of vLLM, and humming.

Each has a weight of its own: int4 without zero points, a scale for each 128 k, made from the dense weight. So its
output is held against a float64 product of its own operands, as its kernel reads them. Activations are quantized
outside of the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.weights import Humming, Marlin, pack_rows, vllm_parts

GROUP = 128
ROWS, COLUMNS = 64, 512
"""Of an output that are compared, evenly spread."""
MOST_ERROR = 0.01
"""Of an output, root mean square over that of the exact one: sums in 14 bits and an output in bfloat16 stay below it, a
weight that is rounded to e4m3 in one of both only does not (0.02)."""


@dataclass(frozen=True)
class Int4:
    """codes: int8 [N, K] of -8..7. scales: float32 [N, K / 128]."""

    codes: Any
    scales: Any

    @staticmethod
    def of(dense: Any) -> Int4:
        groups = dense.float().unflatten(1, (-1, GROUP))
        scales = (groups.abs().amax(-1) / 7).clamp(min=1e-12)
        codes = (groups / scales[..., None]).round_().clamp_(-8, 7).char()
        return Int4(codes.flatten(1), scales)

    def rows(self, scales: Any, picked: Any) -> Any:
        """float64 of some rows under other scales [N, K / 128], as they were rounded."""
        return self.codes[picked].double() * scales[picked].double().repeat_interleave(GROUP, dim=1)


@dataclass(frozen=True)
class Loaded:
    """One copy of a peer's weight.

    Attributes:
        call: (codes of x, scales of x [M, 1]) -> y [M, N].
        rows: numbers of rows of the weight -> their float64 values, as the kernel reads them, less `factor`.
        factor: of the whole weight, which the kernel takes with the scales of x.
    """

    call: Callable[[Any, Any], Any]
    rows: Callable[[Any], Any]
    factor: Any = 1.0


def spread(size: int, most: int, device: Any) -> Any:
    import torch

    return torch.linspace(0, size - 1, min(size, most), device=device, dtype=torch.float64).round().long()


def error(y: Any, x: tuple[Any, Any], rows: Callable[[Any], Any]) -> float:
    """Root mean square of the difference to the exact product, over that of the product; NaN counts as infinity."""
    tokens, columns = spread(y.shape[0], ROWS, y.device), spread(y.shape[1], COLUMNS, y.device)
    codes, scales = x[0].float()[tokens].double(), x[1][tokens].double()
    exact = codes @ rows(columns).T * scales
    seen = (y[tokens][:, columns].double() - exact).norm() / exact.norm()
    return float(seen.nan_to_num(float("inf")))


class _Peer:
    """What these peers share: `codes` of x, and the check."""

    codes = "int8"

    def prepare(self, x: Any, loaded: Loaded) -> tuple[Any, Any]:
        import torch

        most = 127.0 if self.codes == "int8" else 448.0
        scales = (x.float().abs().amax(-1, keepdim=True) / most).clamp(min=1e-12)
        values = x.float() / scales
        codes = values.round().char() if self.codes == "int8" else values.to(torch.float8_e4m3fn)
        return codes, scales * loaded.factor

    def call(self, x: tuple[Any, Any], loaded: Loaded) -> Any:
        return loaded.call(*x)

    def wrong(self, y: Any, x: Any, loaded: Loaded) -> str:
        """Against the float64 product of its own operands."""
        seen = error(y, self.prepare(x, loaded), loaded.rows)
        return "" if seen <= MOST_ERROR else f"off by {seen:.3g} of the output, root mean square"


class CutlassW4A8(_Peer):
    """vLLM's cutlass_w4a8_mm on e4m3. Scales are e4m3 under a float of the row. A code times its scale is rounded to
    e4m3 once more: a table in the kernel has the products."""

    name, codes, package = "vllm_cutlass", "e4m3", Marlin.package
    missing = Marlin.missing
    modules = ("vllm._custom_ops",)

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        import torch

        ops, held = vllm_parts().ops, Int4.of(dense)
        factors = held.scales.amax(1, keepdim=True) / 56  # 8 times it is within e4m3, as the table needs
        scales = (held.scales / factors).to(torch.float8_e4m3fn)
        words = pack_rows(held.codes.byte() & 15).t().contiguous().t()
        words = ops.cutlass_encode_and_reorder_int4b(words)
        packed = ops.cutlass_pack_scale_fp8(scales.T.contiguous())

        def rows(picked: Any) -> Any:
            return held.rows(scales.float(), picked).to(torch.float8_e4m3fn).double() * factors[picked].double()

        def one() -> Loaded:
            own = dict(b_q=words.clone(), b_group_scales=packed.clone(), b_group_size=GROUP, b_channel_scales=factors)
            return Loaded(lambda x, s: ops.cutlass_w4a8_mm(a=x, a_token_scales=s, **own), rows)

        return [one() for _ in range(copies(words.numel() * 4 + packed.numel()))]


class MarlinInt8(_Peer):
    """vLLM's Marlin on int8. A scale is an integer up to 4096, under one float for all of the weight."""

    name, package = "vllm_marlin_int8", Marlin.package
    missing, modules = Marlin.missing, Marlin.modules

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        import torch

        part, held, (n, k) = vllm_parts(), Int4.of(dense), dense.shape
        words = part.ops.gptq_marlin_repack(pack_rows((held.codes + 8).byte()), part.empty, k, n, 4, True)
        scales = held.scales.T.contiguous().to(dense.dtype)
        permuted = part.utils.marlin_permute_scales(scales, k, n, GROUP, is_a_8bit=True)
        permuted, factor = part.utils.marlin_act_int8_process_scales(permuted)
        integers, _ = part.utils.marlin_act_int8_process_scales(scales)
        integers = integers.view(torch.int16).T.float()
        fixed = dict(
            c=None, b_bias=None, global_scale=None, b_zeros=part.empty, g_idx=part.empty, perm=part.empty,
            workspace=part.utils.marlin_make_workspace_new(words.device), b_q_type=part.type, size_n=n, size_k=k,
            is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip

        def rows(picked: Any) -> Any:
            return held.rows(integers, picked)

        def one() -> Loaded:
            own = {**fixed, "b_q_weight": words.clone(), "b_scales": permuted.clone()}
            run = part.ops.marlin_gemm
            return Loaded(lambda x, s: run(a=x, size_m=x.shape[0], a_scales=s, **own), rows, factor)

        return [one() for _ in range(copies(words.numel() * 4 + permuted.numel() * 2))]


class HummingBytes(_Peer):
    """humming on int8 or e4m3. `integers`, of int8: scales are integers up to 1024 under one float for all of the
    weight; vLLM does not ask for it."""

    package, missing = Humming.package, Humming.missing

    def __init__(self, codes: str, integers: bool = False) -> None:
        self.codes, self.integers = codes, integers
        self.name = f"humming_w4a8_{codes}" + "_integers" * integers

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        held = Int4.of(dense)
        scales = held.scales.to(dense.dtype)
        seen = scales.float()
        if self.integers:
            step = seen.max() / 1024
            seen = (seen / step).round() * step
        asked = {"dtype": {"int8": "int8", "e4m3": "float8e4m3"}[self.codes]}
        facts = {"group_size": GROUP, "group_size_n": int(self.integers)}

        def one() -> Loaded:
            layer = Humming.layer((held.codes + 8).byte(), scales, None, facts, dense.dtype, asked)
            return Loaded(lambda x, s: Humming.run(layer, x, input_scale=s), lambda picked: held.rows(seen, picked))

        return [one() for _ in range(copies(dense.numel() // 2))]


INT8_PEERS = (MarlinInt8(), HummingBytes("int8"), HummingBytes("int8", integers=True), CutlassW4A8())
"""Beside W4A8 on int8: those of the same bits, and CUTLASS's on e4m3."""
FP8_PEERS = (CutlassW4A8(), HummingBytes("e4m3"))

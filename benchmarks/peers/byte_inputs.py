"""Other int4 weights with 8-bit activations: CUTLASS W4A8 and Marlin of vLLM, humming, QServe's, and our own W4A8.

Each has a weight of its own: int4, made from the dense weight. So its output is held against a float64 product of its
own operands, as its kernel reads them. Activations are quantized outside of the clock, and once more inside of it by
the kernel that vLLM takes.
"""

from __future__ import annotations

import importlib
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.weights import Humming, Marlin, pack_rows, vllm_parts

GROUP = 128
ROWS, COLUMNS = 64, 512
"""Of an output that are compared, evenly spread."""
MOST_ERROR = 0.01
"""Of an output, root mean square over that of the exact one: sums in 14 bits and an output in bfloat16 stay below it, a
weight that is rounded to e4m3 in one of both only does not (0.02)."""
QSERVE = Path(__file__).parents[2] / ".peers" / "qserve.so"
"""The operators of sglang-kernel, which tools/pack_qserve.py puts there with the suffix .xz."""


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
        factor: of the whole weight, which the kernel takes with the scales of x; None for 1.
    """

    call: Callable[[Any, Any], Any]
    rows: Callable[[Any], Any]
    factor: Any = None


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


def off(seen: float) -> str:
    """What an `error` says of an output, or ""."""
    return "" if seen <= MOST_ERROR else f"off by {seen:.3g} of the output, root mean square"


def codes_of(x: Any, codes: str) -> tuple[Any, Any]:
    """Codes and scales [M, 1] of x, by plain torch: a scale for each token."""
    import torch

    scales = (x.float().abs().amax(-1, keepdim=True) / (127.0 if codes == "int8" else 448.0)).clamp(min=1e-12)
    values = x.float() / scales
    return values.round().char() if codes == "int8" else values.to(torch.float8_e4m3fn), scales


def vllm_codes_of(x: Any, codes: str) -> tuple[Any, Any]:
    """The same by vLLM's kernel."""
    ops = importlib.import_module("vllm._custom_ops")
    return ops.scaled_int8_quant(x)[:2] if codes == "int8" else ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)


class Rows:
    """What peers with a scale for each token share: `codes` of x, and the check."""

    codes = "int8"

    def prepare(self, x: Any, loaded: Loaded, by: Callable[[Any, str], tuple[Any, Any]] = codes_of) -> tuple[Any, Any]:
        codes, scales = by(x, self.codes)
        return codes, scales if loaded.factor is None else scales * loaded.factor

    def quantize(self, x: Any, loaded: Loaded) -> tuple[Any, Any]:
        return self.prepare(x, loaded, vllm_codes_of)

    def call(self, x: tuple[Any, Any], loaded: Loaded) -> Any:
        return loaded.call(*x)

    def wrong(self, y: Any, x: Any, loaded: Loaded) -> str:
        """Against the float64 product of its own operands."""
        return off(error(y, self.prepare(x, loaded), loaded.rows))


class CutlassW4A8(Rows):
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


class MarlinInt8(Rows):
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
            workspace=part.utils.marlin_make_workspace_new(words.device), b_q_type=part.types.uint4b8, size_n=n,
            size_k=k, is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip

        def one() -> Loaded:
            own = {**fixed, "b_q_weight": words.clone(), "b_scales": permuted.clone()}
            call = lambda x, s: part.ops.marlin_gemm(a=x, size_m=x.shape[0], a_scales=s, **own)
            return Loaded(call, lambda picked: held.rows(integers, picked), factor)

        return [one() for _ in range(copies(words.numel() * 4 + permuted.numel() * 2))]


class HummingBytes(Rows):
    """humming on int8 or e4m3. `integers`, of int8: scales are integers up to 1024 under one float for all of the
    weight; vLLM does not ask for it."""

    package, missing = Humming.package, Humming.missing

    def __init__(self, codes: str, integers: bool = False) -> None:
        self.codes, self.integers = codes, integers
        self.name = f"humming_w4a8_{codes}" + "_integers" * integers

    def layers(self, weight: Any, dtype: Any) -> Callable[[], Any]:
        """Makes a layer of an `Int4`."""
        asked = {"dtype": {"int8": "int8", "e4m3": "float8e4m3"}[self.codes]}
        facts = {"dtype": "uint4", "group_size": GROUP, "group_size_n": int(self.integers)}
        words = pack_rows((weight.codes + 8).byte()).T.contiguous()
        return lambda: Humming.layer(words, weight.scales.to(dtype), None, facts, dtype, asked)

    def small(self, weight: Any, dense: Any) -> Int4:
        """What `layers` takes."""
        return Int4.of(dense)

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        held = Int4.of(dense)
        seen = held.scales.to(dense.dtype).float()
        if self.integers:
            step = seen.max() / 1024
            seen = (seen / step).round() * step
        make = self.layers(held, dense.dtype)

        def one() -> Loaded:
            layer = make()
            return Loaded(lambda x, s: Humming.run(layer, x, input_scale=s), lambda picked: held.rows(seen, picked))

        return [one() for _ in range(copies(dense.numel() // 2))]


class QServe(Rows):
    """QServe's kernel, of sglang-kernel: a scale and a zero point in 8 bits for each 128 k under a float of the row, or
    a scale and a zero point of the row alone. Outputs are float16."""

    package = "sglang-kernel"

    def __init__(self, grouped: bool) -> None:
        self.grouped = grouped
        self.name = "qserve_group" if grouped else "qserve_channel"

    def missing(self) -> str:
        import torch

        packed = QSERVE.with_suffix(".so.xz")
        if not (QSERVE.is_file() or packed.is_file()):
            return "no .peers/qserve.so.xz here: python tools/pack_qserve.py makes it"
        try:
            if not QSERVE.is_file():
                QSERVE.write_bytes(lzma.decompress(packed.read_bytes()))
            torch.ops.load_library(str(QSERVE))
        except (OSError, lzma.LZMAError) as error:
            return f"{QSERVE.name} does not load: {' '.join(str(error).split())}"[:200]
        return ""

    @staticmethod
    def words(codes: Any) -> Any:
        """Codes [N, K] of 0..15 as the kernel reads them, int8 [N, K / 2]: tiles of 32 rows and 32 k. A byte has rows
        n and n + 16, in its low and in its high bits."""
        n, k = codes.shape
        tiles = codes.view(n // 32, 2, 2, 8, k // 32, 2, 4, 4).permute(0, 4, 3, 6, 5, 2, 7, 1)
        return (tiles[..., 0] | tiles[..., 1] << 4).reshape(n, k // 2).contiguous()

    @staticmethod
    def parameters(each: Any) -> Any:
        """Parameters [N, G] as the kernel reads them, [G, N]: of 32 rows, those eight apart stand together."""
        n, groups = each.shape
        return each.T.view(groups, n // 32, 4, 8).transpose(2, 3).reshape(groups, n).contiguous()

    def weight(self, dense: Any) -> tuple[Any, Any, Any, Any]:
        """uint8 codes [N, K]; int scales and zero points [N, G] of them; float16 scales [N] of rows."""
        import torch

        values, size = dense.float(), GROUP if self.grouped else dense.shape[1]
        rows = torch.ones(len(values), 1, device=dense.device)
        if self.grouped:
            rows = (values.abs().amax(1, keepdim=True) / 119).half().float()  # codes times scales stay within 8 bits
            values = (values / rows).round().clamp(-119, 119)
        groups = values.unflatten(1, (-1, size))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((high - low) / 15).clamp(min=1e-12)
        scales = scales.round().clamp(min=1) if self.grouped else scales.half().float()
        zeros = -(low / scales).round()
        codes = ((groups / scales).round() + zeros).clamp(0, 15).byte().flatten(1)
        return codes, scales[..., 0], zeros[..., 0], (rows if self.grouped else scales[:, 0]).half().flatten()

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        import torch

        codes, scales, zeros, of_rows = self.weight(dense)
        words, n, ops = self.words(codes).view(torch.int8), len(dense), torch.ops.sgl_kernel

        def values(picked: Any) -> Any:
            part = codes[picked].double().unflatten(1, (scales.shape[1], -1)) - zeros[picked].double()[..., None]
            part = part * scales[picked].double()[..., None]
            return part.flatten(1) * (of_rows[picked].double()[:, None] if self.grouped else 1)

        packed = [self.parameters(each).char() for each in (-zeros * scales, scales)] if self.grouped else []
        offset = None if self.grouped else (zeros[:, 0] * of_rows.float()).half()

        def one() -> Loaded:
            own, planes = words.clone(), [plane.clone() for plane in packed]

            def call(x: Any, s: Any) -> Any:
                scales, sums = s
                y = torch.empty(len(x), n, dtype=torch.float16, device=x.device)
                if self.grouped:
                    ops.qserve_w4a8_per_group_gemm(x, own, *planes, of_rows, scales, y)
                else:
                    ops.qserve_w4a8_per_chn_gemm(x, own, of_rows, scales, offset, sums, y)
                return y

            return Loaded(call, values)

        return [one() for _ in range(copies(words.numel()))]

    def prepare(self, x: Any, loaded: Loaded, by: Callable[[Any, str], tuple[Any, Any]] = codes_of) -> tuple[Any, Any]:
        codes, scales = by(x, "int8")
        sums = None if self.grouped else x.sum(1, dtype=x.dtype) if by is vllm_codes_of else self.sums(codes, scales)
        return codes, (scales.half().flatten(), sums)

    @staticmethod
    def sums(codes: Any, scales: Any) -> Any:
        """Of x as it is quantized, which the offset of a row's zero point is multiplied by."""
        return (codes.float().sum(1) * scales.flatten()).half()

    def wrong(self, y: Any, x: Any, loaded: Loaded) -> str:
        codes, (scales, _) = self.prepare(x, loaded)
        return off(error(y, (codes, scales[:, None]), loaded.rows))


class OurW4A8(Rows):
    """Our own W4A8, of groups of 128: what formats of more work for the same bytes are compared with."""

    name = "terrazzo_w4a8"

    def missing(self) -> str:
        return ""

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        from terrazzo.ops import w4a8

        made = w4a8.quantize_weight(dense, group_size=GROUP, rule="nearest")
        each = [made.pack() for _ in range(copies(dense.numel() // 2))]
        return [Loaded(packed, lambda picked: made.dequantize()[picked].double()) for packed in each]

    def prepare(self, x: Any, loaded: Loaded, by: Any = None) -> Any:
        from terrazzo.ops import w4a8

        return w4a8.quantize_activations(x)

    def quantize(self, x: Any, loaded: Loaded) -> Any:
        return x

    def call(self, x: Any, loaded: Loaded) -> Any:
        import torch
        from terrazzo.ops import w4a8

        return w4a8.gemm(x, loaded.call, **({} if torch.is_tensor(x) else {"out_dtype": torch.float16}))

    def wrong(self, y: Any, x: Any, loaded: Loaded) -> str:
        made = self.prepare(x, loaded)
        return off(error(y, (made.q[:, : x.shape[1]], made.scales[:, None]), loaded.rows))


INT8_PEERS = (
    QServe(grouped=True), QServe(grouped=False), MarlinInt8(), HummingBytes("int8"),
    HummingBytes("int8", integers=True), CutlassW4A8(),
)  # fmt: skip
"""Of W4A8 on int8: the same bits, and CUTLASS's on e4m3."""
FP8_PEERS = (CutlassW4A8(), HummingBytes("e4m3"))

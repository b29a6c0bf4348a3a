"""Products of bytes by bytes: torch's own, vLLM's scaled ones, and those with scales of blocks.

Weights are 8 bits wide, made from the dense weight, with blocks the very codes and scales that W8A8 multiplies. Outputs
are held against a float64 product of their own operands. Scales are brought into the order that each wants outside of
the clock.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.byte_inputs import Loaded, Rows, codes_of, error, off
from benchmarks.peers.weights import UTILS, missing_module

BLOCK = 128


class TorchFp8(Rows):
    """torch._scaled_mm on e4m3 with one scale for each tensor, or for each row."""

    codes = "e4m3"

    def __init__(self, rows: bool = False) -> None:
        self.rows, self.name = rows, "torch_fp8" + "_rows" * rows

    def missing(self) -> str:
        import torch

        if not hasattr(torch, "_scaled_mm") or not torch.cuda.is_available():
            return "this torch has no _scaled_mm, or there is no GPU"
        return "" if torch.cuda.get_device_capability() >= (8, 9) else "fp8 needs compute capability 8.9"

    def of(self, values: Any) -> tuple[Any, Any]:
        """Codes, and scales [N, 1] or [1, 1]."""
        import torch

        if self.rows:
            return codes_of(values, "e4m3")
        scale = (values.abs().amax().float() / 448.0).clamp(min=1e-12).view(1, 1)
        return (values.float() / scale).to(torch.float8_e4m3fn), scale

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        import torch

        dtype = torch.bfloat16 if self.rows else dense.dtype  # by rows, torch writes bfloat16 alone
        codes, scales = self.of(dense)
        values = lambda picked: codes[picked].double() * scales.expand(len(codes), 1)[picked].double()

        def one() -> Loaded:
            own, by = codes.clone(), scales.T.contiguous()
            call = lambda x, s: torch._scaled_mm(x, own.T, scale_a=s, scale_b=by, out_dtype=dtype)
            return Loaded(call, values)

        return [one() for _ in range(copies(codes.numel()))]

    def prepare(self, x: Any, loaded: Loaded, by: Any = None) -> tuple[Any, Any]:
        return self.of(x)

    def quantize(self, x: Any, loaded: Loaded) -> tuple[Any, Any]:
        ops = importlib.import_module("vllm._custom_ops")
        codes, scales = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=self.rows)
        return codes, scales.view(-1, 1)

    def wrong(self, y: Any, x: Any, loaded: Loaded) -> str:
        codes, scales = self.prepare(x, loaded)
        return off(error(y, (codes, scales.expand(len(codes), 1)), loaded.rows))


class TorchInt8:
    """torch._int_mm: int8 times int8 to int32, no scales applied (a lower bound for W8A8)."""

    name = "torch_int8"

    def missing(self) -> str:
        import torch

        return "" if hasattr(torch, "_int_mm") and torch.cuda.is_available() else "this torch has no _int_mm"

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        codes, _ = codes_of(dense, "int8")
        return [codes.clone() for _ in range(copies(codes.numel()))]

    def prepare(self, x: Any, loaded: Any) -> Any:
        return codes_of(x, "int8")[0]

    def call(self, x: Any, loaded: Any) -> Any:
        import torch

        return torch._int_mm(x, loaded.T)

    def wrong(self, y: Any, x: Any, loaded: Any) -> str:
        right = self.prepare(x[:64], loaded).double() @ loaded[:512].double().T
        return "" if bool((y[:64, :512].double() == right).all()) else "sums are not exact"


class VllmScaled(Rows):
    """vLLM's cutlass_scaled_mm, a scale for each token and each row: what it takes for W8A8."""

    package = "vllm"

    def __init__(self, codes: str) -> None:
        self.codes, self.name = codes, f"vllm_scaled_{codes}"

    def missing(self) -> str:
        return missing_module("vllm._custom_ops")

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Loaded]:
        run = importlib.import_module("vllm._custom_ops").cutlass_scaled_mm
        codes, scales = codes_of(dense, self.codes)
        values = lambda picked: codes[picked].double() * scales[picked].double()

        def one() -> Loaded:
            own = codes.clone()
            return Loaded(lambda x, s: run(x, own.T, scale_a=s, scale_b=scales, out_dtype=dense.dtype), values)

        return [one() for _ in range(copies(codes.numel()))]


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


def block_codes_of(x: Any) -> tuple[Any, Any]:
    """e4m3 codes of x, and scales [M, K / 128] of 128 columns of a token."""
    codes, scales = codes_of(x.unflatten(1, (-1, BLOCK)), "e4m3")
    return codes.flatten(1), scales[..., 0]


class _Blocks(ABC):
    """What products with blocks share. `loaded`: call(codes, scales [M, K / 128], column by column), and the weight."""

    def load(self, weight: Any, dense: Any, copies: Callable[[int], int]) -> list[Any]:
        held = Blocks.of(weight)
        return [
            (self.call_of(Blocks(held.codes.clone(), held.scales)), held) for _ in range(copies(held.codes.numel()))
        ]

    def prepare(self, x: Any, loaded: Any) -> tuple[Any, Any]:
        codes, scales = block_codes_of(x)
        return codes, scales.T.contiguous().T

    def quantize(self, x: Any, loaded: Any) -> tuple[Any, Any]:
        run = importlib.import_module(f"{UTILS}.fp8_utils").per_token_group_quant_fp8
        return run(x, BLOCK, column_major_scales=True)

    def call(self, x: tuple[Any, Any], loaded: Any) -> Any:
        return loaded[0](*x)

    def wrong(self, y: Any, x: Any, loaded: Any) -> str:
        """Why an output is not the product of these operands, or ""."""
        import torch

        codes, scales = self.prepare(x, loaded)
        values = codes.float() * scales.repeat_interleave(BLOCK, dim=1)
        return off(error(y, (values, torch.ones(len(y), 1, device=y.device)), loaded[1].rows))

    @abstractmethod
    def call_of(self, w: Blocks) -> Callable[[Any, Any], Any]:
        """The product with a weight, of codes and scales."""


class TorchBlocks(_Blocks):
    """torch's own product, of cuBLASLt. `fast`: torch's flag of sums that stay in the tensor core."""

    def __init__(self, fast: bool = False) -> None:
        self.fast, self.name = fast, "torch_fp8_blocks" + "_fast" * fast

    def missing(self) -> str:
        import torch

        has = hasattr(torch.nn.functional, "scaled_mm")
        return "" if has else f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"

    def call_of(self, w: Blocks) -> Callable[[Any, Any], Any]:
        import torch
        from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

        of_blocks, none = pad(w.scales, (0, -w.scales.shape[1] % 4)).T, SwizzleType.NO_SWIZZLE
        how = dict(swizzle_a=none, swizzle_b=none, output_dtype=torch.bfloat16, use_fast_accum=self.fast)
        at = (ScalingType.BlockWise1x128, of_blocks, ScalingType.BlockWise128x128)
        return lambda x, s: scaled_mm(x, w.codes.T, s, *at, **how)


class VllmCutlass(_Blocks):
    """vLLM's cutlass_scaled_mm, which it takes for such layers where DeepGEMM is not installed."""

    name, package = "vllm_cutlass_blocks", "vllm"

    def missing(self) -> str:
        return missing_module("vllm._custom_ops")

    def call_of(self, w: Blocks) -> Callable[[Any, Any], Any]:
        import torch

        run = importlib.import_module("vllm._custom_ops").cutlass_scaled_mm
        return lambda x, s: run(x, w.codes.T, scale_a=s, scale_b=w.scales.T, out_dtype=torch.bfloat16)


class VllmTriton(_Blocks):
    """vLLM's kernel in Triton, with the tiles that vLLM was tuned to where it has a file for the shape."""

    name, package, module = "vllm_triton_blocks", "vllm", f"{UTILS}.fp8_utils"

    def missing(self) -> str:
        return missing_module(self.module)

    def call_of(self, w: Blocks) -> Callable[[Any, Any], Any]:
        import torch

        run = importlib.import_module(self.module).w8a8_triton_block_scaled_mm
        how = dict(block_size=[BLOCK, BLOCK], output_dtype=torch.bfloat16)
        return lambda x, s: run(x, w.codes, s, w.scales, **how)


INT8 = (TorchInt8(), VllmScaled("int8"))
FP8 = (TorchFp8(), TorchFp8(rows=True), VllmScaled("e4m3"))
BLOCKS = (TorchBlocks(), TorchBlocks(fast=True), VllmCutlass(), VllmTriton())

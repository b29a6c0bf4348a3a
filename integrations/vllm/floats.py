"""Weights of MXFP4 and of FP8 alone, with 16-bit activations: in front of vLLM's own kernels for them."""

from __future__ import annotations

import logging

import torch
from terrazzo.integrations.engines import kernels, weights
from terrazzo.integrations.engines.weights import Facts, Wanted
from terrazzo.integrations.vllm.engine import VLLM, put_first
from terrazzo.lowering.errors import ArgumentError
from vllm.model_executor.kernels import linear as engine


def _supported() -> tuple[bool, str | None]:
    """Whether this process's device is one of ours; layers of all sizes are, and vLLM asks before it knows them."""
    how = VLLM.settings()
    reason = "additional_config.terrazzo.linear is false" if not how.linear else VLLM.declined_here(how)
    if reason is None and VLLM.target() is not None and how.bundle is None:
        layer = Wanted(4096, 4096, 4096, 128, False, False, "bfloat16", "16", "uint4b8")
        reason = VLLM.uncompiled(how, kernels.requests_of(layer, True, False, 1, VLLM.target()))
    return reason is None, reason


class TerrazzoMxFp4LinearKernel(engine.MxFp4LinearKernel):
    """MXFP4 layers of compressed-tensors: e2m1 codes, a power of two for each 32 input channels."""

    facts: Facts = ()

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _supported()

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        if getattr(config, "activation_quant_key", None) is not None:
            VLLM.once(logging.INFO, "activations of MXFP4 layers stay in 16 bits")
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        from terrazzo.ops import mxfp4

        packed = mxfp4.pack(weights.nibbles_of(layer.weight.data), layer.weight_scale.data)
        self.facts = VLLM.hold(layer, ("weight", "weight_scale"), packed, layer.params_dtype)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weights.product(x, layer.weight, layer.weight_scale, bias, self.facts)


class TerrazzoFp8WeightLinearKernel(engine.FP8ScaledMMLinearKernel):
    """FP8 layers whose activations have 16 bits: scales of rows, or of blocks of 128 x 128."""

    facts: Facts = ()

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return _supported()

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        from terrazzo.ops import fp8

        blocks = hasattr(layer, "weight_scale_inv")
        name = "weight_scale_inv" if blocks else "weight_scale"
        codes = layer.weight.data if blocks else layer.weight.data.t()  # input features first
        packed = fp8.pack(codes.contiguous(), getattr(layer, name).data.float())
        self.names = ("weight", name)
        self.facts = VLLM.hold(layer, self.names, packed, layer.orig_dtype)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        words, params = (getattr(layer, name) for name in self.names)
        return weights.product(x, words, params, bias, self.facts)

    def apply_scaled_mm(self, **operands: object) -> torch.Tensor:
        """Of kernels that quantize activations."""
        raise ArgumentError("activations", "quantized", "stay in 16 bits in this kernel", "call apply_weights")


def register() -> None:
    """Put both in front of vLLM's own, once."""
    put_first(engine._POSSIBLE_MXFP4_KERNELS, TerrazzoMxFp4LinearKernel)
    put_first(engine._POSSIBLE_WFP8A16_KERNELS, TerrazzoFp8WeightLinearKernel)

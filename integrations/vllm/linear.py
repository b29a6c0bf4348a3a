"""Linear layers: a kernel of vLLM's choice for mixed-precision products, in front of its own."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from terrazzo.integrations.engines import kernels, weights
from terrazzo.integrations.engines.engine import replace_parameter
from terrazzo.integrations.engines.weights import Facts, Stored, Wanted
from terrazzo.integrations.vllm.engine import VLLM, put_first
from terrazzo.lowering.errors import ArgumentError
from vllm.model_executor.kernels import linear as engine

if TYPE_CHECKING:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig


def named(dtype: torch.dtype) -> str:
    """Of ACTIVATIONS, what a layer's activations are for kernels."""
    return {torch.float16: "16", torch.bfloat16: "16", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


class LinearKernel(engine.MPLinearKernel):
    """y = x w^T of AWQ, GPTQ, compressed-tensors and Quark layers; whole ones, shards and fused ones alike."""

    @staticmethod
    def act_order(config: MPLinearLayerConfig) -> bool:
        """Whether a layer's channels are sorted by group; releases differ in how they say it."""
        return bool(getattr(config, "has_g_idx", False))

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def wanted(cls, c: MPLinearLayerConfig) -> Wanted:
        """What vLLM asks for."""
        (full_k, _), (k, n) = c.full_weight_shape, c.partition_weight_shape
        activations = named(c.act_type)
        outside = c.act_type if activations == "16" else c.out_type or torch.bfloat16
        group = k if c.group_size == -1 else c.group_size
        return Wanted(
            n=n,
            k=k,
            full_k=full_k,
            group_size=group,
            zero_points=bool(c.zero_points),
            act_order=cls.act_order(c),
            dtype=str(outside).removeprefix("torch."),
            activations="int8" if str(c.weight_type) == "int4" and activations == "16" else activations,
            weight=str(c.weight_type),
        )

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        how, reason = VLLM.settings(), "additional_config.terrazzo.linear is false"
        if how.linear:
            reason = VLLM.declined(cls.wanted(c), how)
        return reason is None, reason

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.asked, self.how = self.wanted(self.config), VLLM.settings()
        self.facts: Facts = ()
        if (at := VLLM.target()) is not None:
            likely, symmetric = VLLM.likely(self.asked), not self.asked.zero_points
            VLLM.compiling(self.how).want(kernels.requests_of(likely, symmetric, False, VLLM.most_tokens(), at))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        asked = _as_stated(self.asked, layer)
        names = (self.w_q_name, self.w_s_name, self.w_zp_name if asked.zero_points else None)
        parts = [None if name is None else _rows(name, getattr(layer, name)) for name in names]
        packed, reason = weights.pack(Stored(*parts), asked, self.how.requantize)
        if reason:
            VLLM.once(logging.WARNING, f"{asked.operator} layers run in w4a16, with the weights as they are: {reason}")
        if names[2] is not None:
            replace_parameter(layer, names[2], parts[2].new_empty(0))
        self.facts = VLLM.hold(layer, names[:2], packed, getattr(torch, asked.dtype))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weights.product(x, getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), bias, self.facts)


def _as_stated(asked: Wanted, layer: torch.nn.Module) -> Wanted:
    """With what a checkpoint says of activations beside a layer whose kernels vLLM asks for 16 bits."""
    stated = getattr(layer, "_humming_input_quant_config", None)
    if stated is None or asked.activations != "16":
        return asked
    how = f"{stated.get('num_bits')} bits {stated.get('type')} by {stated.get('strategy')}"
    if stated.get("num_bits") == 8 and stated.get("strategy") == "token" and stated.get("type") in ("int", "float"):
        return replace(asked, activations="int8" if stated["type"] == "int" else "e4m3")
    VLLM.once(logging.WARNING, f"activations that are quantized to {how} stay in 16 bits")
    return asked


def _rows(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A loaded parameter as [output features, input features] of its words or values.

    Raises:
        ArgumentError: it is packed along the other side.
    """
    output = getattr(parameter, "output_dim", 0)
    along = getattr(parameter, "packed_dim", None)
    zeros = "zero" in name
    if along is not None and (along == output) != zeros:
        constraint = f"must be packed along {'output' if zeros else 'input'} features"
        raise ArgumentError(name, f"packed along dimension {along}", constraint, "set VLLM_DISABLED_KERNELS")
    return parameter.data if output == 0 else parameter.data.t().contiguous()


def register(kernel: type[LinearKernel]) -> None:
    """Put a kernel in front of vLLM's own, once."""
    put_first(engine._POSSIBLE_KERNELS, kernel)


def register_attention(path: str) -> None:
    """Name the backend that `--attention-backend CUSTOM` asks for; vLLM imports it when it is asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        VLLM.log.warning("terrazzo: attention backend CUSTOM is %s already and stays it", custom.get_path())
        return
    register_backend(custom, path)

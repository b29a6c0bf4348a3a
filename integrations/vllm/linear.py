"""Linear layers: a kernel of vLLM's choice for mixed-precision products, in front of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from terrazzo.integrations.vllm import kernels, weights
from terrazzo.integrations.vllm.settings import Settings
from terrazzo.integrations.vllm.weights import Stored, Wanted
from terrazzo.lowering.errors import ArgumentError, TargetError
from terrazzo.lowering.targets import Target
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.kernels import linear as engine
from vllm.platforms import PlatformEnum, current_platform

weights.register_operators()
_log = logging.getLogger("vllm.terrazzo")
_said: set[str] = set()


def once(level: int, text: str) -> None:
    """Log what concerns many layers alike one time."""
    if text not in _said:
        _said.add(text)
        _log.log(level, "terrazzo: %s", text)


def settings() -> Settings:
    """Of the engine that is being built."""
    config = get_current_vllm_config_or_none()
    return Settings.of(None if config is None else config.additional_config)


def most_tokens() -> int:
    """Of one step: what the scheduler allows, or the largest CUDA graph."""
    config = get_current_vllm_config_or_none()
    if config is None:
        return 1
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    return max([config.scheduler_config.max_num_batched_tokens or 1, *sizes])


def captured() -> list[int]:
    """Sizes of the engine's CUDA graphs, ascending."""
    config = get_current_vllm_config_or_none()
    return sorted(config.compilation_config.cudagraph_capture_sizes or []) if config is not None else []


def target() -> Target | None:
    """The GPU of this process, None on a CPU.

    Raises:
        TargetError: a GPU that no kernel is for.
    """
    return Target.detect() if current_platform.is_cuda() else None


@cache
def compiling(how: Settings) -> kernels.Compiling:
    """One for each process."""
    return kernels.Compiling(how, target())


def declined_here(how: Settings) -> str | None:
    """Why no layer of this process is taken, None if some are."""
    if not (current_platform.is_cuda() or (current_platform.is_cpu() and how.cpu)):
        return f"kernels are for NVIDIA GPUs, this is {current_platform.device_name}"
    try:
        target()
    except TargetError as error:
        return str(error)
    return None


def declined(wanted: Wanted, how: Settings) -> str | None:
    """Why a layer is left to vLLM's own kernels, None if it is taken."""
    reason = declined_here(how) or wanted.refusal(target())
    if reason is None and target() is not None and not how.strict:  # strict says so itself, as an error
        reason = uncompiled(how, kernels.requests_of(_likely(wanted), not wanted.zero_points, False, 1, target()))
    return reason


def uncompiled(how: Settings, found: list) -> str | None:
    """Why kernels cannot be had, None if they can."""
    compiling(how)  # its bundle is loaded
    reason = kernels.lacking(found)
    if reason is not None:
        once(logging.WARNING, f"layers stay with vLLM's own kernels: {reason}")
    return reason


def named(dtype: torch.dtype) -> str:
    """Of ACTIVATIONS, what a layer's activations are for kernels."""
    return {torch.float16: "16", torch.bfloat16: "16", torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


class LinearKernel(engine.MPLinearKernel):
    """y = x w^T of AWQ, GPTQ, compressed-tensors and Quark layers; whole ones, shards and fused ones alike."""

    @staticmethod
    def act_order(config: Any) -> bool:
        """Whether a layer's channels are sorted by group; releases differ in how they say it."""
        return bool(getattr(config, "has_g_idx", False))

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def wanted(cls, c: Any) -> Wanted:
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
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        how = settings()
        if not how.linear:
            return False, "additional_config.terrazzo.linear is false"
        reason = declined(cls.wanted(c), how)
        return reason is None, reason

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked, self.how = self.wanted(self.config), settings()
        self.facts: tuple = ()
        if (at := target()) is not None:
            likely, symmetric = _likely(self.asked), not self.asked.zero_points
            compiling(self.how).want(kernels.requests_of(likely, symmetric, False, most_tokens(), at))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        asked = _as_stated(self.asked, layer)
        names = (self.w_q_name, self.w_s_name, self.w_zp_name if asked.zero_points else None)
        parts = [None if name is None else _rows(name, getattr(layer, name)) for name in names]
        packed, reason = weights.pack(Stored(*parts), asked, self.how.requantize)
        if reason:
            once(logging.WARNING, f"{asked.operator} layers run in w4a16, with the weights as they are: {reason}")
        if names[2] is not None:
            _replace(layer, names[2], parts[2].new_empty(0))
        self.facts = hold(layer, names[:2], packed, getattr(torch, asked.dtype))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return weights.product(x, getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), bias, self.facts)


def _likely(asked: Wanted) -> Wanted:
    """With the activations that all schemes of a compressed-tensors config state: a layer knows its own when its
    weights are there, and kernels are compiled before."""
    config = get_current_vllm_config_or_none()
    schemes = list(getattr(getattr(config, "quant_config", None), "target_scheme_map", {}).values())
    inputs = [scheme.get("input_activations") for scheme in schemes if isinstance(scheme, Mapping)]
    if asked.activations != "16" or not inputs or any(each is None for each in inputs):
        return asked
    kinds = {(each.num_bits, getattr(each.type, "value", each.type)) for each in inputs}
    found = {(8, "int"): "int8", (8, "float"): "e4m3"}.get(kinds.pop() if len(kinds) == 1 else None)
    return asked if found is None else replace(asked, activations=found)


def _as_stated(asked: Wanted, layer: torch.nn.Module) -> Wanted:
    """With what a checkpoint says of activations beside a layer whose kernels vLLM asks for 16 bits."""
    stated = getattr(layer, "_humming_input_quant_config", None)
    if stated is None or asked.activations != "16":
        return asked
    how = f"{stated.get('num_bits')} bits {stated.get('type')} by {stated.get('strategy')}"
    if stated.get("num_bits") == 8 and stated.get("strategy") == "token" and stated.get("type") in ("int", "float"):
        return replace(asked, activations="int8" if stated["type"] == "int" else "e4m3")
    once(logging.WARNING, f"activations that are quantized to {how} stay in 16 bits")
    return asked


def _rows(name: str, parameter: Any) -> torch.Tensor:
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


def _replace(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A plain parameter in the place of a loader's, under all names that it has."""
    old = getattr(layer, name)
    made = torch.nn.Parameter(tensor, requires_grad=False)
    for each in [key for key, value in layer._parameters.items() if value is old] or [name]:
        layer.register_parameter(each, made)


def hold(layer: torch.nn.Module, names: tuple[str, ...], packed: Any, dtype: torch.dtype) -> tuple:
    """Keep a packed weight's tensors under two names of a layer, and have its kernels ready; its facts.

    On a GPU this waits until they are compiled, and launches those that CUDA graphs will hold once: they are loaded,
    and their memory is there before the engine measures how much is free.
    """
    for name, tensor in zip(names, weights.tensors_of(packed)):
        _replace(layer, name, tensor)
    if packed.words.is_cuda:
        bias = getattr(layer, "bias", None)
        _prepare(packed, dtype, None if getattr(layer, "skip_bias_add", False) else bias)
    return weights.facts_of(packed)


_launched: set[tuple] = set()


def _prepare(packed: Any, dtype: torch.dtype, bias: torch.Tensor | None) -> None:
    name, how = str(dtype).removeprefix("torch."), settings()
    found = kernels.requests_of_packed(packed, name, bias is not None, most_tokens(), target())
    compiling(how).want(found)
    compiling(how).wait(found)
    facts = weights.facts_of(packed)
    key = (facts, dtype, bias is not None, packed.words.device)
    if key in _launched:
        return
    _launched.add(key)
    for m in {*captured(), 1}:
        x = torch.zeros(m, packed.k, dtype=dtype, device=packed.words.device)
        weights.product(x, *weights.tensors_of(packed), bias, facts)


def put_first(known: dict[Any, list[type]], kernel: type) -> None:
    """Put a kernel in front of those that vLLM chooses from, once."""
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        kernels_ = known.setdefault(platform, [])
        if all(one.__name__ != kernel.__name__ for one in kernels_):
            kernels_.insert(0, kernel)


def register(kernel: type[LinearKernel]) -> None:
    """Put a kernel in front of vLLM's own, once."""
    put_first(engine._POSSIBLE_KERNELS, kernel)


def register_attention(path: str) -> None:
    """Name the backend that `--attention-backend CUSTOM` asks for; vLLM imports it when it is asked for."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        _log.warning("terrazzo: attention backend CUSTOM is %s already and stays it", custom.get_path())
        return
    register_backend(custom, path)

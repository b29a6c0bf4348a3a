"""vLLM 0.28 to 0.33: layers have no act-order any more."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from terrazzo.integrations.vllm import linear, v0_26
from terrazzo.integrations.vllm.names import OWN_CACHE

if TYPE_CHECKING:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.v1.kv_cache_interface import KVQuantMode


class Int8Int4:
    """A cache dtype of our own: keys in 8 bits, values in 4. vLLM's mode for plug-ins, CUSTOM, is another name of a
    backend's mode; ours is told from vLLM's 8 bits by how it is stored."""

    name = OWN_CACHE

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> KVQuantMode:
        return import_module("vllm.v1.kv_cache_interface").KVQuantMode.INT8_PER_TOKEN_HEAD


class TerrazzoLinearKernel(linear.LinearKernel):
    """Named as in VLLM_DISABLED_KERNELS."""

    @staticmethod
    def act_order(config: MPLinearLayerConfig) -> bool:
        return False


def parts() -> dict[str, Callable[[], None]]:
    """What is registered, each part by itself; see `terrazzo.integrations.vllm.register`."""
    return v0_26.parts() | {"linear layers": lambda: linear.register(TerrazzoLinearKernel), "attention": _attention}


def _attention() -> None:
    if find_spec("vllm.v1.kv_cache_layout") is None:
        return  # releases in which a backend cannot say both what bytes a token has and in which order they lie
    linear.register_attention("terrazzo.integrations.vllm.attention_v0_33.TerrazzoBackend")
    known = import_module("vllm.config.cache")
    if hasattr(known, "register_kv_cache_dtype") and OWN_CACHE not in known.KV_CACHE_DTYPES:
        known.register_kv_cache_dtype(OWN_CACHE)(Int8Int4)

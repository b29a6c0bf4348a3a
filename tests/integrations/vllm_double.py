"""As much of vLLM as our layers and our attention ask for; `test_vllm_sources` holds these names against vLLM's own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from terrazzo.integrations import vllm as plugin

T = TypeVar("T")


class PlatformEnum(Enum):
    CUDA = 0
    CPU = 1


@dataclass
class MPLinearLayerConfig:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: str
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool = False
    out_type: torch.dtype | None = None


class MPLinearKernel:
    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        assert self.can_implement(c)[0]
        self.config, self.w_q_name, self.w_s_name, self.w_zp_name = c, w_q_param_name, w_s_param_name, w_zp_param_name


class MxFp4LinearKernel:
    def __init__(self, config: Any) -> None:
        assert self.can_implement(config)[0] and self.is_supported()[0]


class FP8ScaledMMLinearKernel(MxFp4LinearKernel):
    """Its constructor takes names of parameters too, which ours does not read."""


class Machete:
    """Stands for vLLM's own kernels."""


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config

    def _init_reorder_batch_threshold(self, reorder_batch_threshold: int, supports_spec_as_decode: bool) -> None:
        config = self.vllm_config.speculative_config
        more = config.num_speculative_tokens if config is not None and supports_spec_as_decode else 0
        self.reorder_batch_threshold = reorder_batch_threshold + more


class AttentionBackendEnum(Enum):
    CPU_ATTN = "cpu"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDES

    def get_path(self) -> str:
        return OVERRIDES[self]


OVERRIDES: dict[AttentionBackendEnum, str] = {}
KVQuantMode = Enum("KVQuantMode", "NONE INT8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD")
KVCacheLayout = Enum("KVCacheLayout", "LBHNC LBNHC")


def register_kv_cache_dtype(name: str) -> Any:
    """As the engine's: known from now on, its handler made once."""
    held = sys.modules["vllm.config.cache"]
    held.KV_CACHE_DTYPES.append(name)
    return lambda handler: held.HANDLERS.__setitem__(name, handler()) or handler


@dataclass
class Engine:
    """What it says of the engine that is built."""

    config: Any = field(default_factory=lambda: engine_config())
    kernels: dict[PlatformEnum, list[type]] = field(default_factory=dict)


def engine_config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"terrazzo": {"cpu": True} | settings},
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4], static_forward_context={}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False),
        model_config=SimpleNamespace(max_model_len=512),
        speculative_config=None,
    )


def install(monkeypatch: Any) -> Engine:
    """Put it in the place of vLLM, and forget what was imported with another one."""
    engine = Engine(kernels={PlatformEnum.CUDA: [Machete]})
    OVERRIDES.clear()
    names = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: engine.config},
        "vllm.platforms": {
            "PlatformEnum": PlatformEnum,
            "current_platform": SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: True, device_name="cpu"),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.kernels": {},
        "vllm.model_executor.kernels.linear": {
            "MPLinearKernel": MPLinearKernel,
            "_POSSIBLE_KERNELS": engine.kernels,
            "MxFp4LinearKernel": MxFp4LinearKernel,
            "_POSSIBLE_MXFP4_KERNELS": {PlatformEnum.CUDA: [Machete]},
            "FP8ScaledMMLinearKernel": FP8ScaledMMLinearKernel,
            "_POSSIBLE_WFP8A16_KERNELS": {PlatformEnum.CUDA: [Machete]},
        },
        "vllm.config.cache": {
            "KV_CACHE_DTYPES": ["auto"],
            "HANDLERS": {},
            "register_kv_cache_dtype": register_kv_cache_dtype,
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": type("AttentionBackend", (), {}),
            "AttentionImpl": type("AttentionImpl", (), {}),
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
            "MultipleOf": lambda base: ("multiple of", base),
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": OVERRIDES.__setitem__,
        },
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": KVCacheLayout},
    }
    for name, held in names.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    for name in list(names)[1:]:
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, sys.modules[name])
    attention = ("attention", "attention_v0_26", "attention_v0_33")
    for name in ("engine", "linear", "floats", "experts", *attention, "v0_26", "v0_33"):
        monkeypatch.delitem(sys.modules, f"terrazzo.integrations.vllm.{name}", raising=False)
        monkeypatch.delattr(plugin, name, raising=False)
    return engine


def parameter(tensor: torch.Tensor, output_dim: int = 0, packed_dim: int | None = None) -> torch.nn.Parameter:
    """As vLLM's loaders leave it."""
    made = torch.nn.Parameter(tensor, requires_grad=False)
    made.output_dim, made.input_dim = output_dim, 1 - output_dim
    if packed_dim is not None:
        made.packed_dim = packed_dim
    return made

"""As much of vLLM as our linear kernel asks for; `test_vllm_sources` holds these names against vLLM's own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


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


@dataclass
class Engine:
    """What it says of the engine that is built."""

    config: Any = field(default_factory=lambda: engine_config())
    kernels: dict[PlatformEnum, list[type]] = field(default_factory=dict)


def engine_config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"terrazzo": {"cpu": True} | settings},
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )


def install(monkeypatch: Any) -> Engine:
    """Put it in the place of vLLM, and forget what was imported with another one."""
    engine = Engine(kernels={PlatformEnum.CUDA: [Machete]})
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
    }
    for name, held in names.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name in list(names)[1:]:
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, sys.modules[name])
    for name in ("linear", "floats", "experts", "v0_26", "v0_33"):
        monkeypatch.delitem(sys.modules, f"terrazzo.integrations.vllm.{name}", raising=False)
    return engine


def parameter(tensor: torch.Tensor, output_dim: int = 0, packed_dim: int | None = None) -> torch.nn.Parameter:
    """As vLLM's loaders leave it."""
    made = torch.nn.Parameter(tensor, requires_grad=False)
    made.output_dim, made.input_dim = output_dim, 1 - output_dim
    if packed_dim is not None:
        made.packed_dim = packed_dim
    return made

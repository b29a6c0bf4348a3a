"""vLLM as our layers ask it: its configuration, its device, its list of kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from terrazzo.integrations.engines.engine import Engine
from terrazzo.integrations.engines.settings import Settings
from terrazzo.integrations.engines.weights import Wanted
from terrazzo.lowering.targets import Target
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import PlatformEnum, current_platform


class Vllm(Engine):
    """This process of vLLM."""

    def settings(self) -> Settings:
        config = get_current_vllm_config_or_none()
        return Settings.of(None if config is None else config.additional_config)

    def most_tokens(self) -> int:
        config = get_current_vllm_config_or_none()
        most = 1 if config is None else config.scheduler_config.max_num_batched_tokens or 1
        return max([most, *self.captured()])

    def captured(self) -> list[int]:
        config = get_current_vllm_config_or_none()
        return sorted(config.compilation_config.cudagraph_capture_sizes or []) if config is not None else []

    def target(self) -> Target | None:
        return Target.detect() if current_platform.is_cuda() else None

    def unserved(self, how: Settings) -> str | None:
        if current_platform.is_cuda() or (current_platform.is_cpu() and how.cpu):
            return None
        return f"kernels are for NVIDIA GPUs, this is {current_platform.device_name}"

    def likely(self, wanted: Wanted) -> Wanted:
        """With the activations that all schemes of a compressed-tensors config state: a layer knows its own when its
        weights are there, and kernels are compiled before."""
        config = get_current_vllm_config_or_none()
        schemes = list(getattr(getattr(config, "quant_config", None), "target_scheme_map", {}).values())
        inputs = [scheme.get("input_activations") for scheme in schemes if isinstance(scheme, Mapping)]
        if wanted.activations != "16" or not inputs or any(each is None for each in inputs):
            return wanted
        kinds = {(each.num_bits, getattr(each.type, "value", each.type)) for each in inputs}
        found = {(8, "int"): "int8", (8, "float"): "e4m3"}.get(kinds.pop() if len(kinds) == 1 else None)
        return wanted if found is None else replace(wanted, activations=found)


VLLM = Vllm("vLLM", logging.getLogger("vllm.terrazzo"))


def put_first(known: dict[PlatformEnum, list[type]], kernel: type) -> None:
    """Put a kernel in front of those that vLLM chooses from, once."""
    for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
        kernels = known.setdefault(platform, [])
        if all(one.__name__ != kernel.__name__ for one in kernels):
            kernels.insert(0, kernel)

"""Our attention backend under the name that vLLM for CPUs asks for, run by the operators' reference."""

from __future__ import annotations

from terrazzo.integrations.vllm.attention_v0_33 import TerrazzoBackend


class CpuBackend(TerrazzoBackend):
    """vLLM takes the one of this name on a CPU, whatever else is asked for."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

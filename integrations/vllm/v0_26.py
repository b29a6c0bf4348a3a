"""vLLM 0.26 and 0.27."""

from __future__ import annotations

from terrazzo.integrations.vllm import experts, floats, linear


class TerrazzoLinearKernel(linear.LinearKernel):
    """Named as in VLLM_DISABLED_KERNELS."""


def register() -> None:
    """See `terrazzo.integrations.vllm.register`."""
    linear.register(TerrazzoLinearKernel)
    floats.register()
    experts.register()
    linear.register_attention("terrazzo.integrations.vllm.attention_v0_26.TerrazzoBackend")

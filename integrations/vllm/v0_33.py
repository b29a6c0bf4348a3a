"""vLLM 0.28 to 0.33: layers have no act-order any more."""

from __future__ import annotations

from typing import Any

from terrazzo.integrations.vllm import experts, floats, linear


class TerrazzoLinearKernel(linear.LinearKernel):
    """Named as in VLLM_DISABLED_KERNELS."""

    @staticmethod
    def act_order(config: Any) -> bool:
        return False


def register() -> None:
    """See `terrazzo.integrations.vllm.register`."""
    linear.register(TerrazzoLinearKernel)
    floats.register()
    experts.register()

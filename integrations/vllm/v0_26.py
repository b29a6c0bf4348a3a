"""vLLM 0.26 and 0.27."""

from __future__ import annotations

from collections.abc import Callable

from terrazzo.integrations.vllm import linear


class TerrazzoLinearKernel(linear.LinearKernel):
    """Named as in VLLM_DISABLED_KERNELS."""


def parts() -> dict[str, Callable[[], None]]:
    """What is registered, each part by itself; see `terrazzo.integrations.vllm.register`."""
    return {
        "linear layers": lambda: linear.register(TerrazzoLinearKernel),
        "layers of MXFP4 and FP8": _floats,
        "experts": _experts,
        "attention": lambda: linear.register_attention("terrazzo.integrations.vllm.attention_v0_26.TerrazzoBackend"),
    }


def _floats() -> None:
    from terrazzo.integrations.vllm import floats

    floats.register()


def _experts() -> None:
    from terrazzo.integrations.vllm import experts

    experts.register()

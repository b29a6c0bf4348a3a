"""vLLM's names for what our kernels serve; nothing here needs vLLM."""

from __future__ import annotations

from terrazzo.integrations.engines.attention import Caches
from terrazzo.integrations.engines.check import Checker
from terrazzo.ops.products import wide

OWN_CACHE = "terrazzo_int8_int4"
"""Name of a cache dtype that vLLM learns from us, in releases that let a plug-in name one."""
CACHES = Caches(
    {
        "float16": ("float16", "float16"),
        "bfloat16": ("bfloat16", "bfloat16"),
        "int8_per_token_head": ("int8", "int8"),
        "int4_per_token_head": ("int4_hadamard", "int4"),
        OWN_CACHE: ("int8", "int4"),
    }
)
CHECKER = Checker("vLLM", ("awq", "gptq", "compressed-tensors"), CACHES, (wide.MXFP4, wide.FP8))

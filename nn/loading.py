"""`load`: a checkpoint to a transformers model that runs on Terrazzo's kernels, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ToolchainError
from terrazzo.nn.formats import Format
from terrazzo.nn.parallel import TensorParallel
from terrazzo.nn.reading import MAX_TOKENS, Asked
from terrazzo.nn.sources import Report

if TYPE_CHECKING:
    from terrazzo.nn.causal import Causal
    from transformers import PretrainedConfig


def load(
    source: str | Path | Mapping[str, torch.Tensor],
    *,
    config: PretrainedConfig | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    kv: str | tuple[str, str] | None = None,
    quantize: str | Format | None = None,
    options: Mapping[str, Any] | None = None,
    lm_head: str | Format | None = None,
    format: str | None = None,
    target: str | None = None,
    weight_only: bool = False,
    activations: str | None = None,
    max_tokens: int = MAX_TOKENS,
    tensor_parallel: tuple[int, int] | TensorParallel | None = None,
    progress: Callable[[int, int], None] | None = None,
    report: Report | None = None,
    trust_remote_code: bool = False,
) -> Causal:
    """A transformers model whose linear layers, experts, attention and cache are Terrazzo's.

    Reads Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Gemma-3 (text) and gpt-oss: in AWQ, GPTQ,
    compressed-tensors, QServe, bitsandbytes (NF4), FP8, MXFP4 (gpt-oss's experts), 16 or 32 bits, or as
    `save_pretrained` of such a model wrote it. Layers are read and packed one after another. `model.generate` works;
    `terrazzo.nn.generation.generate` needs less of the host.

    Args:
        source: a Hugging Face folder, or float tensors by name (a model's `state_dict`), which need `config`.
        config: transformers config; None reads the folder's.
        device: None takes "cuda" where there is a GPU. dtype: float16 or bfloat16; None takes the config's, or float16
            for others. Gemma 3 needs bfloat16, and takes it.
        kv: format of keys and values: a pair ("int4_channel64", "int4") or "int4_channel64/int4", one name for both, or
            "int4", "int2" or "int8int4" for what is most accurate at these bits (docs/kv-formats.md). None keeps
            `dtype`, or what the folder was saved with. Rotated keys come with a ring of 128 tokens in f16. Static ones
            ("fp8", "int8_static") need a folder with scales: of `terrazzo quantize --calibration`, or a published one's
            k_scale and v_scale.
        quantize: format for layers that the checkpoint has in float, as "w4a16-g128"; None keeps them in 16 bits.
            Refused where there are none.
        lm_head: format for the head, or for the embedding's weights where it is tied to them, if the source has it in
            float; None keeps 16 bits. docs/benchmarks.md has the perplexity.
        options: of the quantizer of layers. format: of the checkpoint's 4-bit layers, whatever its config says.
        target: architecture to pack for; None the device's.
        weight_only: True multiplies 16-bit activations by the folder's FP8 and INT8 layers. False follows its config:
            8-bit activations, static or dynamic, where it states them and the GPU has such products (W8A8).
        activations: "e4m3" quantizes what the folder's MXFP4 layers and experts multiply, a scale for each token;
            "mxfp8" with one for each 32 channels. None keeps 16 bits, which on an H100 takes no longer
            (docs/generate.md).
        max_tokens: of a sequence, for which caches that forward makes have room at first. They grow, and `generate` has
            caches of the size that a call needs.
        tensor_parallel: (rank, world) of the ranks that share the model, each of which calls load. Of layers, heads and
            vocabulary only the rank's own are read; forward sums over `torch.distributed` (docs/generate.md).
        progress: called with (layers done, all layers). report: see `sources.Report`.
        trust_remote_code: run Python code of the folder that describes its config. False runs none (docs/trust.md).

    Raises:
        ArgumentError: no such folder, an architecture, format or layer that cannot be read, or that so many ranks
            cannot share. ToolchainError: transformers is not installed.
    """
    asked = Asked(**locals())
    return transformers_side().loaded(asked)


def transformers_side() -> ModuleType:
    """`nn.causal`, which needs transformers.

    Raises:
        ToolchainError: transformers is not installed.
    """
    try:
        from terrazzo.nn import causal
    except ImportError as error:
        if not (error.name or "").startswith(("transformers", "huggingface_hub")):
            raise
        raise ToolchainError(f"load needs transformers ({error}); pip install 'terrazzo[transformers]'") from error
    return causal

"""What of a model would run on our kernels inside vLLM, from its files alone: neither vLLM nor a GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from terrazzo.integrations.vllm import attention_core
from terrazzo.integrations.vllm.weights import ACTIVATIONS, Wanted
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.checkpoints.config import Config
from terrazzo.ops.model_layers import Linear, joined, split
from terrazzo.ops.model_requests import Weights, of_folder

METHODS = ("awq", "gptq", "compressed-tensors")
"""What a config may say, of what vLLM asks our kernels for."""
_PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj", "w1": "w13", "w3": "w13"}  # fmt: skip
_ITS_OWN = "vLLM quantizes the activations of these layers, and has kernels of its own for that"
_FLOAT = "weights are not quantized: `terrazzo quantize` is for terrazzo.load; llm-compressor makes folders for vLLM"
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(\w+)")


@dataclass(frozen=True)
class Row:
    """Layers of one kind.

    Attributes:
        leaf: last part of their names, as vLLM joins them. count: how many. n, k: of a rank's shard.
        experts: of each layer, 0 for none. operator: ours, "w4a16", "w4a8", "w4a8_fp8", or "" for vLLM's own.
        reason: why it is not ours, or "". example: one of the names.
    """

    leaf: str
    count: int
    n: int | None
    k: int | None
    experts: int
    operator: str
    reason: str
    example: str


def check(folder: str | Path, target: Target, ranks: int = 1) -> list[Row]:
    """The linear layers and experts of a Hugging Face folder.

    Args:
        target: what vLLM runs on. ranks: of tensor parallelism.

    Raises:
        ArgumentError: no folder, or one that tells neither layers nor an architecture, or that Terrazzo packed.
    """
    _check_not_packed(Path(folder))
    model = of_folder(folder, Weights(), all_skipped=True)
    config = Config.of_folder(Path(folder))
    heads = model.architecture.kv_heads if model.architecture is not None else ranks
    layers = joined(split(model.layers, ranks, heads))
    every = {name for names in layers.kinds.values() for name in names}
    rows = []
    for kind, names in layers.kinds.items():
        whole = [name for name in dict.fromkeys(names) if not _is_part(name, every)]
        if whole:
            reason = _refusal(kind, config, whole[0], model.dtype, target) if model.stored else _FLOAT
            operator, count = "" if reason else kind.operator, model.times(whole)
            rows.append(Row(kind.leaf, count, kind.n, kind.k, kind.experts, operator, reason or "", whole[0]))
    for reason in dict.fromkeys(layers.skipped.values()):
        names = [name for name, why in layers.skipped.items() if why == reason and name != "attention"]
        if names:
            leaf = names[0].rpartition(".")[2]
            rows.append(Row(leaf, len(names), None, None, 0, "", reason, names[0]))
    return rows


def _check_not_packed(folder: Path) -> None:
    """vLLM has no method for what `terrazzo quantize` writes."""
    try:
        Config.of_folder(folder)
    except ArgumentError as error:
        if (error.argument, error.value) != ("quant_method", "terrazzo"):
            raise
        constraint = "says that Terrazzo packed these layers: terrazzo.load alone reads them, and vLLM does not"
        remedy = (
            "give vLLM a folder in AWQ, GPTQ or compressed-tensors, as llm-compressor writes them of the float model; "
            "outside of vLLM `terrazzo generate` runs this one, and terrazzo.prepare compiles its kernels"
        )
        raise ArgumentError("quant_method", "terrazzo", constraint, remedy) from None


def caches(folder: str | Path, target: Target) -> dict[str, str]:
    """Cache dtypes of vLLM's -> why our attention does not take them for a folder's model, "" where it does."""
    model = of_folder(folder, Weights(), all_skipped=True)
    if model.architecture is None:
        return {}
    return attention_core.caches(model.architecture, model.dtype, target)


def _is_part(name: str, every: set[str]) -> bool:
    """Whether vLLM makes a larger layer of it: qkv, gate_up, or all experts of a layer."""
    prefix, _, leaf = name.rpartition(".")
    if leaf in _PARTS and f"{prefix}.{_PARTS[leaf]}" in every:
        return True
    found = _EXPERT.fullmatch(name)
    if found is not None:
        return f"{found[1]}.{found[2]}" in every
    stack = f"{prefix}.{_PARTS[leaf]}" if leaf in _PARTS else ""
    return bool(prefix.endswith("experts") and stack in every)


def _refusal(kind: Linear, config: Config, name: str, dtype: str, target: Target) -> str | None:
    if config.method not in METHODS:
        return f"vLLM has no kernels to choose from for {config.method or 'this format'}"
    if kind.operator in ("fp8", "mxfp4"):
        return None if config.method == "compressed-tensors" else _ITS_OWN
    stated = config.layer(_of_checkpoint(name))
    if kind.operator in ("w8a8", "w8a8_fp8"):
        return _ITS_OWN
    activations = next((key for key, operator in ACTIVATIONS.items() if operator == kind.operator), None)
    if activations is None:
        return f"vLLM has no method for {kind.operator}"
    wanted = Wanted(
        n=kind.n,
        k=kind.k,
        full_k=kind.k,
        group_size=kind.group_size,
        zero_points=config.method != "gptq" and not kind.symmetric and kind.operator == "w4a16",
        act_order=bool(stated.desc_act),
        dtype=dtype,
        activations=activations,
        weight="uint4b8" if kind.symmetric or kind.operator != "w4a16" else "uint4",
        experts=kind.experts,
    )
    if config.method == "gptq" and kind.operator == "w4a16" and stated.symmetric is False:
        return "vLLM reads symmetric GPTQ only"
    return wanted.refusal(target)


def _of_checkpoint(name: str) -> str:
    """A name that the checkpoint has, of what vLLM joined."""
    name = name.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj").replace("w13", "w1")
    return re.sub(r"\bexperts\.(?!\d)", "experts.0.", name)

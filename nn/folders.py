"""Folders of models that Terrazzo writes: packed tensors, configs, and files that are neither, as they were."""

from __future__ import annotations

import json
import os
import re
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import tensor_files

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

METHOD = "terrazzo"
"""`quant_method` of folders that `save_pretrained` writes."""
VERSION = 1
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model(-\d{5}-of-\d{5}|-layer-\d{5}|-rest)?\.safetensors(\.index\.json)?|terrazzo_quantize\.json")
"""Files of weights in such folders, and in those of `terrazzo quantize`, with the note of its run."""
PREFIX = "Terrazzo"
"""What names of such models' classes begin with."""
WHERE = "save_directory"
"""What save_pretrained names its folder by."""
PATTERNS = (
    "tokenizer*.json", "tokenizer*.model*", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenization_*.py",
    "chat_template.*", "additional_chat_templates/*.jinja", "*processor_config.json", "LICENSE*", "NOTICE*",
    "USE_POLICY*",
)  # fmt: skip
"""What a user of a model needs beside its config and weights, by the names that publishers give it."""


def carry(source: str | Path | None, folder: Path, argument: str = "folder") -> list[str]:
    """Copy those files from a model's folder into another one, as bytes: nothing in them is read or run.

    Args:
        source: a folder; anything else has none of them. folder: where they go, in the place of equal names.
        argument: what the caller names `folder` by.

    Returns:
        their names, sorted.

    Raises:
        ArgumentError: one cannot be read or written.
    """
    if source is None or not (root := Path(source)).is_dir() or root.resolve() == folder.resolve():
        return []
    found = sorted({path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file()})
    for path in found:
        there = folder / path.relative_to(root)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArgumentError("source", str(path), f"cannot be read ({error.strerror})", "get it again") from None
        with tensor_files.named(argument, there):
            there.parent.mkdir(exist_ok=True)
        tensor_files.write_bytes(there, data, argument)
    return [path.relative_to(root).as_posix() for path in found]


def static_state(k: torch.Tensor | None, v: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Names in a folder's files of the scales of keys and values."""
    return {f"kv.{part}_static": t for part, t in (("k", k), ("v", v)) if t is not None}


def write_state(folder: Path, state: dict[str, torch.Tensor], max_shard_size: str) -> None:
    """Tensors in as many safetensors files as that takes, with an index where it is more than one; files of an earlier
    state go."""
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size)
    for name, tensors in plan.filename_to_tensors.items():
        parts = {tensor: state[tensor] for tensor in tensors}
        tensor_files.write_tensors(folder / name, parts, {"format": "pt"}, WHERE)
    written = set(plan.filename_to_tensors)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        written.add(INDEX)
        tensor_files.write_bytes(folder / INDEX, json.dumps(index, indent=2).encode(), WHERE)
    with tensor_files.named(WHERE, folder):
        for name in os.listdir(folder):
            if SHARD.fullmatch(name) and name not in written:
                os.remove(folder / name)


def refusal_state() -> dict[str, torch.Tensor]:
    """A tensor for a folder's files at which transformers without Terrazzo stops.

    It would warn of an unknown `quant_method` and fill the model with random numbers. A weight of another shape than
    the model's is an error in all of its releases and classes.
    """
    return {"model.norm.weight": torch.empty(0)}


def packed_with(formats: tuple[str, str]) -> dict[str, Any]:
    """`quantization_config` of a folder with packed weights; formats of keys and values."""
    return {"quant_method": METHOD, "version": VERSION, "kv": list(formats)}


def write_configs(
    folder: Path,
    config: PretrainedConfig,
    quantization: dict[str, Any],
    generation: GenerationConfig | None,
    source: str | Path | None,
    argument: str,
    assumed_end: int | list[int] | None = None,
) -> None:
    """config.json, which says how weights are stored, generation_config.json, and what `carry` takes from `source`.

    Neither states `assumed_end`, the end token of the config's class, which would hide the tokenizer's. Errors of
    writing name `argument`.
    """
    from transformers import AutoModelForCausalLM

    config = deepcopy(config)
    config.quantization_config = quantization
    prefix = PREFIX if quantization["quant_method"] == METHOD else ""
    config.architectures = [prefix + AutoModelForCausalLM._model_mapping[type(config)].__name__]  # engines ask for it
    with tensor_files.named(argument, folder), tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        if generation is not None:  # save_pretrained would refuse settings that published files have
            generation.to_json_file(Path(place, "generation_config.json"))
        for name in sorted(os.listdir(place)):
            stated = json.loads(Path(place, name).read_text(encoding="utf-8"))
            if assumed_end is not None and stated.get("eos_token_id") == assumed_end:
                del stated["eos_token_id"]
            tensor_files.write_bytes(folder / name, (json.dumps(stated, indent=2) + "\n").encode(), argument)
    carry(source, folder, argument)

"""What a caller of `load` asks for, and what a folder's configs say: read before any tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.nn import foreign
from terrazzo.nn.formats import Format
from terrazzo.nn.parallel import TensorParallel
from terrazzo.nn.sources import Published, Report
from terrazzo.ops import stored_layers as stored
from terrazzo.ops import weights
from terrazzo.ops.attention.pairs import pair_of
from terrazzo.ops.checkpoints import TensorFiles
from terrazzo.ops.products.kv import FORMATS
from terrazzo.ops.shards import Cut

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

From = str | Path | Mapping[str, torch.Tensor]
"""A folder, or tensors by name."""
DTYPES = ("float16", "bfloat16")
MAX_TOKENS = 4096
BEYOND_FLOAT16 = ("gemma3_text",)
"""Architectures whose residual stream leaves float16, which ends at 65504."""


@dataclass(frozen=True)
class Asked:
    """Arguments of `load`, which has their meaning; those that need no folder are checked.

    Raises:
        ArgumentError: names one.
    """

    source: From
    config: PretrainedConfig | None = None
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    kv: str | tuple[str, str] | None = None
    quantize: str | Format | None = None
    options: Mapping[str, Any] | None = None
    lm_head: str | Format | None = None
    format: str | None = None
    target: str | None = None
    weight_only: bool = False
    activations: str | None = None
    max_tokens: int = MAX_TOKENS
    tensor_parallel: tuple[int, int] | TensorParallel | None = None
    progress: Callable[[int, int], None] | None = None
    report: Report | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        options, most = self.options, self.max_tokens
        if options is not None and not isinstance(options, Mapping):
            raise ArgumentError("options", options, "must be a mapping", "pass {'clip_steps': 1}, say")
        if options and self.quantize is None:
            raise ArgumentError("options", sorted(options), "are a quantizer's, and quantize is None", "name a format")
        if type(most) is not int or most < 1:
            raise ArgumentError("max_tokens", most, "must be an integer above 0", f"leave it out for {MAX_TOKENS}")
        if type(self.weight_only) is not bool:
            remedy = "leave it out to follow the folder"
            raise ArgumentError("weight_only", self.weight_only, "must be True or False", remedy)
        if self.target is not None:
            Target.parse(self.target)
        stored.of_mxfp4(self.activations)
        if self.activations is not None and self.weight_only:
            constraint = f"keeps activations in 16 bits, and activations={self.activations!r} quantizes them"
            raise ArgumentError("weight_only", True, constraint, "pass one of the two")
        if isinstance(self.source, Mapping) and self.format is not None:
            constraint = "is of a folder's layers, and source has float tensors"
            raise ArgumentError("format", self.format, constraint, 'leave it out; quantize="w4a16-g128" packs them')

    @property
    def form(self) -> Format | None:
        return None if self.quantize is None else Format.parse(self.quantize, "quantize")

    @property
    def head_form(self) -> Format | None:
        return None if self.lm_head is None else Format.parse(self.lm_head, "lm_head")

    def check_packed(self) -> None:
        """Of a folder that Terrazzo packed: what says how weights are packed comes too late."""
        named = ("quantize", "weight_only", "activations", "format", "report", "target")
        for name in named if self.lm_head is None else named[:-1]:
            if (value := getattr(self, name)) not in (None, False):
                constraint = "the folder's weights are packed, with the activations that they multiply"
                remedy = "leave it out, or load the folder that they are from with it, and save that"
                seen = str(value) if name == "quantize" else "a function" if name == "report" else value
                raise ArgumentError(name, seen, constraint, remedy)

    def check_published(self, source: Published) -> None:
        """Of other folders: what would change nothing there, or contradicts itself."""
        form = self.form
        if form is not None and source.layers and not source.has_float_layers():
            constraint = f"is for float layers, and all of the folder are quantized (as {next(iter(source.layers))})"
            remedy = "leave it out to load them as they are, or load the folder of the float model with it"
            raise ArgumentError("quantize", str(form), constraint, remedy)
        if self.format is not None and not source.layers:
            remedy = 'leave it out; quantize="w4a16-g128" packs float layers'
            raise ArgumentError("format", self.format, "is of quantized layers, and the folder has none", remedy)
        if form is not None and self.weight_only and not form.product.wide:
            constraint = f"keeps activations in 16 bits, and quantize={str(form)!r} quantizes them"
            raise ArgumentError("weight_only", True, constraint, "pass one of the two, or quantize='w4a16-g128'")


def device_of(device: str | torch.device | None) -> torch.device:
    """As asked for, else a GPU where there is one."""
    return weights.device_of(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_of(config: PretrainedConfig, asked: torch.dtype | None) -> torch.dtype:
    """Of activations: as asked for, else the config's if that is one of DTYPES, else float16; bfloat16 in the place of
    float16 where the architecture needs it.

    Raises:
        ArgumentError: another dtype, or float16 for an architecture that leaves it.
    """
    if asked is not None and not isinstance(asked, torch.dtype):
        raise ArgumentError("dtype", asked, "must be a torch.dtype", "pass torch.float16 or torch.bfloat16")
    found = asked or getattr(config, "dtype", None)
    if asked is None and weights_name(found) not in DTYPES:
        found = torch.float16
    if isinstance(found, str):  # configs may hold the name
        found = getattr(torch, weights_name(found))
    if weights_name(found) not in DTYPES:
        raise ArgumentError("dtype", weights_name(found), f"must be one of {DTYPES}", "pass torch.bfloat16")
    kind = getattr(config, "model_type", None)
    if found == torch.float16 and kind in BEYOND_FLOAT16:
        if asked is not None:
            constraint = f"ends at 65504, and sums inside of a {kind} go beyond: its logits would be NaN"
            raise ArgumentError("dtype", "float16", constraint, "pass torch.bfloat16, or leave it out")
        return torch.bfloat16
    return found


def weights_name(dtype: torch.dtype | str | None) -> str:
    """ "float16" of torch.float16."""
    return str(dtype).removeprefix("torch.")


def read_config(
    source: From, config: PretrainedConfig | None, trust_remote_code: bool = False
) -> tuple[dict[str, Any], PretrainedConfig]:
    """(what `save_pretrained` noted, text config without a quantization config)."""
    foreign.check_trust(trust_remote_code)
    if config is None:
        if isinstance(source, Mapping):
            raise ArgumentError("config", None, "is needed beside tensors", "pass model.config")
        config = foreign.config_of(weights.path_of(source), trust_remote_code)
    if not hasattr(config, "get_text_config"):
        constraint = "must be a transformers config"
        raise ArgumentError("config", type(config).__name__, constraint, "pass model.config")
    with foreign.explained("config", type(config).__name__, "has no text config", "repair config.json"):
        config = deepcopy(config.get_text_config(decoder=True))
    stated = getattr(config, "quantization_config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    own = stated if isinstance(stated, dict) and stated.get("quant_method") == "terrazzo" else {}
    if own and own.get("version") != 1:
        constraint = "is another version of the folder's form than this one reads, 1"
        raise ArgumentError("version", own.get("version"), constraint, "load it with the version that saved it")
    return own, config


def kv_formats(kv: str | Sequence[str]) -> tuple[str, str]:
    """Names of the formats of keys and values that `kv` asks for: one name, or a pair.

    Raises:
        ArgumentError: names `kv`: no such format, or none for its role.
    """
    return pair_of(kv)


def needs_scales(formats: tuple[str, str]) -> list[str]:
    """Those of the formats of keys and values whose scales are calibrated beforehand."""
    return [name for name in formats if FORMATS[name].scaling == "static"]


def generation_config(source: From) -> GenerationConfig | None:
    """The folder's, where there is one; else None.

    Raises:
        ArgumentError: names the file, where transformers cannot read it.
    """
    return None if isinstance(source, Mapping) else foreign.generation_config_of(weights.path_of(source))


def name_ends(
    model: PreTrainedModel, source: From, config: PretrainedConfig, whole: PretrainedConfig | None = None
) -> None:
    """Have a model's generation config name the end tokens that its config states, where it names none itself.

    A config class may have an end token by default, which says nothing of the checkpoint: `model.assumed_end` is that,
    None where end tokens are stated.

    Args:
        model: with its generation config. source: see `load`. config: of the text model. whole: what it is part of.
    """
    made, folder = model.generation_config, None if isinstance(source, Mapping) else Path(source)
    own = folder is not None and (folder / "generation_config.json").is_file() and made.eos_token_id is not None
    file = folder / "config.json" if folder is not None else None
    written = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {}
    inner = written.get("text_config")
    chosen = [getattr(each, "eos_token_id", None) for each in (config, whole)]
    chosen = [end for end, each in zip(chosen, (config, whole)) if end != getattr(type(each), "eos_token_id", None)]
    files = [each.get("eos_token_id") for each in (inner if isinstance(inner, Mapping) else {}, written)]
    stated = next((end for end in [*chosen, *files] if end is not None), None)
    if not own and stated is not None and made.eos_token_id in (None, config.eos_token_id):
        made.eos_token_id = stated
    model.assumed_end = made.eos_token_id if not own and stated is None else None


class FileTensors(Mapping):
    """Tensors of files by name, read straight onto a device."""

    def __init__(self, files: TensorFiles, device: torch.device) -> None:
        self.files, self.device = files, device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.files.tensor(name, self.device)

    def part(self, name: str, cut: Cut) -> torch.Tensor:
        """What a cut takes of one tensor; no other bytes are read."""
        return self.files.part(name, cut, self.device)

    def shape(self, name: str) -> list[int]:
        """Of one tensor, unread."""
        return self.files.describe(name)[1]

    def __contains__(self, name: object) -> bool:
        return name in self.files.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.files.places)

    def __len__(self) -> int:
        return len(self.files.places)

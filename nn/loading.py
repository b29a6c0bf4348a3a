"""`load`: a checkpoint to a transformers model that runs on Terrazzo's kernels, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from terrazzo.lowering.errors import ArgumentError, ToolchainError
from terrazzo.lowering.targets import Target
from terrazzo.nn import claims, foreign
from terrazzo.nn.dense import Dense
from terrazzo.nn.formats import FAMILIES, Format
from terrazzo.nn.linear import Linear
from terrazzo.nn.parallel import SharedHead, TensorParallel, shared_heads
from terrazzo.nn.sources import Published, Report, Source, Stored, quantized
from terrazzo.ops import weights
from terrazzo.ops.attention.pairs import pair_of
from terrazzo.ops.formats.kv import FORMATS
from terrazzo.ops.shards import Cut

DTYPES = ("float16", "bfloat16")
MAX_TOKENS = 4096
BEYOND_FLOAT16 = ("gemma3_text",)
"""Architectures whose residual stream leaves float16, which ends at 65504."""


def load(
    source: str | Path | Mapping[str, torch.Tensor],
    *,
    config: Any = None,
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
) -> Any:
    """A transformers model whose linear layers, experts, attention and cache are Terrazzo's.

    Reads Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Gemma-3 (text) and gpt-oss in AWQ, GPTQ, compressed-tensors,
    QServe, FP8, MXFP4 (gpt-oss's experts), 16 or 32 bits, or as `save_pretrained` of such a model wrote it. Layers are
    read and packed one after another. `model.generate` works; `terrazzo.nn.generation.generate` needs less of the host.

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
        activations: "e4m3" quantizes what the folder's MXFP4 layers and experts multiply, a scale for each token; None
            keeps 16 bits, which on an H100 takes no longer (docs/generate.md).
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
    model_module = _transformers()
    cut_layers, whole = config is not None, config
    to = weights.device_of(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    own, config = read_config(source, config, trust_remote_code)
    found = dtype_of(config, dtype)
    _check_options(options, quantize, target, max_tokens, weight_only)
    _check_activations(activations, weight_only)
    ranks = TensorParallel.of(tensor_parallel)
    formats = kv_formats(kv if kv is not None else own.get("kv", weights_name(found)))
    form = None if quantize is None else Format.parse(quantize, "quantize")
    head_form = None if lm_head is None else Format.parse(lm_head, "lm_head")

    from terrazzo.nn.architectures import Builder, shape_of

    shape = shape_of(config)
    made: Source
    if own:
        given = dict(
            quantize=form and str(form), weight_only=weight_only or None, activations=activations, format=format,
            report=report and "a function", target=None if head_form is not None else target,
        )  # fmt: skip
        _check_packed(given)
        from terrazzo.ops.checkpoints import TensorFiles

        made = Stored(_Lazy(TensorFiles(source), to), to, found)
    else:
        from terrazzo.ops.checkpoints import Checkpoint

        if isinstance(source, Mapping) and format is not None:
            constraint = "is of a folder's layers, and source has float tensors"
            raise ArgumentError("format", format, constraint, 'leave it out; quantize="w4a16-g128" packs them')
        checkpoint = None if isinstance(source, Mapping) else Checkpoint(source, format)
        state = source if isinstance(source, Mapping) else {}
        facts = dict(quantize=form, options=options, target=target, report=report, weight_only=weight_only)
        facts |= dict(activations=activations, cut_layers=cut_layers)
        made = Published(checkpoint, state, to, found, **facts)
        _check_published(made, form, format, weight_only)
    claims.check_tensors(shape, made.names(), made.shape_of, made.layers)
    static = tuple(shared_heads(scales, shape.kv_heads, ranks) for scales in _static(made, formats, shape))
    skeleton = model_module.skeleton(config)
    rotaries = [rotary.to(to) for rotary in model_module.rotaries_of(skeleton, shape)]
    stated = generation_config(source)
    claims.check_ends(stated or skeleton.generation_config, "the folder")
    with torch.no_grad():
        builder = Builder(shape, made, rotaries, progress, ranks)
        if head_form is not None and any(map(made.packs, builder.head_names)):
            raise ArgumentError("lm_head", str(head_form), "the source's head is quantized already", "leave it out")
        decoder = builder.decoder()
        skeleton.lm_head = _head(builder.head(decoder), head_form, found, target)
    if activations is not None and not made.quantizes_activations:
        constraint = "quantizes what MXFP4 weights multiply, and the source has none"
        raise ArgumentError(
            "activations", activations, constraint, 'leave it out; for float ones quantize="mxfp4-e4m3"'
        )
    skeleton.model = model_module.Body(decoder, builder.own, formats, max_tokens, skeleton.config, static, ranks)
    skeleton.config.dtype = found
    if not isinstance(source, Mapping):  # where its tokenizer lies, whoever made the config
        skeleton.name_or_path = str(Path(source).absolute())
    if stated is not None:
        skeleton.generation_config = stated
    name_ends(skeleton, source, config, whole)
    return skeleton.eval()


def _head(head: Any, form: Format | None, dtype: torch.dtype, target: str | None) -> Any:
    """The head in a format, if that is given and the head is float."""
    if isinstance(head, SharedHead):
        return SharedHead(_head(head.part, form, dtype, target), head.ranks)
    if form is None or not isinstance(head, Dense):
        return head
    return Linear(quantized(form, head.weight, head.bias, dtype, {}, target))


def _check_options(options: Any, quantize: Any, target: Any, max_tokens: Any, weight_only: Any) -> None:
    """Of `load`: those that are read late, or not at all."""
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError("options", options, "must be a mapping", "pass {'clip_steps': 1}, say")
    if options and quantize is None:
        raise ArgumentError("options", sorted(options), "are a quantizer's, and quantize is None", "name a format")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ArgumentError("max_tokens", max_tokens, "must be an integer above 0", f"leave it out for {MAX_TOKENS}")
    if type(weight_only) is not bool:
        raise ArgumentError("weight_only", weight_only, "must be True or False", "leave it out to follow the folder")
    if target is not None:
        Target.parse(target)


def _check_packed(given: Mapping[str, Any]) -> None:
    """Of `load` from a folder that Terrazzo packed: what says how weights are packed comes too late."""
    for name, value in given.items():
        if value is not None:
            constraint = "the folder's weights are packed, with the activations that they multiply"
            remedy = "leave it out, or load the folder that they are from with it, and save that"
            raise ArgumentError(name, value, constraint, remedy)


def _check_published(source: Published, form: Format | None, format: str | None, weight_only: bool) -> None:
    """Of `load` from other folders: what would change nothing there, or contradicts itself."""
    if form is not None and source.layers and not source.has_float_layers():
        constraint = f"is for float layers, and all of the folder are quantized (as {next(iter(source.layers))})"
        remedy = "leave it out to load them as they are, or load the folder of the float model with it"
        raise ArgumentError("quantize", str(form), constraint, remedy)
    if format is not None and not source.layers:
        remedy = 'leave it out; quantize="w4a16-g128" packs float layers'
        raise ArgumentError("format", format, "is of quantized layers, and the folder has none", remedy)
    if form is not None and weight_only and FAMILIES[form.family].quantizes_activations:
        constraint = f"keeps activations in 16 bits, and quantize={str(form)!r} quantizes them"
        raise ArgumentError("weight_only", True, constraint, "pass one of the two, or quantize='w4a16-g128'")


def _check_activations(activations: Any, weight_only: bool) -> None:
    """Of `load`."""
    if activations not in (None, "e4m3"):
        raise ArgumentError("activations", activations, 'must be None or "e4m3"', "leave it out for 16 bits")
    if activations is not None and weight_only:
        constraint = "keeps activations in 16 bits, and activations='e4m3' quantizes them"
        raise ArgumentError("weight_only", True, constraint, "pass one of the two")


def dtype_of(config: Any, asked: torch.dtype | None) -> torch.dtype:
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


def weights_name(dtype: Any) -> str:
    """ "float16" of torch.float16."""
    return str(dtype).removeprefix("torch.")


def _transformers() -> Any:
    try:
        from terrazzo.nn import transformers_model
    except ImportError as error:
        if not (error.name or "").startswith(("transformers", "huggingface_hub")):
            raise
        raise ToolchainError(f"load needs transformers ({error}); pip install 'terrazzo[transformers]'") from error
    return transformers_model


def read_config(source: Any, config: Any, trust_remote_code: bool = False) -> tuple[dict, Any]:
    """(what `save_pretrained` noted, text config without a quantization config)."""
    from copy import deepcopy

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


def kv_formats(kv: Any) -> tuple[str, str]:
    """Names of the formats of keys and values that `kv` asks for: one name, or a pair.

    Raises:
        ArgumentError: names `kv`: no such format, or none for its role.
    """
    return pair_of(kv)


def needs_scales(formats: tuple[str, str]) -> list[str]:
    """Those of the formats of keys and values whose scales are calibrated beforehand."""
    return [name for name in formats if FORMATS[name].scaling == "static"]


def _static(source: Source, formats: tuple[str, str], shape: Any) -> tuple[torch.Tensor | None, ...]:
    """Scales of keys and of values [layers, kv_heads or 1, D or 1], None for formats that have none."""
    made: list[torch.Tensor | None] = []
    for part, name in zip("kv", formats):
        made.append(source.scales(part, shape) if needs_scales((name, name)) else None)
        if made[-1] is not None and not bool((made[-1].isfinite() & (made[-1] > 0)).all()):
            constraint = "its static scales must be finite and above 0"
            raise ArgumentError(f"{part}_scale", float(made[-1].min()), constraint, "get the checkpoint again")
        if needs_scales((name, name)) and made[-1] is None:
            constraint = "needs calibrated scales, which the checkpoint does not have"
            raise ArgumentError("kv", name, constraint, "use int8 or int4, or terrazzo quantize --calibration TEXT")
    return tuple(made)


def generation_config(source: Any) -> Any:
    """The folder's, where there is one; else None.

    Raises:
        ArgumentError: names the file, where transformers cannot read it.
    """
    return None if isinstance(source, Mapping) else foreign.generation_config_of(weights.path_of(source))


def name_ends(model: Any, source: Any, config: Any, whole: Any = None) -> None:
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


class _Lazy(Mapping):
    """Tensors of files by name, read straight onto the device."""

    def __init__(self, files: Any, device: torch.device) -> None:
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

    def __iter__(self) -> Any:
        return iter(self.files.places)

    def __len__(self) -> int:
        return len(self.files.places)

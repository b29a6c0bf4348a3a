"""Every kernel that serving a model needs: its linear layers, experts, quantizers of activations, attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import activation, attention, model_layers, norm, rope
from terrazzo.ops.attention.cache.cache import residual_of
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.writing import rope_writing, writing
from terrazzo.ops.checkpoints import files
from terrazzo.ops.checkpoints.config import Config
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.kinds.table import KINDS
from terrazzo.ops.model_layers import Layers, Linear, joined, of_architecture, split
from terrazzo.ops.products import direct
from terrazzo.ops.products.kv import HEAD_DIMS
from terrazzo.ops.products.table import BY_RECORD
from terrazzo.ops.stored_layers import operator_of
from terrazzo.schedules import rows
from terrazzo.schedules.models import ARCHITECTURES, Architecture, get_model, layer_counts

SECONDS = {
    "w4a16.small_batch": 2.6, "w4a8.small_batch": 2.6, "w4ax.small_batch": 2.7, "w4a8.quantize_rows": 1.6,
    "w4ax.quantize_blocks": 1.8, "attention.decode": 3.8, "attention.write": 2.0, "attention.new_tokens": 1.8,
    "attention.rope_append": 2.6, "norm.rms_norm": 1.7, "activation.act_and_mul": 1.8, "rope.apply_rope": 1.6,
}  # fmt: skip
"""About what one kernel takes of an idle core."""
_OTHERS = 4.7
STARTING_S = 3.0
"""Until a compiling process has imported what it needs."""
_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Weights:
    """How weights are quantized that are not yet.

    Attributes:
        group_size: 0 is K. scale_dtype, dtype: None follow the model.
        operator: a record of `ops.products`; of stored weights, None is what the checkpoint means.
        static, zeros, ue8m0: of W8A8, as `Linear` has them.
    """

    group_size: int = 128
    symmetric: bool = False
    scale_dtype: str | None = None
    dtype: str | None = None
    operator: str | None = None
    static: bool = False
    zeros: bool = False
    ue8m0: bool = False

    def layers(self, architecture: Architecture, dtype: str) -> Layers:
        """The linear layers of an architecture in this form."""
        facts = dict(group_size=self.group_size, symmetric=self.symmetric, scale_dtype=self.scale_dtype or dtype)
        facts |= dict(static=self.static, zeros=self.zeros, ue8m0=self.ue8m0)
        return of_architecture(architecture, operator=self.operator or "w4a16", **facts)


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes:
        name: of the folder, or in the table.
        layers: as they are stored, not joined and not split.
        architecture: None where it is not known.
        dtype: of activations, "float16" or "bfloat16". stored: whether a checkpoint quantized its layers.
        skipped: what is not served -> why.
        depths: decoder layers, and those with experts, where `layers` has one of each kind; None where it has them all.
    """

    name: str
    layers: Layers
    architecture: Architecture | None
    dtype: str
    stored: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    depths: tuple[int, int] | None = None

    def times(self, names: Iterable[str]) -> int:
        """How many layers of the model these of `layers` stand for."""
        depth, sparse = self.depths or (1, 1)
        if self.depths is None:
            return len(list(names))
        of = lambda name: depth if name.startswith("attn.") else sparse if "expert" in name else depth - sparse
        return sum(map(of, names))


@dataclass
class Plan:
    """The kernels of a model, what of it they do not cover, and the packed layouts that they read.

    Attributes:
        requests: each once.
        skipped: name of a layer, or "attention" -> why there are no kernels for it.
        kinds: the linear layers, as `Layers` has them. layouts: name -> identity.
    """

    requests: dict[KernelRequest, None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    kinds: Mapping[Linear, Sequence[str]] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)


def is_packed(path: str | Path) -> bool:
    """Whether a folder's config.json says that Terrazzo packed it, and of what model."""
    config = _config(Path(path)) or {}
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") == "terrazzo" and "model_type" in config


def of_folder(path: str | Path, weights: Weights, *, all_skipped: bool = False, target: Target | None = None) -> Model:
    """A Hugging Face folder: its quantized layers, or, where it has none, those of its config.json.

    Args:
        weights: how float weights, or those of a folder without files of weights, are quantized; what the folder's
            quantization_config states counts first.
        all_skipped, target: see `model_layers.of_folder`.

    Raises:
        ArgumentError: no folder, or one that tells neither layers nor an architecture.
    """
    folder, skipped, architecture = Path(path), {}, None
    config = _config(folder)
    dtype = weights.dtype or _dtype(config or {})
    try:
        architecture = None if config is None else Architecture.of_config(config)
        skipped |= {"attention": "there is no config.json"} if config is None else {}
    except ArgumentError as error:
        skipped["attention"] = f"{error.argument} = {error.value}: {error.constraint}"
    stored = sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]
    if stored and Checkpoint(folder).layers():
        layers = model_layers.of_folder(folder, weights.operator, all_skipped=all_skipped, target=target)
        scales = {kind.scale_dtype for kind in layers.kinds} & set(_DTYPES.values())
        dtype = dtype or (scales.pop() if len(scales) == 1 else "float16")
        return Model(folder.name, layers, architecture, dtype, True, skipped)
    if architecture is None:
        reason = next(iter(skipped.values()))
        raise ArgumentError("folder", str(path), f"has no quantized layers, and {reason}", "see --model and --shape")
    dtype, stated = dtype or "float16", Config.of_folder(folder)
    weights = _stated(stated, weights, target) if stated.raw else weights
    own, depths = weights.layers(architecture, dtype), layer_counts(config)
    return Model(folder.name, own, architecture, dtype, bool(stated.raw), skipped, depths)


def _dtype(config: Mapping[str, Any]) -> str | None:
    """What a config.json says of the activations' dtype, itself or for its text model."""
    parts = [config, *(config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), Mapping))]
    said = [part[name] for part in parts for name in ("dtype", "torch_dtype") if isinstance(part.get(name), str)]
    return next((_DTYPES[it.removeprefix("torch.")] for it in said if it.removeprefix("torch.") in _DTYPES), None)


def _stated(config: Config, weights: Weights, target: Target | None) -> Weights:
    """What a quantization_config says of a usual layer; groups of a multiple of 128 are read as groups of 128."""
    layer, size = config.layer("model.layers.0.mlp.down_proj"), 128
    if layer.group_size == -1:
        size = 0
    elif layer.group_size is not None and layer.group_size % 128:
        size = layer.group_size
    symmetric = config.raw.get("zero_point") is False if layer.symmetric is None else layer.symmetric
    operator, inputs = weights.operator, ""
    e4m3 = direct.W8A8_FP8
    floats = bool(layer.inputs) or layer.format in e4m3.conventions or layer.version == "float-quantized"
    stored = layer.bits == 8 and (floats or layer.version == "int-quantized")
    product = e4m3 if floats else direct.W8A8
    (convention,) = product.conventions
    found = operator_of(convention, layer, target) if stored and not operator else operator
    if found is not None and BY_RECORD[found].direct:
        operator, inputs = product.record, (layer.inputs if floats else layer.activations) or ""
    forms = dict(static="static" in inputs, zeros="asymmetric" in inputs, ue8m0="ue8m0" in inputs)
    return replace(weights, group_size=size, symmetric=symmetric, operator=operator, **forms)


def of_name(name: str, weights: Weights) -> Model:
    """A model of schedules/models.py.

    Raises:
        ArgumentError: one that is not there.
    """
    get_model(name)
    architecture, dtype = ARCHITECTURES[name], weights.dtype or "float16"
    return Model(name, weights.layers(architecture, dtype), architecture, dtype)


def _config(folder: Path) -> dict[str, Any] | None:
    """The object in a folder's config.json, None where there is none."""
    if not folder.exists():
        raise ArgumentError("folder", str(folder), "is no folder of this machine", "download the model first")
    file = files.member(folder if folder.is_dir() else folder.parent, "config.json")
    return None if file is None else files.read_object(file)


def plan(model: Model, serving: Serving) -> Plan:
    """The kernels of a model for every number of tokens.

    Raises:
        ArgumentError: an option that no kernel serves.
    """
    made, architecture = Plan(skipped=dict(model.skipped)), model.architecture
    if serving.linear:
        own = split(model.layers, serving.ranks, architecture.kv_heads if architecture else serving.ranks)
        layers = joined(own, serving.parts)
        made.kinds = layers.kinds
        made.skipped |= layers.skipped
        _linear(made, layers, architecture, serving)
        if architecture is not None and layers.kinds:
            _rows(made, architecture, serving)
    if architecture is not None:
        _attention(made, architecture, serving)
    return made


def _linear(made: Plan, layers: Layers, model: Architecture | None, serving: Serving) -> None:
    from terrazzo.layouts.instances import get_instance

    for kind, names in layers.kinds.items():
        if why := KINDS[kind.operator].skipped(kind, serving.target):
            made.skipped[names[0]] = why
            continue
        made.requests |= dict.fromkeys(layer_requests(kind, serving, model.top_k if model else 1))
    for operator in dict.fromkeys(kind.operator for kind in layers.kinds):
        name = BY_RECORD[operator].layout
        made.layouts[name] = get_instance(name).identity


def layer_requests(kind: Linear, serving: Serving, top_k: int = 1) -> list[KernelRequest]:
    """The kernels of one kind of linear layer, its quantizers of activations among them.

    Args:
        top_k: experts that each token of a step takes, where the layer has experts.
    """
    own = KINDS[kind.operator]
    return own.experts_requests(kind, serving, top_k) if kind.experts else own.requests(kind, serving)


def _rows(made: Plan, model: Architecture, serving: Serving) -> None:
    """Norms, gates and rotary positions between the layers."""
    at, dtype = serving.target, serving.dtype
    m = serving.tokens(rows.tokens(at)) or rows.tokens(at)
    facts = dict(m=m, dtype=dtype, target=at)
    quants = sorted({str(quant): quant for quant in (KINDS[it.operator].quant(it) for it in made.kinds)}.items())
    if model.hidden % rows.VECTOR == 0 < model.hidden <= rows.MAX_COLUMNS:
        for quant, residual in [(q, r) for _, q in quants for r in (False, True)] + [({}, True)]:
            made.requests |= dict.fromkeys(norm.kernel_requests(model.hidden, **facts, residual=residual, **quant))
    for width in {model.ffn, model.expert_ffn, model.shared_ffn}:
        own = width // serving.ranks
        if own and own % rows.VECTOR == 0 and own <= rows.MAX_COLUMNS:
            for _, quant in quants:
                made.requests |= dict.fromkeys(activation.kernel_requests(own, **facts, **quant))
    if model.head_dim % 16 == 0:
        made.requests |= dict.fromkeys(rope.kernel_requests(model.head_dim, dtype=dtype, target=at))


def _attention(made: Plan, model: Architecture, serving: Serving) -> None:
    if not serving.kv:
        return
    heads, kv_heads = model.heads // serving.ranks, max(1, model.kv_heads // serving.ranks)
    if model.heads % serving.ranks:
        constraint = f"{model.heads} query heads cannot be shared by so many ranks"
        raise ArgumentError("tensor_parallel", serving.ranks, constraint, "use fewer ranks")
    if model.head_dim not in HEAD_DIMS:
        made.skipped["attention"] = f"head_dim is {model.head_dim}, attention serves {', '.join(map(str, HEAD_DIMS))}"
        return
    facts = dict(heads=heads, kv_heads=kv_heads, head_dim=model.head_dim, dtype=serving.dtype, page=serving.page)
    facts |= dict(target=serving.target, softcap=model.softcap, sinks=model.sinks)
    for keys, values in serving.kv:
        layout = CacheLayout(keys, values, model.head_dim)
        kind = dict(rotary_dim=model.head_dim, rope="neox", norm="none", numerics="fused", target=serving.target)
        turned = (layout, serving.dtype, serving.page, residual_of(layout, None))
        if not writing.slides(layout, turned[-1]):  # a sliding ring is written behind apply_rope
            made.requests[rope_writing.request(*turned, **kind)] = None
        for at, q_len in enumerate(serving.q_lens):
            found = attention.kernel_requests(keys, values, q_len=q_len, prefill=at == 0, **facts)
            made.requests |= dict.fromkeys(found)
        identity = CacheLayout(keys, values, model.head_dim).identity
        made.layouts[f"kv.{keys}/{values}.d{model.head_dim}"] = identity


def seconds(request: KernelRequest) -> float:
    """About how long a kernel takes to compile, seconds of an idle core."""
    return SECONDS.get(request.name, _OTHERS)


def counts(requests: Mapping[KernelRequest, None]) -> dict[str, int]:
    """Kernels by name, the most first."""
    found: dict[str, int] = {}
    for request in requests:
        found[request.name] = found.get(request.name, 0) + 1
    return dict(sorted(found.items(), key=lambda it: -it[1]))

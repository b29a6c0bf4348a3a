"""`loaded`: a model of `load`, and the classes of such models. Importing this module imports transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import claims, folders, foreign, reading, transformers_model
from terrazzo.nn.architectures import Builder, Shape, shape_of
from terrazzo.nn.decoder import Rotary
from terrazzo.nn.dense import Dense
from terrazzo.nn.formats import Format
from terrazzo.nn.linear import Linear
from terrazzo.nn.parallel import SharedHead, TensorParallel, shared_heads
from terrazzo.nn.reading import Asked, FileTensors, From
from terrazzo.nn.sources import Published, Source, Stored, quantized
from terrazzo.ops import stored_layers
from terrazzo.ops.checkpoints import Checkpoint, TensorFiles
from transformers import AutoModelForCausalLM, PretrainedConfig

Head = Dense | Linear | SharedHead
VARYING_ROTARY = ("dynamic", "longrope")
"""Kinds of rotary positions whose rates depend on the text's length."""


class Causal(transformers_model.Causal):
    """What a Terrazzo model has beside its transformers class."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Causal:
        """See `terrazzo.load`."""
        return loaded(Asked(folder, **options))


@cache
def class_of(base: type) -> type:
    """A transformers class with what `Causal` adds."""
    return type(f"{folders.PREFIX}{base.__name__}", (Causal, base), {"__module__": __name__})


def __getattr__(name: str) -> type:
    """`class_of` by the name of a class, as pickles ask for it."""
    base = getattr(transformers, name.removeprefix(folders.PREFIX), None) if name.startswith(folders.PREFIX) else None
    if not isinstance(base, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return class_of(base)


def skeleton(config: PretrainedConfig) -> Causal:
    """The transformers model of a config on meta, of a class with `Causal`.

    Raises:
        ArgumentError: a config that transformers does not take, or one whose class is the folder's own code.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        remedy = "load it without trust_remote_code; a tokenizer that needs it can be passed to generate"
        raise ArgumentError(
            "config", type(config).__name__, "is no class of transformers, so no model is known", remedy
        )
    base = AutoModelForCausalLM._model_mapping[type(config)]
    try:
        with torch.device("meta"):
            made = base(config)
    except Exception as error:  # whatever transformers makes of fields that contradict each other
        constraint = f"makes no transformers model ({error!r})"
        raise ArgumentError("config", type(config).__name__, constraint, "repair config.json") from error
    made.__class__ = class_of(base)  # afterwards: transformers looks into the source of the class that it builds
    return made


def rotaries_of(model: Causal, shape: Shape) -> list[Rotary]:
    """Rates of each kind of rotary positions, as the transformers model computes them.

    Raises:
        ArgumentError: rates that depend on the text's length, or that are not finite.
    """
    kinds = getattr(model.config, "rope_parameters", None)
    with foreign.explained("rope_parameters", kinds, "makes no rotary positions", claims.REMEDY):
        made, found = type(model.model.rotary_emb)(model.config), []
    for kind in shape.rotary_kinds:
        stated = made.rope_type[kind] if isinstance(made.rope_type, dict) else made.rope_type
        if stated in VARYING_ROTARY:
            constraint = "has rates that depend on the text's length"
            raise ArgumentError("rope_type", stated, constraint, "use the model without this scaling")
        front = f"{kind}_" if kind else ""
        rates, factor = getattr(made, f"{front}inv_freq"), getattr(made, f"{front}attention_scaling")
        if not (bool(rates.isfinite().all()) and math.isfinite(factor)):
            raise ArgumentError("rope_parameters", kinds, "makes rates that are not finite", claims.REMEDY)
        found.append(Rotary(rates, float(factor)))
    return found


class Opened:
    """A model before any of its tensors is read.

    Args:
        source, config, dtype, kv, trust_remote_code: see `loading.load`.

    Attributes:
        own: what `save_pretrained` noted in the folder. config: of the text model. dtype: of activations.
        formats: of keys and values. shape: see `shape_of`.
        model: the transformers model on meta. rotaries: its positions' rates, on `device`.
    """

    def __init__(
        self,
        source: From,
        device: torch.device,
        *,
        config: PretrainedConfig | None = None,
        dtype: torch.dtype | None = None,
        kv: str | tuple[str, str] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.source, self.device, self.whole = source, device, config
        self.own, self.config = reading.read_config(source, config, trust_remote_code)
        self.dtype = reading.dtype_of(self.config, dtype)
        stated = self.own.get("kv", reading.weights_name(self.dtype))
        self.formats, self.shape = reading.kv_formats(stated if kv is None else kv), shape_of(self.config)

    def check(self, source: Source) -> None:
        """Hold the config against the tensors that there are; raises ArgumentError of the config's field."""
        claims.check_tensors(self.shape, source.names(), source.shape_of, source.layers)

    def build(self) -> None:
        """Make `model` and `rotaries`."""
        self.model = skeleton(self.config)
        self.rotaries = [rotary.to(self.device) for rotary in rotaries_of(self.model, self.shape)]

    def name_ends(self) -> None:
        """Have the model the folder's generation config, and the end tokens that the config states."""
        stated = reading.generation_config(self.source)
        claims.check_ends(stated or self.model.generation_config, "the folder")
        self.model.generation_config = stated or self.model.generation_config
        reading.name_ends(self.model, self.source, self.config, self.whole)


def loaded(asked: Asked) -> Causal:
    """See `loading.load`."""
    source, to = asked.source, reading.device_of(asked.device)
    facts = dict(config=asked.config, dtype=asked.dtype, kv=asked.kv, trust_remote_code=asked.trust_remote_code)
    opened, ranks = Opened(source, to, **facts), TensorParallel.of(asked.tensor_parallel)
    head_form, shape = asked.head_form, opened.shape
    if opened.own:
        asked.check_packed()
        made: Source = Stored(FileTensors(TensorFiles(source), to), to, opened.dtype)
    else:
        checkpoint = None if isinstance(source, Mapping) else Checkpoint(source, asked.format)
        made = Published(checkpoint, asked, to, opened.dtype)
        asked.check_published(made)
    opened.check(made)
    static = tuple(shared_heads(scales, shape.kv_heads, ranks) for scales in _static(made, opened.formats, shape))
    opened.build()
    opened.name_ends()
    model = opened.model
    with torch.no_grad():
        builder = Builder(shape, made, opened.rotaries, asked.progress, ranks)
        if head_form is not None and any(map(made.packs, builder.head_names)):
            raise ArgumentError("lm_head", str(head_form), "the source's head is quantized already", "leave it out")
        decoder = builder.decoder()
        model.lm_head = _head(builder.head(decoder), head_form, opened.dtype, asked.target)
    if asked.activations is not None and not made.quantizes_activations:
        constraint = "quantizes what MXFP4 weights multiply, and the source has none"
        remedy = f'leave it out; for float ones quantize="{stored_layers.of_mxfp4(asked.activations).word}"'
        raise ArgumentError("activations", asked.activations, constraint, remedy)
    own = (opened.formats, asked.max_tokens, model.config, static, ranks)
    model.model = transformers_model.Body(decoder, builder.own, *own)
    model.config.dtype = opened.dtype
    if not isinstance(source, Mapping):  # where its tokenizer lies, whoever made the config
        model.name_or_path = str(Path(source).absolute())
    return model.eval()


def _static(source: Source, formats: tuple[str, str], shape: Shape) -> tuple[torch.Tensor | None, ...]:
    """Scales of keys and of values [layers, kv_heads or 1, D or 1], None for formats that have none."""
    made: list[torch.Tensor | None] = []
    for part, name in zip("kv", formats):
        made.append(source.scales(part, shape) if reading.needs_scales((name, name)) else None)
        if made[-1] is not None and not bool((made[-1].isfinite() & (made[-1] > 0)).all()):
            constraint = "its static scales must be finite and above 0"
            raise ArgumentError(f"{part}_scale", float(made[-1].min()), constraint, "get the checkpoint again")
        if reading.needs_scales((name, name)) and made[-1] is None:
            constraint = "needs calibrated scales, which the checkpoint does not have"
            raise ArgumentError("kv", name, constraint, "use int8 or int4, or terrazzo quantize --calibration TEXT")
    return tuple(made)


def _head(head: Head, form: Format | None, dtype: torch.dtype, target: str | None) -> Head:
    """The head in a format, if that is given and the head is float."""
    if isinstance(head, SharedHead):
        return SharedHead(_head(head.part, form, dtype, target), head.ranks)
    if form is None or not isinstance(head, Dense):
        return head
    return Linear(quantized(form, head.weight, head.bias, dtype, {}, target))

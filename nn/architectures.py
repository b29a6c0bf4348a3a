"""Decoders of published architectures: which modules a config asks for, and which tensors of a checkpoint they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import claims, config_fields, foreign
from terrazzo.nn.attention import Attention
from terrazzo.nn.decoder import Decoder, DecoderLayer, Rotary
from terrazzo.nn.dense import Dense
from terrazzo.nn.joined import GateUpLinear, QKVLinear
from terrazzo.nn.leftovers import Leftovers
from terrazzo.nn.linear import Linear
from terrazzo.nn.mlp import MLP, SparseMLP
from terrazzo.nn.norm import RMSNorm
from terrazzo.nn.parallel import SharedHead, TensorParallel, local_shape
from terrazzo.nn.sources import Published, Source
from terrazzo.ops import weights

if TYPE_CHECKING:
    from terrazzo.nn.experts import GroupedLinear
    from transformers import PretrainedConfig

MODELS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", "gpt_oss")
"""Values of `model_type` in a config (of the text model, where there are several)."""
SWIGLU_OAI = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What gpt-oss's config says of the activation that "swiglu_oai" is."""
DAMAGED = "the checkpoint is damaged: get it again"
HEAD_DIMS = (64, 128, 256)
HEAD_LEAVES = ("weight", "qweight", "weight_packed", "words")
"""Of which a head has one: in floats or bytes, in two ways of 4-bit words, or packed by Terrazzo."""


@dataclass(frozen=True)
class Shape:
    """What builders read of a transformers config.

    Attributes:
        kind: of MODELS. vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim: sizes.
        eps: of norms. offset: added to norm weights. activation: of the MLP. scale: of the softmax, None for
            1 / sqrt(head_dim). windows: of each layer, 0 for none. rotary_kinds: layer types with angles of their own.
        layer_types: of each layer. experts, top_k, normalize: of sparse layers; sparse: whether each layer is one.
        embedding_scale: of embeddings. tied: whether the head is the embedding.
        biased: layers of a decoder layer that have a bias, as "self_attn.q_proj".
        positions: tokens that a sequence may have, None where the config does not say.
    """

    kind: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    offset: float
    activation: str
    scale: float | None
    windows: tuple[int, ...]
    layer_types: tuple[str, ...]
    experts: int
    top_k: int
    normalize: bool
    sparse: tuple[bool, ...]
    embedding_scale: float
    tied: bool
    biased: tuple[str, ...] = ()
    positions: int | None = None

    @property
    def rotary_kinds(self) -> tuple[str, ...]:
        """Layer types that have angles of their own."""
        return tuple(sorted(set(self.layer_types))) if self.kind == "gemma3_text" else ("",)


def shape_of(config: PretrainedConfig) -> Shape:
    """Of a transformers text config.

    Raises:
        ArgumentError: an architecture or a size that no operator serves, or a field that is no such thing.
    """
    with foreign.explained("config", type(config).__name__, "has fields that no decoder is made of", claims.REMEDY):
        claims.check_plain(vars(config))
        shape = _shape_of(config)
    claims.check_shape(shape)
    return shape


def _shape_of(config: PretrainedConfig) -> Shape:
    kind, get = config.model_type, lambda name, default=None: getattr(config, name, None) or default
    if kind not in MODELS:
        remedy = "give transformers' own model to terrazzo.integrations.transformers.pack, which swaps its layers"
        raise ArgumentError("model_type", kind, f"must be one of {MODELS}", remedy)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = get("head_dim", config.hidden_size // heads)
    if head_dim not in HEAD_DIMS:
        raise ArgumentError("head_dim", head_dim, f"must be one of {HEAD_DIMS}", "take a model with such heads")
    gemma, oai, sparse = kind == "gemma3_text", kind == "gpt_oss", kind in ("mixtral", "qwen3_moe", "gpt_oss")
    types = config_fields.layer_types(config)
    window = get("sliding_window", 0)
    for name, causal in (("use_bidirectional_attention", False), ("is_causal", True)):  # transformers obeys both
        if getattr(config, name, causal) not in (causal, None):
            raise ArgumentError(name, not causal, "decoding is causal", "take a causal model")
    config_fields.check_fields(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping") if gemma else ():
        if get(name):
            raise ArgumentError(name, get(name), "is not served in Gemma 3", "swap its layers by hand with nn.Linear")
    for name, value in SWIGLU_OAI.items() if oai else ():
        if getattr(config, name, value) != value:
            remedy = "swap its layers by hand with nn.Linear and nn.Experts"
            raise ArgumentError(name, getattr(config, name), f"must be {value!r}, as gpt-oss's experts have it", remedy)
    dense = set(get("mlp_only_layers", ()))
    parts = "qkv" if kind == "qwen2" else "qkvo" if get("attention_bias", False) else ""
    biased = [f"self_attn.{part}_proj" for part in parts]
    biased += [f"mlp.{part}_proj" for part in ("gate", "up", "down") if kind == "llama" and get("mlp_bias", False)]
    step = get("decoder_sparse_step", 1)
    return Shape(
        kind=kind, vocabulary=config.vocab_size, hidden=config.hidden_size, intermediate=config.intermediate_size,
        layers=layers, heads=heads, kv_heads=get("num_key_value_heads", heads), head_dim=head_dim,
        eps=config.rms_norm_eps, offset=1.0 if gemma else 0.0,
        activation="swiglu_oai" if oai else get("hidden_activation" if gemma else "hidden_act", "silu"),
        scale=config.query_pre_attn_scalar**-0.5 if gemma else None,
        windows=tuple(window if kind_ == "sliding_attention" else 0 for kind_ in types), layer_types=types,
        experts=get("num_local_experts", get("num_experts", 0)) if sparse else 0,
        top_k=get("num_experts_per_tok", 0) if sparse else 0,
        normalize=kind in ("mixtral", "gpt_oss") or bool(get("norm_topk_prob", False)),
        sparse=tuple(sparse and i not in dense and (i + 1) % step == 0 for i in range(layers)),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0, tied=bool(get("tie_word_embeddings", False)),
        biased=tuple(biased), positions=config_fields.positions(config),
    )  # fmt: skip


Layer = TypeVar("Layer", bound="Linear | Dense | GroupedLinear | SharedHead")


class Builder:
    """Makes a decoder layer by layer, so that nothing but the model and the layer at hand is in memory.

    Args:
        shape: see `shape_of`. source: of tensors. rotaries: of each of `shape.rotary_kinds`.
        progress: called with (layers done, all layers). ranks: that share the layers, None for one.
    """

    def __init__(
        self,
        shape: Shape,
        source: Source,
        rotaries: list[Rotary],
        progress: Callable[[int, int], None] | None = None,
        ranks: TensorParallel | None = None,
    ) -> None:
        self.shape, self.source, self.rotaries, self.ranks = shape, source, rotaries, ranks
        self.own = local_shape(shape, ranks)
        self.columns = None if ranks is None else ranks.columns()
        rows = None if ranks is None else ranks.rows()
        self.halves = () if ranks is None else (rows, rows)
        self.expert_shares = (rows, self.columns)
        unit = shape.head_dim
        self.heads = () if ranks is None else (ranks.rows(unit), *[ranks.rows(unit, replicate=True)] * 2)
        self.progress = progress or (lambda done, total: None)
        self.root = self._root()
        self.leftovers = None
        if isinstance(source, Published):
            own, cut = source.parts_of(f"{self.root}embed_tokens"), source.cut_layers
            names = [name for name in source.names() if name not in own]
            self.leftovers = Leftovers(shape.kind, names, self.root, self.head_names, shape.layers, cut)
            self.leftovers.check()
            self._check_head()
            self._check_biases()

    def _root(self) -> str:
        """What stands in front of "layers.0." in the checkpoint's names, and of "embed_tokens"."""
        for name in self.source.names():
            before, found, _ = name.partition("layers.0.input_layernorm.weight")
            if found:
                return before
        return "model."

    def decoder(self) -> Decoder:
        """All of it but the head."""
        s, layers = self.shape, []
        own = "decoder"
        embedding = self.embedding(f"{own}.embed_tokens.weight")
        for index in range(s.layers):
            layers.append(self.layer(index, f"{own}.layers.{index}"))
            self.progress(index + 1, s.layers)
        norm = self.norm(f"{self.root}norm", f"{own}.norm")
        return Decoder(embedding, layers, norm, self.rotaries, s.embedding_scale)

    def embedding(self, own: str) -> torch.Tensor:
        """[vocabulary, hidden]."""
        name = f"{self.root}embed_tokens.weight"
        return _shaped(self.source.vector(name, own), (self.shape.vocabulary, self.shape.hidden), name)

    def head(self, decoder: Decoder) -> Linear | Dense | SharedHead:
        """Logits of hidden states."""
        return self.head_of(decoder.embed_tokens.weight.detach())

    @property
    def head_names(self) -> list[str]:
        """Names that the head may have in the checkpoint."""
        roots = ("", self.root, self.root.removesuffix("model."))
        return list(dict.fromkeys(f"{root}lm_head" for root in roots))

    def head_of(self, embedding: torch.Tensor) -> Linear | Dense | SharedHead:
        """The head: the embedding's weights where they are tied."""
        sizes = (self.shape.vocabulary, self.shape.hidden)
        for name in self.head_names:
            if not self.shape.tied and any(self.source.has(f"{name}.{leaf}") for leaf in HEAD_LEAVES):
                return self._head(name, sizes)
            if self.shape.tied and any(self.source.has(f"{name}.{leaf}") for leaf in ("qweight", "weight_packed")):
                constraint = f"but {name} has codes of its own"
                raise ArgumentError("tie_word_embeddings", True, constraint, "set it to false in config.json")
            if self.shape.tied and self.source.has(f"{name}.weight"):
                stored = self.source.vector(f"{name}.weight", f"{name}.weight")
                if not torch.equal(stored, embedding):
                    constraint = f"but {name}.weight is not the embedding's"
                    raise ArgumentError("tie_word_embeddings", True, constraint, "set it to false in config.json")
        if self.source.has("lm_head.words"):  # in 4 bits, whatever the config ties
            return self._head("lm_head", sizes)
        self._check_head()
        if self.shares_head:
            share = self.ranks.rows()
            (span,) = share.cut(len(embedding), 0).spans
            return SharedHead(Dense(embedding[slice(*span)]), self.ranks)  # rows of the embedding, not a copy
        return Dense(embedding)

    def _check_head(self) -> None:
        """A head of its own is there where the embedding is none."""
        leaves = [f"{name}.{leaf}" for name in self.head_names for leaf in HEAD_LEAVES]
        if not self.shape.tied and not any(map(self.source.has, leaves)):
            constraint = "is missing, and tie_word_embeddings is false: the model gives no logits"
            raise ArgumentError("name", "lm_head.weight", constraint, "get the missing shard, or take a causal model")

    def _check_biases(self) -> None:
        """Layers have the biases that the architecture has: without one they would be read as another model's."""
        for index in range(self.shape.layers):
            for part in self.shape.biased:
                name = f"{self.root}layers.{index}.{part}.bias"
                if not self.source.has(name):
                    constraint = f"is missing: {part} of a {self.shape.kind} with this config has a bias"
                    remedy = "get the missing shard, or take the checkpoint's own config.json"
                    raise ArgumentError("name", name, constraint, remedy)

    @property
    def shares_head(self) -> bool:
        """Whether ranks share the vocabulary's rows: each must have as many."""
        return self.ranks is not None and self.shape.vocabulary % self.ranks.world == 0

    def _head(self, name: str, sizes: tuple[int, int]) -> Linear | Dense | SharedHead:
        share = self.ranks.rows() if self.shares_head else None
        made = self.source.head(name, "lm_head", share)
        return _sized(made if share is None else SharedHead(made, self.ranks), *sizes, name)

    def norm(self, name: str, own: str) -> RMSNorm:
        weight = self._vector(f"{name}.weight", f"{own}.weight")
        return RMSNorm(_shaped(weight, (self.shape.hidden,), f"{name}.weight"), self.shape.eps)

    def _vector(self, name: str, own: str) -> torch.Tensor:
        """A norm's weight; with an offset in float32, which holds the sum."""
        return self.source.gain(name, own, self.shape.offset)

    def layer(self, index: int, own: str) -> DecoderLayer:
        s, name = self.shape, f"{self.root}layers.{index}"
        kind = s.layer_types[index] if len(s.rotary_kinds) > 1 else s.rotary_kinds[0]
        gemma = s.kind == "gemma3_text"
        second = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        post = ("post_attention_layernorm", "post_feedforward_layernorm")
        made = DecoderLayer(
            self.attention(index, f"{name}.self_attn", f"{own}.self_attn"),
            self.sparse(name, f"{own}.mlp") if s.sparse[index] else self.mlp(f"{name}.mlp", f"{own}.mlp"),
            self.norm(f"{name}.input_layernorm", f"{own}.input_norm"),
            self.norm(f"{name}.{second}", f"{own}.mlp_norm"),
            self.norm(f"{name}.{post[0]}", f"{own}.post_attention") if gemma else None,
            self.norm(f"{name}.{post[1]}", f"{own}.post_mlp") if gemma else None,
            s.rotary_kinds.index(kind),
        )
        if self.leftovers is not None:
            self.leftovers.check_layer(index, self.source.seen)
        return made

    def attention(self, index: int, name: str, own: str) -> Attention:
        s, mine, source = self.shape, self.own, self.source
        sizes = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)
        qkv = source.joined(QKVLinear, [f"{name}.{p}_proj" for p in "qkv"], sizes, f"{own}.qkv_proj", self.heads)
        outputs, inputs = mine.heads * s.head_dim + 2 * mine.kv_heads * s.head_dim, mine.heads * s.head_dim
        _sized(qkv, outputs, s.hidden, f"{name}.qkv_proj")
        norms = None
        if s.kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            norms = source.pair([f"{name}.{p}_norm.weight" for p in "qk"], f"{own}.norms", s.offset)
            _shaped(norms, (2, s.head_dim), f"{name}.q_norm and k_norm")
        out = source.linear(f"{name}.o_proj", f"{own}.o_proj", self.columns)
        _sized(out, s.hidden, inputs, f"{name}.o_proj")
        sinks = self.sinks(f"{name}.sinks", f"{own}.sinks") if s.kind == "gpt_oss" else None
        return Attention(
            qkv, out, heads=mine.heads, kv_heads=mine.kv_heads, head_dim=s.head_dim, layer=index, norms=norms,
            norm_eps=s.eps, scale=s.scale, window=s.windows[index], sinks=sinks, ranks=self.ranks,
        )  # fmt: skip

    def sinks(self, name: str, own: str) -> torch.Tensor:
        """float32 logits of the rank's heads that have no value."""
        whole = _shaped(self.source.gain(name, own, 0.0), (self.shape.heads,), name).float()
        return whole if self.ranks is None else self.ranks.rows().cut(len(whole), 0).of(whole)

    def mlp(self, name: str, own: str) -> MLP:
        s, mine, source = self.shape, self.own, self.source
        parts = [f"{name}.gate_proj", f"{name}.up_proj"]
        sizes = (s.intermediate, s.intermediate)
        both = source.joined(GateUpLinear, parts, sizes, f"{own}.gate_up_proj", self.halves)
        _sized(both, 2 * mine.intermediate, s.hidden, f"{name}.gate_proj and up_proj")
        down = source.linear(f"{name}.down_proj", f"{own}.down_proj", self.columns)
        return MLP(both, _sized(down, s.hidden, mine.intermediate, f"{name}.down_proj"), s.activation, self.ranks)

    def sparse(self, layer: str, own: str) -> SparseMLP:
        s, source = self.shape, self.source
        if s.kind == "gpt_oss":
            return self.gpt_oss(f"{layer}.mlp", own)
        old = source.has(f"{layer}.block_sparse_moe.gate.weight")  # Mixtral's names
        name = f"{layer}.block_sparse_moe" if old else f"{layer}.mlp"
        gate, up, down = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        router = source.vector(f"{name}.gate.weight", f"{own}.router")
        _shaped(router, (s.experts, s.hidden), f"{name}.gate.weight")
        if source.has(f"{name}.experts.gate_up_proj"):
            both, back = (f"{name}.experts.{part}" for part in ("gate_up_proj", "down_proj"))
            experts = source.stacked(both, back, s.activation, f"{own}.experts", self.expert_shares)
        else:
            parts = [[f"{name}.experts.{e}.{part}" for e in range(s.experts)] for part in (gate, up, down)]
            experts = source.experts(*parts, s.activation, f"{own}.experts", self.expert_shares)
        return SparseMLP(router, experts, s.top_k, s.normalize, self.ranks)

    def gpt_oss(self, name: str, own: str) -> SparseMLP:
        """A router with biases, and experts with biases whose gate and up rows take turns."""
        s, source = self.shape, self.source
        sizes = {"weight": (s.experts, s.hidden), "bias": (s.experts,)}
        router, bias = (
            _shaped(source.vector(f"{name}.router.{leaf}", f"{own}.router{end}"), sizes[leaf], f"{name}.router.{leaf}")
            for leaf, end in (("weight", ""), ("bias", "_bias"))
        )
        experts = source.interleaved(f"{name}.experts", s.activation, f"{own}.experts", self.expert_shares)
        both, back = experts.gate_up_proj, experts.down_proj
        _sized(both, 2 * self.own.intermediate, s.hidden, f"{name}.experts.gate_up_proj")
        _sized(back, s.hidden, self.own.intermediate, f"{name}.experts.down_proj")
        if len(experts) != s.experts:
            constraint = f"must be {s.experts} by the config"
            raise ArgumentError(f"{name}.experts", len(experts), constraint, "take the checkpoint's own config.json")
        return SparseMLP(router, experts, s.top_k, s.normalize, self.ranks, bias)


def _shaped(values: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """`values`, which have this shape and are finite."""
    if tuple(values.shape) != shape:
        constraint = f"must be {list(shape)} by the config"
        raise ArgumentError(name, list(values.shape), constraint, "take the checkpoint's own config.json")
    weights.check_finite(name, values, DAMAGED)
    return values


def _sized(layer: Layer, n: int, k: int, name: str) -> Layer:
    """`layer`, which has n outputs and k inputs; of a float one, finite weights."""
    seen, wanted = [layer.out_features, layer.in_features], [n, k]
    if seen != wanted:
        raise ArgumentError(name, seen, f"must be {wanted} by the config", "take the checkpoint's own config.json")
    own = layer.part if isinstance(layer, SharedHead) else layer
    for leaf in ("weight", "bias") if isinstance(own, Dense) else ():
        if (values := getattr(own, leaf)) is not None:
            weights.check_finite(f"{name}.{leaf}", values, DAMAGED)
    return layer
